"""Connecting processes, absent devices, and how one process of several ends."""

import contextlib
import os
import platform
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from jax._src.clusters import ClusterEnv

from MaxText import program_start
from MaxText.errors import UserError
from MaxText.runtime import peers, processes, start_up
from MaxText.runtime.start_up import assert_same_config, find_devices, initialize_distributed
from tests.programs import ended, started
from tests.runtime.coordinator import Coordinator


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no backend\nmore")])
def test_hardware_that_is_not_there(error, monkeypatch):
    monkeypatch.setattr(jax, "devices", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match="hardware=gpu: ") as caught:
        find_devices("gpu")
    assert ("(no backend)" in str(caught.value)) == (str(error) != "")


HEAP = {"glibc.malloc.trim_threshold=70368744177664"}
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
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    monkeypatch.setattr(os, "execve", execve := mock.Mock())
    monkeypatch.setenv("GLIBC_TUNABLES", present)
    program_start.reexec_with_malloc_tuning()
    assert execve.called == (expected is not None)
    if expected:
        program, _, environment = execve.call_args.args
        assert program == sys.executable
        assert sorted(environment["GLIBC_TUNABLES"].split(":")) == sorted(expected)


@pytest.fixture
def initialize(monkeypatch):
    """Takes the place of jax.distributed.initialize, to which variables name no others."""
    fake = mock.Mock()
    monkeypatch.setattr(jax.distributed, "initialize", fake)
    for name in list(os.environ):
        words = ("JAX_", "SLURM_", "OMPI_", "PMI_", "TPU_", "MEGASCALE_", "NNODES", "NODE_RANK")
        if name.startswith(words):
            monkeypatch.delenv(name)
    yield fake
    processes.mark_initialized(1)


@pytest.fixture
def others(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:99")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")


@pytest.fixture
def two_processes():
    processes.mark_initialized(2)
    yield
    processes.mark_initialized(1)


def test_nothing_waits_longer_than_the_heartbeat_allows(initialize, others):
    (line,) = initialize_distributed("cpu", 600)
    assert line.startswith("process 0 of 2 (by JAX_NUM_PROCESSES and JAX_PROCESS_ID)")
    assert "127.0.0.1:99" in line
    initialize.assert_called_once_with(
        coordinator_address="127.0.0.1:99",
        coordinator_bind_address="127.0.0.1:99",
        num_processes=2,
        process_id=1,
        cluster_detection_method="deactivate",
        initialization_timeout=3600,
        # Later than the watchdog, which can say more.
        heartbeat_timeout_seconds=660,
        shutdown_timeout_seconds=600,
    )
    assert processes.count() == 2


def test_jax_finds_the_others_of_a_slurm_step(initialize, monkeypatch):
    """It is only told which GPUs a process has: all of its node, if it is alone there."""
    step = {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (line,) = initialize_distributed("gpu", 0)
    assert line == "process 0 of 2 (by SLURM_NTASKS and SLURM_PROCID)"
    initialize.assert_called_once_with(local_device_ids=(), initialization_timeout=300)
    # So JAX takes the number and the coordinator of SLURM, and no single GPU.
    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, (), None, 5)
    assert found == (f"n1:{61440 + 7}", 2, 1, ())
    initialize.side_effect = ValueError("coordinator_address should be defined.")
    with pytest.raises(UserError, match=r"(?s)process 1 of 2 .* JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        initialize_distributed("gpu", 0)


def test_others_that_do_not_come(initialize, others, told):
    initialize.side_effect = RuntimeError("DEADLINE_EXCEEDED: Barrier timed out\nmore")
    with pytest.raises(UserError) as error:
        initialize_distributed("cpu", 10)
    told(error.value)
    assert processes.count() == 1


def test_a_tpu_without_others_is_one_process(initialize, chips):
    assert initialize_distributed("tpu", 600) == []
    initialize.assert_not_called()
    chips.append("/dev/accel0")
    initialize.side_effect = ValueError("coordinator_address should be defined.")
    (line,) = initialize_distributed("tpu", 600)
    assert line.startswith("single process: ")
    assert "coordinator_address" not in initialize.call_args.kwargs
    assert processes.count() == 1


def refused(message):
    return contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message)


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
    devices = [SimpleNamespace(process_index=n, device_kind="chip") for n in of_processes]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setenv(start_up.NUM_DEVICES_VARIABLE, asked)
    with refused(message):
        assert find_devices("auto") == devices


@pytest.fixture
def coordinator(monkeypatch):
    """Three processes are threads of these names."""
    store = Coordinator()
    monkeypatch.setattr(peers, "connected_client", lambda: store)
    monkeypatch.setattr(peers, "coordinator_process", lambda: int(threading.current_thread().name))
    monkeypatch.setattr(peers, "EXIT_SECONDS", 0.0)
    processes.mark_initialized(3)
    yield store
    processes.mark_initialized(1)


SAME = {"run_name": "a", "steps": 3, "jax_cache_dir": "here"}


@pytest.mark.parametrize(
    ("second", "third", "message"),
    [
        (SAME, SAME | {"jax_cache_dir": "there"}, ""),
        (SAME, SAME | {"run_name": "b", "steps": 4}, "process 2 has other values of run_name, st"),
        (SAME | {"steps": 4}, SAME | {"run_name": "b"}, "process 1, 2 has other values of run_na"),
        (SAME | {"steps": 4}, SAME | {"no_such": 3}, "process 2 knows other configuration keys"),
    ],
)
def test_processes_of_one_run_have_one_configuration(second, third, message, coordinator):
    told = {}

    def compare(process, config):
        try:
            assert_same_config(config)
            told[process] = ""
        except UserError as error:
            told[process] = str(error)

    threads = [
        threading.Thread(target=compare, args=(process, config), name=str(process))
        for process, config in enumerate((SAME, second, third))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told.keys() == {0, 1, 2}
    assert len(set(told.values())) == 1
    assert told[0].startswith(message)
    assert bool(told[0]) == bool(message)


def test_a_process_alone_compares_with_nobody(monkeypatch):
    monkeypatch.setattr(peers, "connected_client", pytest.fail)
    assert_same_config(SAME)


FAIL = """
    import sys, threading, time
    from MaxText.errors import UserError
    from MaxText.runtime import processes
    from MaxText.runtime.watchdog import Watchdog
    from tests.runtime.coordinator import Coordinator

    processes.mark_initialized(2)
    sys.stdout.reconfigure(line_buffering=True)  # as programs do
    threading.Thread(target=time.sleep, args=(60,)).start()  # an interpreter's end waits for it
    sleep = time.sleep
    time.sleep = lambda seconds: print("waited", flush=True) or sleep(seconds)
    print("printed")
    try:
        watchdog = Watchdog(1.0, 1, 2, store=Coordinator()).start()
        processes.set_watchdog(watchdog)
        exec(sys.argv[1])
    except BaseException as error:
        processes.fail(error)
"""


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise UserError('fix it')", 2, "error: fix it\n"),
        ("raise KeyError('a bug')", 1, "Traceback"),
        ("raise KeyboardInterrupt", 130, ""),
        ("sys.exit(5)", 5, ""),
        ("raise RuntimeError('Gloo all-reduce failed')", 76, "0  no status"),
    ],
    ids=["mistake", "bug", "Ctrl-C", "exit", "peer"],
)
def test_codes_and_what_is_said(statement, code, said):
    with started(FAIL, statement) as process:
        ended_with, output = ended(process)
    assert ended_with == code, output
    assert output.startswith("printed\n")
    assert said in output
    assert ("waited" in output) == (code == 76)  # for the silence of the dead one


def caused_by(error):
    outer = UserError("the checkpoint could not be written")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: failed to initialize_distributed"), True),
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
def test_a_lost_process_differs_from_an_error(error, lost):
    assert processes.is_peer_failure(error) is lost
