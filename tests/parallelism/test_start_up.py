"""Connecting processes, and devices that are not there: mistakes of the user's, not of jax's."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from MaxText.errors import UserError
from MaxText.parallelism import cluster, processes, start_up
from MaxText.parallelism.start_up import check_alike, connect, find_devices

OTHERS = {
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1:99",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no backend\nmore")])
def test_hardware_that_is_not_there(error, monkeypatch):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    reason = str(error).splitlines()[0] if str(error) else "it sees none on this machine"
    with pytest.raises(UserError, match=f"hardware=gpu: jax finds no such device \\({reason}\\)"):
        find_devices("gpu")


HEAP = {"glibc.malloc.arena_max=1", "glibc.malloc.trim_threshold=70368744177664"}
LARGE = HEAP | {"glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=1073741824"}


@pytest.mark.parametrize(
    ("library", "present", "expected"),
    [
        (("glibc", "2.36"), "", LARGE),
        (("glibc", "2.31"), "", HEAP | {"glibc.malloc.mmap_max=0"}),
        (("glibc", "2.36"), "glibc.rtld.nns=8", LARGE | {"glibc.rtld.nns=8"}),
        (("glibc", "2.36"), "glibc.malloc.hugetlb=2", None),
        (("", ""), "", None),  # musl, macOS
    ],
)
def test_allocator_setting(library, present, expected, monkeypatch):
    """Old libraries have no large pages; what the user set stays."""
    started = []
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("GLIBC_TUNABLES", present)
    start_up.restart_with_allocator_setting()
    if expected is None:
        assert not started
        return
    [(program, _, environment)] = started
    assert program == sys.executable
    setting = environment["GLIBC_TUNABLES"].split(":")
    assert set(setting) == expected
    assert len(setting) == len(expected)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_large_blocks_are_given_back():
    """Of the process that the program becomes: 1.5 GiB, touched and freed, do not stay with it."""
    program = """if True:
        import ctypes, resource, sys
        from MaxText.parallelism import start_up
        start_up.restart_with_allocator_setting()
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.free.argtypes = [ctypes.c_void_p]
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        def used_and_left(size):
            before = resident()
            block = library.malloc(ctypes.c_size_t(size))
            small = library.malloc(ctypes.c_size_t(10_000))  # would keep a heap from shrinking
            ctypes.memset(ctypes.c_void_p(block), 1, size)
            used = resident() - before
            library.free(block)
            return used / size, (resident() - before) / size
        print(*used_and_left(300 << 20), *used_and_left(1536 << 20))
    """
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    smaller_used, smaller_left, used, left = map(float, done.stdout.split())
    assert smaller_used > 0.9
    assert smaller_left > 0.9
    assert used > 0.5  # some of it lies where the smaller block was, with old libraries
    version = tuple(map(int, platform.libc_ver()[1].split(".")[:2]))
    assert (left < 0.1) == (version >= (2, 35))


@pytest.fixture
def initialize(monkeypatch):
    """Takes the place of jax.distributed.initialize; `calls` has its arguments."""
    fake = SimpleNamespace(calls=[], error=None)

    def initialize(**arguments):
        fake.calls.append(arguments)
        if fake.error is not None:
            raise fake.error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(processes, "_count", 1)
    for name in cluster_variables():
        monkeypatch.delenv(name, raising=False)
    return fake


def cluster_variables():
    pairs = (*cluster._EXPLICIT, cluster._SLURM, *cluster._MPI)
    others = (
        "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT", "JAX_PLATFORMS",
        "TPU_SKIP_MDS_QUERY", "MEGASCALE_NUM_SLICES",
    )  # fmt: skip
    return [*(name for pair in pairs for name in pair), *cluster._TPU_HOSTS, *others]


def test_one_process_is_not_connected(initialize, monkeypatch):
    monkeypatch.setattr(cluster, "_has_chips", lambda: False)
    assert connect("auto", 600) == []
    assert initialize.calls == []
    assert processes.count() == 1


def test_nothing_waits_longer_than_the_heartbeat_allows(initialize, monkeypatch):
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    (line,) = connect("cpu", 600)
    assert "of 2 (by JAX_NUM_PROCESSES and JAX_PROCESS_ID), coordinator 127.0.0.1:99" in line
    assert initialize.calls == [
        {
            "coordinator_address": "127.0.0.1:99",
            "coordinator_bind_address": "127.0.0.1:99",
            "num_processes": 2,
            "process_id": 1,
            "cluster_detection_method": "deactivate",
            "initialization_timeout": 3600,
            # Later than the watchdog, which can say more.
            "heartbeat_timeout_seconds": 660,
            "shutdown_timeout_seconds": 600,
        }
    ]
    assert processes.count() == 2


def test_others_that_do_not_come(initialize, monkeypatch):
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    initialize.error = RuntimeError("DEADLINE_EXCEEDED: Barrier timed out\nmore")
    with pytest.raises(UserError) as error:
        connect("cpu", 10)
    message = str(error.value)
    assert "process 1 of 2 (by JAX_NUM_PROCESSES and JAX_PROCESS_ID)" in message
    assert "over 127.0.0.1:99: DEADLINE_EXCEEDED: Barrier timed out" in message
    assert "wait for each other for 60 s" in message
    assert processes.count() == 1


def test_a_tpu_without_others_is_one_process(initialize, monkeypatch):
    monkeypatch.setattr(cluster, "_has_chips", lambda: True)
    initialize.error = ValueError("coordinator_address should be defined.")
    (line,) = connect("tpu", 600)
    assert line.startswith("one process: the metadata of this TPU VM names no others")
    assert "coordinator_address" not in initialize.calls[0]


@pytest.mark.parametrize(
    ("of_processes", "asked", "message"),
    [
        ([0, 0, 1], "", "equally many devices: process 0 has 2, process 1 has 1"),
        ([0, 0], "", "process 0 has 2, process 1 has 0"),
        ([0, 0, 1, 1], "8", r"MAXTEXT_NUM_DEVICES=8, and jax finds 4 devices \(chip\)"),
        ([0, 0, 1, 1], "4", None),
    ],
)
def test_fewer_devices_than_meant(of_processes, asked, message, monkeypatch):
    devices = [
        SimpleNamespace(process_index=process, device_kind="chip") for process in of_processes
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setenv(start_up.NUM_DEVICES_VARIABLE, asked)
    if message is None:
        assert find_devices("auto") == devices
    else:
        with pytest.raises(UserError, match=message):
            find_devices("auto")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"run_name": "a", "steps": 3, "jax_cache_dir": "there"}, None),
        (
            {"run_name": "b", "steps": 4, "jax_cache_dir": ""},
            "process 1 has .* run_name, steps than",
        ),
        ({"run_name": "a", "no_such": 3, "jax_cache_dir": ""}, "process 1 knows other config"),
    ],
)
def test_processes_of_one_run_have_one_configuration(other, message, monkeypatch):
    mine = {"run_name": "a", "steps": 3, "jax_cache_dir": "here"}
    digests = []
    check_alike(other)  # one process: nothing is asked
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda x: digests.append(x) or np.stack([x, x])
    )
    check_alike(other)
    answers = iter(digests)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda x: np.stack([x, next(answers)])
    )
    if message is None:
        check_alike(mine)
    else:
        with pytest.raises(UserError, match=message):
            check_alike(mine)
