"""Connecting processes, devices that are not there, and how one process of several ends."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from MaxText.errors import UserError
from MaxText.parallelism import processes, start_up
from MaxText.parallelism.start_up import check_alike, connect, find_devices
from tests.house.sources import REPOSITORY
from tests.parallelism.child_programs import ended, started

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
    with pytest.raises(UserError, match="hardware=gpu: ") as caught:
        find_devices("gpu")
    assert ("(no backend)" in str(caught.value)) == (str(error) != "")


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
    """Of the process that the program becomes: 1 GiB, touched and freed, does not stay with it."""
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
        print(*used_and_left(60 << 20), *used_and_left(1025 << 20))
    """
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=REPOSITORY,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    smaller_used, smaller_left, used, left = map(float, done.stdout.split())
    assert smaller_used > 0.9
    assert smaller_left > 0.9
    assert used > 0.9
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
    for name in list(os.environ):
        words = ("JAX_", "SLURM_", "OMPI_", "PMI_", "TPU_", "MEGASCALE_", "NNODES", "NODE_RANK")
        if name.startswith(words):
            monkeypatch.delenv(name)
    yield fake
    processes.begin(1)


@pytest.fixture
def two_processes():
    processes.begin(2)
    yield
    processes.begin(1)


def set_others(monkeypatch):
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)


def test_one_process_is_not_connected(initialize, chips):
    assert connect("auto", 600) == []
    assert initialize.calls == []
    assert processes.count() == 1


def test_nothing_waits_longer_than_the_heartbeat_allows(initialize, monkeypatch):
    set_others(monkeypatch)
    (line,) = connect("cpu", 600)
    assert line.startswith("process 0 of 2 (by JAX_NUM_PROCESSES and JAX_PROCESS_ID)")
    assert "127.0.0.1:99" in line
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


def test_others_that_do_not_come(initialize, monkeypatch, told):
    set_others(monkeypatch)
    initialize.error = RuntimeError("DEADLINE_EXCEEDED: Barrier timed out\nmore")
    with pytest.raises(UserError) as error:
        connect("cpu", 10)
    told(error.value)
    assert processes.count() == 1


def test_a_tpu_without_others_is_one_process(initialize, chips):
    chips.append("/dev/accel0")
    initialize.error = ValueError("coordinator_address should be defined.")
    (line,) = connect("tpu", 600)
    assert line.startswith("one process: ")
    assert "coordinator_address" not in initialize.calls[0]


@pytest.mark.parametrize(
    ("of_processes", "asked", "message"),
    [
        ([0, 0, 1], "", "process 0 has 2, process 1 has 1"),
        ([0, 0], "", "process 0 has 2, process 1 has 0"),
        ([0, 0, 1, 1], "8", r"MAXTEXT_NUM_DEVICES=8.* 4 devices \(chip\)"),
        ([0, 0, 1, 1], "4", None),
    ],
)
def test_fewer_devices_than_meant(of_processes, asked, message, monkeypatch, two_processes):
    devices = [
        SimpleNamespace(process_index=process, device_kind="chip") for process in of_processes
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
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
        ({"run_name": "b", "steps": 4, "jax_cache_dir": ""}, "process 1 .* run_name, steps"),
        ({"run_name": "a", "no_such": 3, "jax_cache_dir": ""}, "process 1 .* keys"),
    ],
)
def test_processes_of_one_run_have_one_configuration(other, message, monkeypatch, two_processes):
    mine = {"run_name": "a", "steps": 3, "jax_cache_dir": "here"}
    digests = []
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
    processes.begin(1)
    check_alike(other)  # nothing is asked


FAIL = """
    import sys, threading, time
    from MaxText.errors import UserError
    from MaxText.parallelism import processes
    from MaxText.parallelism.watchdog import Watchdog

    processes.begin(2)
    # What an interpreter that ends would wait for.
    threading.Thread(target=time.sleep, args=(60,)).start()
    time.sleep = lambda seconds: print("waited", flush=True)
    print("printed")
    try:
        with_file = Watchdog(sys.argv[2], 1.0, 0, 2).start()
        exec(sys.argv[1])
    except BaseException as error:
        processes.fail(error, with_file)
"""


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise UserError('mend it')", 2, "error: mend it\n"),
        ("raise KeyError('ours')", 1, "Traceback"),
        ("raise KeyboardInterrupt", 130, ""),
        ("sys.exit(5)", 5, ""),
        ("raise RuntimeError('Gloo all-reduce failed')", 76, "1  has left no file"),
    ],
    ids=["mistake", "bug", "Ctrl-C", "exit", "peer"],
)
def test_codes_and_what_is_said(statement, code, said, tmp_path):
    with started(FAIL, statement, str(tmp_path)) as process:
        ended_with, output = ended(process)
    assert ended_with == code, output
    assert output.startswith("printed\n")
    assert said in output
    assert ("waited" in output) == (code == 76)  # for the silence of the dead one


def test_a_run_of_one_process_is_left_alone():
    processes.fail(ValueError("ours"))  # returns
    processes.leave()
    assert processes.count() == 1


def caused_by(error):
    outer = UserError("the checkpoint could not be written")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect"), True),
        (jax.errors.JaxRuntimeError("ABORTED: the coordination service says so"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (caused_by(RuntimeError("Barrier timed out")), True),
        (caused_by(RuntimeError("no space left on device")), False),
        (UserError("the barrier of sizes"), False),
        (OSError("Connection reset by peer"), False),  # of storage
        (ValueError("UNAVAILABLE: storage.example"), False),
        (TypeError("gloo"), False),
    ],
)
def test_a_lost_process_is_told_from_an_error(error, lost):
    assert processes.is_peer_lost(error) is lost
