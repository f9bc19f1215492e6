"""The table of machines, and what is said where one cannot be compiled for."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest

from MaxText.compilation import nvidia, targets
from MaxText.errors import UserError


@pytest.mark.parametrize(
    ("name", "topology", "num_devices"),
    [
        ("v4-8", "v4:2x2x1", 4),
        ("v4-128", "v4:4x4x4", 64),
        ("v5e-1", "v5e:1x1", 1),
        ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5e-256", "v5e:16x16", 256),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-12288", "v5p:16x16x24", 6144),
        ("V6E-8", "v6e:2x4", 8),
        ("h100-8", "1x1x8", 8),
        ("h200-2", "1x1x2", 2),
        ("a100-32", "1x4x8", 32),
        ("cpu-3", "", 3),
    ],
)
def test_names_that_users_know(name, topology, num_devices):
    found = targets.find(name)
    assert (found.topology, found.num_devices) == (topology, num_devices)


def test_arrangements_have_as_many_chips_as_the_names_say():
    for name in targets.names():
        found = targets.find(name)
        assert found.name == name
        sizes = found.topology.partition(":")[2].split("x")
        assert math.prod(map(int, sizes)) == found.num_devices
        cores = 2 if name.startswith(("v4", "v5p")) else 1
        assert found.num_devices * cores == int(name.partition("-")[2])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5p-7", "v5p-8, v5p-16"),
        ("v5e-12", "v5e-8, v5e-16"),
        ("v9-8", r"(?s)v4-8.*h100-8.*cpu-1"),
        ("v5p", r"(?s)no such machine.*v5p-8"),
        ("h100-0", "no such machine"),
        ("h100-12", "multiple of 8"),
        ("", "no such machine"),
        ("v5p-8;rm", "no such machine"),
    ],
)
def test_other_names_are_refused_with_those_there_are(name, words):
    with pytest.raises(UserError, match=words):
        targets.find(name)


def test_only_tpus_come_in_slices():
    with pytest.raises(UserError, match="compile_topology=h100-16"):
        targets.devices(targets.find("h100-8"), num_slices=2)


def test_more_simulated_devices_than_there_are():
    with pytest.raises(UserError, match="jax simulates"):
        targets.devices(targets.find("cpu-999"))


def test_a_missing_plug_in_is_named(monkeypatch):
    from jax.experimental import topologies

    def fail(*arguments, **keys):
        raise RuntimeError("no libtpu.so\nmore")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    with pytest.raises(UserError, match=r"(?s)\(no libtpu.so\).*install libtpu.*'\.\[tpu\]'"):
        targets.devices(targets.find("v5e-4"))
    with pytest.raises(UserError, match=r"(?s)CUDA plug-in.*'\.\[gpu\]'"):
        targets.devices(targets.find("a100-4"))


def test_the_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    targets.prepare_environment(targets.find("h200-8"))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    targets.prepare_environment(targets.find("cpu-4"))
    assert os.environ["XLA_FLAGS"].split()[1] == "--xla_force_host_platform_device_count=4"


def test_descriptions_name_the_memory():
    for kind, text in nvidia.DESCRIPTIONS.items():
        assert f"device_memory_size: {nvidia.MEMORY[kind]}\n" in text
        assert text.count("{") == text.count("}")


PROGRAM = """
from MaxText.compilation import targets
target = targets.find("v5e-4")
targets.prepare_environment(target)
for name in targets.names():
    target = targets.find(name)
    devices = targets.devices(target)
    assert len(devices) == target.num_devices, name
    print(name, devices[0].device_kind)
assert len(targets.devices(targets.find("v5e-4"), 2)) == 8
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_libtpu_knows_every_machine_of_the_table():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert kinds["v4-8"] == "TPU v4"
    assert kinds["v5e-16"] == "TPU v5 lite"
    assert kinds["v5p-128"] == "TPU v5"
    assert kinds["v6e-8"] == "TPU v6 lite"
