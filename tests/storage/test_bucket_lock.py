"""The lock of a run folder in a bucket."""

import contextlib
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from MaxText.exit_codes import USER_ERROR
from MaxText.storage.run_folder import BucketLock
from tests.programs import ended, started, wait_for
from tests.refusals import refused
from tests.small_models import some_quick

pytestmark = pytest.mark.usefixtures("clients", "no_waits")

QUICK = {"check_seconds": 0.1, "answer_seconds": 0.5}
HOLDER = f"""
import sys, time
from MaxText.storage.paths import register_filesystems
from MaxText.storage.run_folder import BucketLock

register_filesystems("a test")
BucketLock(sys.argv[1], check_seconds={QUICK["check_seconds"]}).acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def url(bucket):
    return f"{bucket}/runs/a/.lock"


@pytest.fixture
def lock(url):
    lock = BucketLock(url, **QUICK)
    yield lock
    lock.release()


@pytest.fixture
def start(url):
    with contextlib.ExitStack() as stack:

        def start(seconds):
            process = stack.enter_context(started(HOLDER, url, seconds))
            wait_for(process, "held")
            return process

        yield start


def test_a_second_process_is_refused_until_the_first_one_is_dead(start, url, emulator):
    holder = start("60")
    for _ in range(2):
        # It answers within its own time, however slow this machine is.
        patient = BucketLock(url, check_seconds=0.1, answer_seconds=60.0)
        refused(f"run folder .*/runs/a is in use by process {holder.pid} on ", patient.acquire)
        assert json.loads(emulator.read(url))["process"] == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = BucketLock(url, check_seconds=0.1, answer_seconds=60.0)
    lock.acquire()  # at once: its process is not there any more
    assert json.loads(emulator.read(url))["process"] == os.getpid()
    lock.release()


def test_the_end_of_a_program_releases_it(start, bucket, emulator):
    assert ended(start("0"))[0] == 0
    assert emulator.names(f"{bucket}/runs/a/") == []


@pytest.mark.parametrize(
    "left", some_quick(['{"host": "gone", "process": 7, "token": "x"}', "{"], 2)
)
def test_an_owner_that_does_not_answer_loses_it(lock, url, emulator, left, capsys):
    emulator.write(url, left.encode())
    lock.acquire()
    assert json.loads(emulator.read(url))["host"] == socket.gethostname()
    assert "Waiting up to 0.5 s for an answer of " in capsys.readouterr().err


def test_of_two_that_claim_it_the_last_one_gets_it(lock, url, emulator):
    emulator.write(url, b'{"host": "gone", "process": 7, "token": "x"}')
    first = BucketLock(url, check_seconds=0.1, answer_seconds=60.0)
    with ThreadPoolExecutor(1) as threads:
        claim = threads.submit(refused, f"in use by process {os.getpid()} on", first.acquire)
        while not json.loads(emulator.read(url)).get("is_claim"):
            assert not claim.done()
        lock.acquire()
        claim.result()


@pytest.mark.parametrize("is_claim", [True, False])
def test_a_process_that_lost_it_stops(start, url, emulator, is_claim):
    holder = start("2" if is_claim else "60")
    other = {"host": "other", "process": 7, "started": "now", "token": "x", "is_claim": is_claim}
    emulator.write(url, json.dumps(other).encode())
    code, output = ended(holder)
    assert code == (0 if is_claim else USER_ERROR)
    assert ("was taken over by process 7 on other" in output) == (not is_claim)
