"""The lock of a run folder in a bucket."""

import json
import signal
import types

import pytest

from MaxText import exit_codes
from MaxText.buckets.paths import path_of
from MaxText.checkpointing import lease
from MaxText.checkpointing.run_lock import hold
from MaxText.errors import UserError
from tests.parallelism.child_programs import ended, started, wait_for

pytestmark = pytest.mark.usefixtures("clients", "no_waits")

HOLDER = """
    import sys, time
    from MaxText.buckets.paths import path_of
    from MaxText.checkpointing import lease
    from MaxText.checkpointing.run_lock import hold

    lease._RENEWED_EVERY = 0.2
    hold(path_of(sys.argv[1], "run_name"))
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "_RENEWED_EVERY", 0.2)
    monkeypatch.setattr(lease, "_EXPIRES_AFTER", 1.0)
    monkeypatch.setattr(lease, "_SECONDS_TO_SETTLE", 0.1)
    made = []
    monkeypatch.setattr(lease, "atexit", types.SimpleNamespace(register=made.append))
    yield
    for release in made:
        release()


@pytest.fixture
def run(bucket):
    return f"{bucket}/runs/a"


def facts(emulator, bucket):
    return json.loads(emulator.read(bucket.removeprefix("gs://"), "runs/a/.lock"))


def test_a_second_process_is_refused_until_the_first_one_is_dead(run, bucket, emulator):
    with started(HOLDER, run, "60") as holder:
        wait_for(holder, "held")
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            hold(path_of(run, "run_name"))
        holder.send_signal(signal.SIGKILL)
        ended(holder)
    hold(path_of(run, "run_name"))  # at once: its process is not there any more
    assert facts(emulator, bucket)["process"] != holder.pid


def test_the_end_of_a_program_gives_it_up(run, bucket, emulator):
    with started(HOLDER, run, "0") as holder:
        assert ended(holder) == (0, "held\n")
    assert emulator.names(bucket.removeprefix("gs://"), "runs/a/") == []


@pytest.mark.parametrize("left", ['{"host": "gone", "process": 7, "token": "x"}', "{"])
def test_a_lease_that_nobody_renews_is_taken_over(run, bucket, emulator, left):
    emulator.write(bucket.removeprefix("gs://"), "runs/a/.lock", left.encode())
    hold(path_of(run, "run_name"))
    assert facts(emulator, bucket)["host"] == lease.socket.gethostname()


def test_a_process_whose_lease_was_taken_over_stops(run, bucket, emulator):
    with started(HOLDER, run, "60") as holder:
        wait_for(holder, "held")
        other = {"host": "other", "process": 7, "started": "now", "token": "x"}
        emulator.write(bucket.removeprefix("gs://"), "runs/a/.lock", json.dumps(other).encode())
        code, output = ended(holder)
    assert code == exit_codes.USER_MISTAKE
    assert "was taken over by process 7 on other" in output
