"""auto_layout and auto_layout_and_mesh_shape: the mesh that is chosen, and how a run says so."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.loading import load
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten
from MaxText.cost import job_plan
from MaxText.cost.abstract_step import make_program
from MaxText.cost.auto_layout import choose_layout, choose_layout_for_devices, hardware_of_devices
from MaxText.cost.job_plan import MESH_KEYS, candidate_layouts, make_plan
from MaxText.errors import UserError
from MaxText.hardware.chips import CPU, Hardware, find_hardware
from tests.house.sources import run_main
from tests.small_models import tiny_config

BATCH: dict[str, Any] = {"per_device_batch_size": 2, "base_num_decoder_layers": 2}


def chosen(hardware, **keys):
    """Returns the configuration with the chosen mesh, and what was logged."""
    lines = []
    config = choose_layout(tiny_config(**BATCH | keys), hardware, lines.append)
    return config, lines


def mesh_of(config, hardware):
    """Returns the sizes above 1 by axis."""
    sizes = make_program(config, hardware).sizes.total
    return {axis: size for axis, size in zip(MESH_AXES, sizes, strict=True) if size > 1}


def test_without_the_keys_the_configuration_stays():
    config = tiny_config(**BATCH)
    unknown = SimpleNamespace(platform="gpu", device_kind="a device of the future")
    assert choose_layout(config, find_hardware("8xH100"), print) is config
    assert choose_layout_for_devices(config, [unknown], print) is config


@pytest.mark.parametrize(
    "sizes",
    [
        {},  # fsdp over all
        {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
        {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        {
            "ici_fsdp_parallelism": 2,
            "ici_fsdp_transpose_parallelism": 2,
            "ici_context_parallelism": 2,
        },
    ],
)
def test_a_layout_keeps_the_sizes_of_the_mesh(sizes):
    hardware = find_hardware("8xH100")
    before = mesh_of(tiny_config(**BATCH | sizes), hardware)
    config, lines = chosen(hardware, auto_layout=True, **sizes)
    after = mesh_of(config, hardware)

    def shape(mesh):
        others = [size for axis, size in mesh.items() if not axis.startswith("fsdp")]
        fsdp = mesh.get("fsdp", 1) * mesh.get("fsdp_transpose", 1)
        return sorted([*others, *([fsdp] if fsdp > 1 else [])])

    assert shape(after) == shape(before)
    assert math.prod(after.values()) == 8
    named = ", ".join(f"{axis} {size}" for axis, size in after.items())
    assert lines[0].startswith(f"auto_layout: chose the mesh {named} for 8 x H100: ")


def test_the_fastest_layout_that_fits_is_chosen():
    hardware = find_hardware("4xH100")
    keys: dict[str, Any] = {"ici_fsdp_parallelism": 4}
    config, _ = chosen(hardware, auto_layout=True, **keys)
    seconds = []
    for mesh in candidate_layouts(tiny_config(**BATCH | keys), hardware):
        try:
            seconds.append(make_plan(tiny_config(**{**BATCH, **mesh}), hardware).time.estimate)
        except (UserError, ConfigurationError):
            continue  # the model or the batch does not divide
    assert len(seconds) > 2
    assert make_plan(config, hardware).time.estimate == min(seconds)


def test_a_mesh_shape_is_chosen_for_slices():
    hardware = find_hardware("2xv5e-2")
    config, lines = chosen(hardware, auto_layout_and_mesh_shape=True, ici_fsdp_parallelism=2)
    assert math.prod(mesh_of(config, hardware).values()) == 4
    assert lines[0].startswith("auto_layout_and_mesh_shape: chose the mesh ")
    layout, _ = chosen(hardware, auto_layout=True)
    assert math.prod(mesh_of(layout, hardware).values()) == 4


def test_only_the_mesh_changes_if_that_suffices():
    keys: dict[str, Any] = {"auto_layout_and_mesh_shape": True, "run_name": "a"}
    config, lines = chosen(find_hardware("8xH100"), **keys)
    before, after = flatten(tiny_config(**BATCH | keys)), flatten(config)
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert changed <= {*MESH_KEYS}
    # The line repeats the choice when it is typed.
    typed_keys = dict(word.split("=") for word in lines[1].partition("with: ")[2].split())
    assert typed_keys.keys() == changed
    typed_sizes: dict[str, Any] = {name: int(text) for name, text in typed_keys.items()}
    typed = tiny_config(**BATCH | typed_sizes)
    assert all(flatten(typed)[name] == after[name] for name in MESH_KEYS)


def test_microbatches_and_remat_change_if_nothing_fits_otherwise(monkeypatch):
    monkeypatch.setattr("MaxText.cost.job_plan.POLICIES", ("none", "full"))
    hardware = find_hardware("2xH100")
    keys = {
        "base_num_decoder_layers": 1,
        "per_device_batch_size": 4,
        "max_target_length": 64,
        "remat_policy": "none",
    }
    needed = make_plan(tiny_config(**BATCH | keys), hardware).memory.total
    monkeypatch.setattr(Hardware, "memory", 0.8 * needed)
    config, _ = chosen(hardware, auto_layout=True, **keys)
    plan = make_plan(config, hardware)
    assert plan.fits
    assert plan.program.tokens_per_update == 2 * 4 * 64
    accumulates = config.batch.gradient_accumulation_steps > 1
    assert accumulates or config.model.memory.remat_policy != "none"


def test_what_cannot_fit_is_said(monkeypatch):
    monkeypatch.setattr("MaxText.cost.job_plan.POLICIES", ("full",))
    monkeypatch.setattr(Hardware, "memory", 1000.0)
    with pytest.raises(job_plan.NothingFits, match=r"auto_layout: nothing fits .*_mesh_shape=true"):
        chosen(find_hardware("2xH100"), auto_layout=True, per_device_batch_size=0.5)


@pytest.mark.parametrize(
    ("kind", "platform", "slices", "name", "memory_gb"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", 1, "H100", 80),
        ("NVIDIA H100 NVL", "gpu", 1, None, None),
        ("NVIDIA A100-SXM4-40GB", "gpu", 2, "A100-40", 40),
        ("NVIDIA A100-PCIE-40GB", "gpu", 1, "A100-40", 40),
        ("TPU v5 lite", "tpu", 2, "v5e", None),
        ("TPU v5p", "tpu", 1, "v5p", None),
        ("cpu", "cpu", 1, "cpu", None),
        ("NVIDIA Rubin", "gpu", 1, None, None),
    ],
)
def test_hardware_of_devices(kind, platform, slices, name, memory_gb):
    devices = [
        SimpleNamespace(platform=platform, device_kind=kind, slice_index=index % slices)
        for index in range(8)
    ]
    if name is None:
        with pytest.raises(UserError, match=f"auto_layout: .*{kind} are unknown"):
            hardware_of_devices(devices)
        return
    hardware = hardware_of_devices(devices)
    assert (hardware.chip.name, hardware.num_devices, hardware.num_slices) == (name, 8, slices)
    assert hardware.chip is CPU or memory_gb in (None, hardware.memory / 1e9)


@pytest.mark.parametrize(
    "words",
    [
        ["--auto_layout"],
        ["--auto-layout"],
        ["--auto_layout", "true"],
        ["--auto_layout=true"],
        ["auto_layout=True"],
    ],
)
def test_flags_as_typed_for_gpt_neo(words):
    mesh = load(["configs/gpt_neo/gpt3_small_256.yml", *words, "steps=3"]).config.mesh
    assert (mesh.auto_layout, mesh.auto_layout_and_mesh_shape) == (True, False)
    mesh = load(["--auto_layout", "false", "--auto_layout_and_mesh_shape"]).config.mesh
    assert (mesh.auto_layout, mesh.auto_layout_and_mesh_shape) == (False, True)


def test_both_keys_contradict_each_other():
    with pytest.raises(ConfigurationError, match="set only one"):
        load(["--auto_layout", "--auto_layout_and_mesh_shape"])


def test_plan_says_the_mesh(capsys):
    keys = ("base_num_decoder_layers=2", "max_target_length=64", "per_device_batch_size=2")
    arguments = ["model_name=gpt2-124m", *keys, "hardware=4xH100"]
    assert run_main("plan.py", [*arguments, "--auto_layout_and_mesh_shape"]) == 0
    output = capsys.readouterr().out
    mesh = output.partition("chose the mesh ")[2].partition(" for ")[0]
    assert f"parameters; mesh: {mesh};" in output
