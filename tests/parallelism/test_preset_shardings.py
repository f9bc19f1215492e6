"""How many parameters every shipped preset has, and how the meshes of MESHES split them.

tests/parallelism/shardings/<name>.txt has a line for each parameter: its name, with * for numbers
of layers, its logical axes, and the mesh axes of each dimension under every mesh.
`UPDATE_SHARDINGS=1 python -m pytest tests/parallelism/test_preset_shardings.py` rewrites them;
read the diff.
"""

import os
import re
from pathlib import Path

import pytest

from MaxText.config import config_files
from MaxText.config.loading import load_config
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.training import backend_defaults
from tests.parallelism.test_mesh import abstract_mesh

RECORDED = Path(__file__).parent / "shardings"
PRESETS = config_files.preset_names(config_files.MODELS)
EXPERTS = "gpt3_small_moe_8"
MESHES = [
    {"fsdp": 64},
    {"fsdp": 8, "tensor": 8},
    {"fsdp": 4, "fsdp_transpose": 4, "tensor": 4},
    {"fsdp": 8, "context": 8},
]
OF_EXPERTS = {"fsdp": 4, "expert": 4, "tensor": 4}


def shardings(config, meshes) -> tuple[str, Model]:
    model = Model(backend_defaults.resolve_auto(config.model, "tpu")[0])
    plans = [
        ShardingPlan(abstract_mesh(**sizes), config.mesh.logical_axis_rules) for sizes in meshes
    ]
    described = [sharding.describe(model.parameters) for sharding in plans]
    rows: dict[str, list[str]] = {}
    for name, info in model.parameters.items():
        axes = ",".join(axis or "-" for axis in info.logical_axes)
        row = " | ".join([axes, *(words(name) for words in described if words is not None)])
        found = rows.setdefault(re.sub(r"\b\d+\b", "*", name), [])
        if row not in found:
            found.append(row)
    title = " | ".join(sharding.mesh_sizes.replace(", ", " x ") for sharding in plans)
    lines = [f"{name}: {row}" for name, found in rows.items() for row in found]
    return "\n".join([f"meshes: {title}", *lines, ""]), model


def check(name, text):
    path = RECORDED / f"{name}.txt"
    if os.environ.get("UPDATE_SHARDINGS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    text, model = shardings(load_config(model_name=name), MESHES)
    check(name, text)
    # The first line of the preset states its size.
    first = (config_files.MODELS / f"{name}.yml").read_text().splitlines()[0]
    stated = re.search(r": ([\d,]+) parameters\.$", first)
    assert stated, first
    assert model.num_parameters == int(stated[1].replace(",", ""))


def test_experts():
    text, _ = shardings(load_config(f"gpt_neo/{EXPERTS}.yml"), [*MESHES, OF_EXPERTS])
    check(EXPERTS, text)


def test_nothing_recorded_is_stale():
    assert {path.stem for path in RECORDED.glob("*.txt")} == {*PRESETS, EXPERTS}
