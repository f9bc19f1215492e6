"""Several processes of one run, with everything in a bucket."""

import os
import signal

import pytest

from tests.several_processes.group import Launcher, as_users_do, ended, pid_of, wait_until
from tests.storage.emulator import Fault
from tests.storage.test_programs import Workplace

pytestmark = pytest.mark.slow


class Launched(Workplace):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.launcher = Launcher(self.folder, as_users_do() | self.environment)

    def arguments(self, place, *keys):
        # Enough for the rows of an evaluation on four devices.
        return [*super().arguments(place, *keys), "run_name=a", "validation_fraction=0.3"]

    def launch(self, number, place, *keys):
        return self.launcher.run(number, *self.arguments(place, *keys))


@pytest.fixture
def place(tmp_path, bucket, emulator, users_environment):
    place = Launched(tmp_path, bucket, emulator, users_environment)
    yield place
    place.launcher.end()


def test_two_processes_one_of_which_dies_while_both_save(place):
    late = Fault(200, "POST /upload.*runs.*checkpoints.*6.*(items|commit)", seconds=1, after=True)
    begun = place.arguments(place.bucket, "learning_rate_schedule_steps=12", "steps=7")
    with place.emulator.failing(late):
        process, path = place.launcher.start(2, *begun, options=["--supervise", "--grace-period=5"])
        wait_until(lambda: place.has_begun_to_save("a", 6), process, path)
        os.kill(pid_of(path, 1), signal.SIGKILL)
        assert 6 not in place.steps("a")[0]
    assert "Restarting all 2 processes" in ended(process, path)
    assert place.steps("a") == ({3, 6}, {3, 6})

    one_reads = ["dcn_data_parallelism=2", "enable_single_replica_ckpt_restoring=true"]
    output = place.launch(2, place.bucket, *one_reads)
    assert "checkpoint of step 6" in output
    assert "has no effect" not in output
    assert place.steps("a") == ({9, 11}, {9, 11})
    place.launch(1, place.folder)
    # Only the order in which four numbers are added may differ.
    assert place.losses("a") == pytest.approx(place.local_losses("a"), rel=1e-5)
