"""Processes that fail are ended together, and started again where that may help."""

import signal
import sys
import textwrap
import time

import pytest

from MaxText import exit_codes
from MaxText.launching import supervision
from MaxText.launching.local_processes import environment_of
from MaxText.launching.supervision import Job, Policy, is_worth_a_restart, outcome
from tests.parallelism.child_programs import ended, started, wait_for

# Counts its starts in a file, and ends as its arguments say: code or signal of each attempt.
WORKER = """
    import os, pathlib, signal, sys, time
    folder = pathlib.Path(sys.argv[1])
    rank = os.environ.get("JAX_PROCESS_ID", "0")
    starts = folder / f"starts.{rank}"
    attempt = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (attempt + 1))
    ends = sys.argv[2:]
    ends = [end.split(":")[-1] for end in ends if end.startswith(f"{rank}:") or ":" not in end]
    print("attempt", attempt, "port", os.environ.get("JAX_COORDINATOR_ADDRESS"), flush=True)
    end = ends[min(attempt, len(ends) - 1)]
    if end == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if end == "wait":
        time.sleep(1000)
    if end.startswith(("saved", "begun")):
        # Without the arrays a checkpoint is not complete.
        within = "items" if end.startswith("saved") else "metadata"
        (folder / "run" / "checkpoints" / str(attempt) / within).mkdir(parents=True)
        end = end[5:]
    if end.startswith("-"):
        os.kill(os.getpid(), -int(end))
    sys.exit(int(end))
"""


@pytest.fixture
def run(tmp_path):
    lines = []

    def run(*ends, number=2, max_restarts=3, grace=0.3):
        command = [sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path), *ends]
        job = Job(command, number, None, tmp_path / "logs", str(tmp_path / "run"))
        return supervision.run(job, Policy(max_restarts, 0.01, grace), lines.append)

    run.starts = lambda rank: len((tmp_path / f"starts.{rank}").read_text())
    run.log = lambda rank: (tmp_path / "logs" / f"{rank}.log").read_text()
    run.lines = lines
    return run


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 1], 1),
        ([76, 2, 1], 2),
        ([76, 1], 1),
        ([76, -9], -9),
        ([76, -6], 76),
        ([75, -6], -6),
        ([75, 76], 76),
        ([75, 75], 75),
        ([3, 76], 3),
        ([None, -9], -9),
        ([None, None], exit_codes.STUCK),
    ],
)
def test_the_code_of_all(codes, expected):
    assert outcome(codes) == expected


def test_what_is_started_again():
    assert [code for code in (-9, -15, 0, 1, 2, 3, 75, 76, 130) if is_worth_a_restart(code)] == [
        -9, -15, 75, 76,
    ]  # fmt: skip


def test_all_are_started_again_on_another_port(run):
    assert run("0:0", "1:-9", "1:76", "1:75", "1:0") == 0
    assert (run.starts(0), run.starts(1)) == (4, 4)
    ports = [line.split()[-1] for line in run.log(1).splitlines()]
    assert len(set(ports)) > 1
    assert "ended by SIGKILL" in run.lines[0]
    assert "exit code 76" in run.lines[1]


@pytest.mark.parametrize("code", [1, 2, 3])
def test_other_errors_are_final(run, code):
    assert run("0:76", f"1:{code}") == code
    assert run.starts(1) == 1


def test_a_process_that_does_not_end_is_ended(run):
    began = time.monotonic()
    assert run("0:hang", "1:-9", max_restarts=0) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 60
    assert run.starts(0) == 1


def test_restarts_without_progress_come_to_an_end(run):
    assert run("76", number=1, max_restarts=2) == exit_codes.STUCK
    assert run.starts(0) == 3
    assert "2 restarts in a row made no new checkpoint" in run.lines[-1]


def test_a_new_checkpoint_begins_the_count_anew(run):
    assert run("76", "saved76", "76", "0", number=1, max_restarts=2) == 0
    assert run.starts(0) == 4


def test_a_checkpoint_in_part_is_none(run):
    assert run("76", "begun76", "76", "0", number=1, max_restarts=2) == exit_codes.STUCK
    assert run.starts(0) == 3


def test_without_restarts_the_code_is_that_of_the_run(run):
    assert run("75", number=1, max_restarts=0) == exit_codes.PREEMPTED
    assert run.starts(0) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_end_it(number, tmp_path, ctrl_c_counts):
    program = f"""
        import sys
        from pathlib import Path
        from MaxText.launching import supervision
        job = supervision.Job(
            [sys.executable, "-c", {textwrap.dedent(WORKER)!r}, sys.argv[1], "wait"],
            2, None, Path(sys.argv[1]) / "logs", None)
        sys.exit(supervision.run(job, supervision.Policy(5, 0.01, 5.0), print))
    """
    with started(program, str(tmp_path)) as process:
        wait_for(process, "[0] attempt")
        while not (tmp_path / "starts.1").exists():
            time.sleep(0.01)
        process.send_signal(number)
        code, output = ended(process)
    # SIGINT becomes a KeyboardInterrupt of Python, which ends by the signal as well.
    assert code == 128 + number, output
    assert "starting all" not in output


def test_the_environment_of_a_process():
    assert environment_of({"A": "b"}, 1, 0, 5, None) == {"A": "b"}
    assert environment_of({}, 2, 1, 5, 4) == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:5",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_LOCAL_DEVICE_IDS": "4,5,6,7",
        "MAXTEXT_NUM_DEVICES": "8",
    }


def test_output_has_the_number_of_its_process(capsys, run):
    assert run("0") == 0
    shown = capsys.readouterr().out
    assert "[0] attempt 0" in shown
    assert "[1] attempt 0" in shown
    assert run.log(0).startswith("attempt 0")
