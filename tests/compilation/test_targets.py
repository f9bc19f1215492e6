"""The table of machines, and what is said where one cannot be compiled for."""

import math
import os

import pytest
from jax.experimental import topologies

from MaxText.compilation import targets
from MaxText.errors import UserError
from MaxText.hardware import chips as hardware


@pytest.mark.parametrize(
    ("name", "topology", "num_devices"),
    [
        ("v4-8", "v4:2x2x1", 4),
        ("v5e-1", "v5e:1x1", 1),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("V6E-8", "v6e:2x4", 8),
        ("h100-8", "1x1x8", 8),
        ("h200-2", "1x1x2", 2),
        ("a100-32", "1x4x8", 32),
        ("cpu-3", "", 3),
        ("8xH100", "1x1x8", 8),
        ("16xa100", "1x2x8", 16),
        ("2xv5e-16", "v5e:4x4", 16),
        ("cpu", "", 1),
    ],
)
def test_names_that_users_know(name, topology, num_devices):
    found = targets.find_target(name)
    assert (found.topology, found.num_devices) == (topology, num_devices)


def test_plan_and_compiler_read_the_same_names():
    for name in ("v5p-8", "v5e-256", "2xv5litepod-16", "h100-8", "8xH100", "a100-8", "cpu-4"):
        target, planned = targets.find_target(name), hardware.find_hardware(name)
        assert target.num_slices * target.num_devices == planned.num_devices, name
        assert target.platform == planned.chip.platform
    assert targets.find_target("v5e-16", num_slices=2) == targets.find_target("2xv5e-16")


def test_arrangements_have_as_many_chips_as_the_names_say():
    for name in targets.tpu_names():
        found = targets.find_target(name)
        assert found.name == name
        sizes = found.topology.partition(":")[2].split("x")
        assert math.prod(map(int, sizes)) == found.num_devices
        cores = 2 if name.startswith(("v4", "v5p")) else 1
        assert found.num_devices * cores == int(name.partition("-")[2])


def test_tori_are_closed():
    names = ("v5p-64", "v5p-128", "v5e-128", "v6e-256")
    wrap = [targets.find_target(name).options.get("wrap") for name in names]
    assert wrap == [None, (True, True, True), (False, True, False), (True, True, False)]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5p-7", "v5p-8, v5p-16"),
        ("v9-8", r"(?s)v4-8.*h100-8.*cpu-1"),
        ("v5p", "v5p-8"),
        ("h100-0", "h100-8"),
        ("h100-12", "8"),
        ("", "v5p-8"),
    ],
)
def test_other_names_are_refused_with_those_there_are(name, near):
    with pytest.raises(UserError, match=near):
        targets.find_target(name)


def test_machines_that_are_not_there(monkeypatch):
    with pytest.raises(UserError, match="compile_topology=h100-16"):  # TPUs alone come in slices
        targets.find_target("h100-8", num_slices=2)
    with pytest.raises(UserError, match="different numbers of slices"):
        targets.find_target("2xv5e-16", num_slices=4)
    with pytest.raises(UserError, match="cpu-999"):
        targets.devices(targets.find_target("cpu-999"))

    def fail(*arguments, **keys):
        raise RuntimeError("no libtpu.so\nmore")

    # The missing plug-in is named.
    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(UserError, match=r"(?s)\(no libtpu.so\).*'\.\[tpu\]'"):
        targets.devices(targets.find_target("v5e-4"))
    with pytest.raises(UserError, match=r"'\.\[gpu\]'"):
        targets.devices(targets.find_target("a100-4"))


def test_the_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    targets.prepare_environment(targets.find_target("h200-8"))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    targets.prepare_environment(targets.find_target("cpu-4"))
    assert os.environ["XLA_FLAGS"].split()[1] == "--xla_force_host_platform_device_count=4"
