"""Several processes of one run, with everything in a bucket."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests import programs
from tests.buckets.emulator import Fault
from tests.buckets.test_programs import Workplace
from tests.several_processes.group import end

pytestmark = pytest.mark.slow

LONGEST_SECONDS = 400.0


class Launched(Workplace):
    """Runs with four devices, over as many processes as a test says."""

    def __init__(self, folder, bucket, emulator, environment):
        super().__init__(folder, bucket, emulator, environment)
        self.environment["GLIBC_TUNABLES"] = "glibc.malloc.arena_max=1"  # else they start again
        self.started = []

    def arguments(self, place, *keys):
        # Enough for the rows of an evaluation on four devices.
        return [*super().arguments(place, *keys), "validation_fraction=0.3"]

    def launch(self, number, place, *keys, options=()):
        """Starts a run; its process and the file of its output."""
        path = self.folder / f"{len(self.started)}.out"
        with path.open("w") as log:
            launching = ["local", str(number), f"--devices={4 // number}", "--grace=40",
                         f"--logs={self.folder}/logs", *options, "--"]  # fmt: skip
            process = programs.start(
                "launch.py", [*launching, *self.arguments(place, *keys)], self.folder,
                self.environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started.append(process)
        return process, path

    def launched(self, number, place, *keys, options=(), code=0):
        """The output of a run that ends by itself."""
        process, path = self.launch(number, place, *keys, options=options)
        assert process.wait(LONGEST_SECONDS) == code, path.read_text()
        return path.read_text()

    def pid_of(self, run, process):
        name = f"runs/{run}/processes/{process}.json"
        return json.loads(self.emulator.read(self.bucket.removeprefix("gs://"), name))["pid"]


@pytest.fixture
def place(tmp_path, bucket, emulator, users_environment):
    place = Launched(tmp_path, bucket, emulator, users_environment)
    yield place
    end(place.started)


def assert_like_one_process(place):
    """The losses of the run `a` in the bucket are those of one process with a disk."""
    place.launched(1, place.folder, "run_name=a")
    # Only the order in which four numbers are added may differ.
    assert place.losses("a") == pytest.approx(place.local_losses("a"), rel=1e-5)


def test_two_and_four_processes_train_and_resume(place):
    place.launched(2, place.bucket, "run_name=a", "learning_rate_schedule_steps=12", "steps=7")
    assert place.steps("a") == ({3, 6}, {3, 6})
    assert "checkpoint of step 6" in place.launched(4, place.bucket, "run_name=a")
    assert place.steps("a") == ({9, 11}, {9, 11})
    assert_like_one_process(place)


def test_a_process_is_killed_while_all_save(place):
    late = Fault(200, "POST /upload.*runs.*checkpoints.*6.*(items|commit)", seconds=1, after=True)
    with place.emulator.failing(late):
        process, path = place.launch(2, place.bucket, "run_name=a", options=["--supervise"])
        until = time.monotonic() + LONGEST_SECONDS
        while not place.has_begun_to_save("a", 6):
            assert time.monotonic() < until
            assert process.poll() is None, path.read_text()
            time.sleep(0.02)
        os.kill(place.pid_of("a", 1), signal.SIGKILL)
        assert 6 not in place.steps("a")[0]
    assert process.wait(LONGEST_SECONDS) == 0, path.read_text()
    assert "starting all 2 again" in path.read_text()
    assert place.steps("a") == ({9, 11}, {9, 11})
    assert_like_one_process(place)
