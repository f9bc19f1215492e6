"""The lock of a run folder in a bucket."""

import contextlib
import itertools
import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from MaxText.exit_codes import USER_ERROR
from MaxText.storage import run_folder
from MaxText.storage.run_folder import Lease
from tests.programs import ended, started, wait_for
from tests.refusals import refused
from tests.small_models import some_quick

pytestmark = pytest.mark.usefixtures("clients", "no_waits")

QUICK = {"renewal_seconds": 0.2, "timeout_seconds": 1.0, "takeover_seconds": 0.1}
HOLDER = f"""
import sys, time
from MaxText.storage.paths import register_filesystems
from MaxText.storage.run_folder import Lease

register_filesystems("a test")
Lease(sys.argv[1], is_advisory="advisory" in sys.argv, **{QUICK}).acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def lock(bucket):
    return f"{bucket}/runs/a/.lock"


@pytest.fixture
def hold(lock):
    held = Lease(lock, **QUICK)
    yield held.acquire
    held.release()


@pytest.fixture
def start(lock):
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            process = stack.enter_context(started(HOLDER, lock, *arguments))
            wait_for(process, "held")
            return process

        yield start


def test_a_second_process_is_refused_until_the_first_one_is_dead(start, hold, lock, emulator):
    holder = start("60")
    refused(f"process {holder.pid} on ", hold)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    hold()  # at once: its process is not there any more
    assert json.loads(emulator.read(lock))["process"] == os.getpid()


def test_the_end_of_a_program_releases_it(start, bucket, emulator):
    assert ended(start("0"))[0] == 0
    assert emulator.names(f"{bucket}/runs/a/") == []


@pytest.mark.parametrize(
    "left", some_quick(['{"host": "gone", "process": 7, "token": "x"}', "{"], 2)
)
def test_a_lease_that_is_not_renewed_is_taken_over(hold, lock, emulator, left, monkeypatch):
    looks = itertools.count(0.0, QUICK["timeout_seconds"] / 5)
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(monotonic=looks.__next__))
    emulator.write(lock, left.encode())
    hold()
    assert next(looks) >= QUICK["timeout_seconds"]  # it looked until then
    assert json.loads(emulator.read(lock))["host"] == socket.gethostname()


@pytest.mark.parametrize(("more", "ends"), [(["60"], USER_ERROR), (["2", "advisory"], 0)])
def test_a_process_whose_lease_was_taken_over_stops(start, lock, emulator, more, ends):
    holder = start(*more)
    other = {"host": "other", "process": 7, "started": "now", "token": "x"}
    emulator.write(lock, json.dumps(other).encode())
    code, output = ended(holder)
    assert code == ends
    assert ("process 7 on other" in output) == bool(ends)
