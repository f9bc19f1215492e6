"""How two processes of a run end: together, asked to, or when one of them is gone or stuck."""

import signal
import socket

import pytest

from MaxText import exit_codes
from tests.several_processes.group import LONGEST_SECONDS, started

LOOP = ("-m", "tests.several_processes.loop")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["nodes", "slurm"])
def test_a_run_that_goes_well_waits_for_no_tracker(launcher, tmp_path):
    with started([*LOOP, "100"], tmp_path, launcher=launcher) as group:
        assert group.codes() == [0, 0]
        assert "process 1 of 2" in group.output(1)
        assert "step 100: 2" in group.output(0)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_notice_to_one_stops_all_after_the_same_update(number, tmp_path):
    with started([*LOOP, "60"], tmp_path) as group:
        group.wait_for(1, "step 3:")
        group.processes[1].send_signal(number)
        assert group.codes() == [exit_codes.PREEMPTED] * 2
        ends = {group.output(process).strip().splitlines()[-1] for process in range(2)}
    assert len(ends) == 1
    assert ends.pop().startswith("saving after")


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("kill", -signal.SIGKILL, "dead or frozen"),
        pytest.param("raise", 1, "failed: ValueError", marks=pytest.mark.slow),
        pytest.param("hang", exit_codes.STALLED, "Thread", marks=pytest.mark.slow),  # its stacks
        pytest.param("freeze", -signal.SIGKILL, "dead or frozen", marks=pytest.mark.slow),
    ],
)
def test_one_gone_or_stuck_ends_the_other(what, code, told, tmp_path):
    with started([*LOOP, "5", f"1:5:{what}"], tmp_path) as group:
        assert group.processes[0].wait(LONGEST_SECONDS) == exit_codes.STALLED
        if what == "freeze":
            group.processes[1].kill()
        assert group.codes()[1] == code
        survivor, other = group.output(0), group.output(1)
    assert "slowest: process 1, last seen in data of step 5" in survivor
    assert told in survivor
    assert ("ValueError: " in other) == (what == "raise")
    assert ("in go_wrong" in other) == (what in ("raise", "hang"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        (
            "raise",
            1,
            "lost process 0 of 2 on {place} (failed: ValueError), last seen in data of",
        ),
        (
            "freeze",
            -signal.SIGKILL,
            "lost process 0 of 2 on {place} (its coordinator has not",
        ),
        # jax itself aborts at once: what its coordinator was can no longer be asked.
        ("kill", -signal.SIGKILL, "leader task was preempted/died"),
    ],
)
def test_the_coordinator_gone_or_stuck_ends_the_other(what, code, told, tmp_path):
    with started([*LOOP, "5", f"0:5:{what}"], tmp_path) as group:
        expected = -signal.SIGABRT if what == "kill" else exit_codes.STALLED
        assert group.processes[1].wait(LONGEST_SECONDS) == expected
        if what == "freeze":
            group.processes[0].kill()
        assert group.codes()[0] == code
        output = group.output(1)
        place = f"{socket.gethostname()}, pid {group.processes[0].pid}"
    if what == "freeze" and "process 1 of 2 has made no progress for " in output:
        return  # its own time in a step was over at the same moment
    assert told.format(place=place) in output
    assert what == "kill" or "), last seen in " in output


AGREEING = """
import sys
from MaxText.runtime import start_up
for line in start_up.initialize_distributed("cpu", 60.0):
    print(line)
import jax
from MaxText.runtime.processes import all_succeed

def work():
    if jax.process_index() == 0:
        raise PermissionError(13, "Permission denied", "checkpoints/7")
    return 1

assert all_succeed("nothing", lambda: 3) == 3
try:
    all_succeed("setting checkpoints aside", work)
except OSError as error:
    print("ended with", error)
"""


def test_what_fails_on_one_fails_on_all(tmp_path):
    """A lost mount of the first process must not leave the others waiting."""
    with started(["-c", AGREEING], tmp_path) as group:
        assert group.codes() == [0, 0]
        assert "ended with [Errno 13] Permission denied: 'checkpoints/7'" in group.output(0)
        assert "setting checkpoints aside failed on another process" in group.output(1)
