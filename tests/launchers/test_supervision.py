"""Processes that fail are ended together, and started again where that may help."""

import signal
import time

import pytest

from MaxText import exit_codes
from MaxText.launchers import supervision
from MaxText.launchers.supervision import (
    LocalOptions,
    combined_exit_code,
    is_restartable,
    lost_processes,
    process_env,
)
from tests.programs import ended, started, wait_for

# Counts its starts in a file, and ends as its arguments say: code or signal of each attempt.
WORKER = """
    folder=$0 rank=${JAX_PROCESS_ID:-0}
    printf x >> "$folder/starts.$rank"
    attempt=$(($(wc -c < "$folder/starts.$rank") - 1))
    echo "attempt $attempt port $JAX_COORDINATOR_ADDRESS"
    echo "$JAX_NUM_PROCESSES" >> "$folder/counts"
    mine=()
    for end in "$@"; do
        case $end in $rank:*) mine+=("${end#*:}") ;; *:*) ;; *) mine+=("$end") ;; esac
    done
    last=$((${#mine[@]} - 1))
    end=${mine[$((attempt < last ? attempt : last))]}
    # Without the arrays a checkpoint is not complete.
    case $end in
        hang) trap "" TERM; sleep 1000 & wait; wait; sleep 1000 ;;
        wait) exec sleep 1000 ;;
        saved*) mkdir -p "$folder/run/checkpoints/$attempt/items" ;;
        begun*) mkdir -p "$folder/run/checkpoints/$attempt/metadata" ;;
        -*) kill $end $$ ;;
    esac
    end=${end#saved}
    exit "${end#begun}"
"""


@pytest.fixture
def run(tmp_path):
    lines = []

    def run(*ends, number=2, max_restarts=3, grace=0.3, smaller_counts=()):
        command = ["bash", "-c", WORKER, str(tmp_path), *ends]
        options = LocalOptions(
            supervise=True,
            max_restarts=max_restarts,
            backoff=0.01,
            grace_period=grace,
            log_dir=str(tmp_path / "logs"),
        )
        folder = str(tmp_path / "run")
        return supervision.supervise(
            command, number, options, folder, lines.append, smaller_counts=smaller_counts
        )

    run.starts = lambda rank: len((tmp_path / f"starts.{rank}").read_text())
    run.log = lambda rank: (tmp_path / "logs" / f"{rank}.log").read_text()
    run.lines = lines
    return run


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0), ([0, 1], 1), ([76, 2, 1], 2), ([76, 1], 1), ([76, -9], -9), ([76, -6], 76),
        ([75, -6], -6), ([75, 76], 76), ([75, 75], 75), ([3, 76], 3), ([None, -9], -9),
        ([None, None], exit_codes.STALLED),
    ],
)  # fmt: skip
def test_the_code_of_all(codes, expected):
    assert combined_exit_code(codes) == expected


def test_what_is_started_again():
    assert [code for code in (-9, -15, 0, 1, 2, 3, 75, 76, 130) if is_restartable(code)] == [
        -9, -15, 75, 76,
    ]  # fmt: skip


def test_all_are_started_again_on_another_port(run, capsys):
    assert run("0:0", "1:-9", "1:75", "1:0") == 0
    assert (run.starts(0), run.starts(1)) == (3, 3)
    assert len({line.split()[-1] for line in run.log(1).splitlines()}) > 1
    told = [line for line in run.lines if "Restarting" in line]
    assert "SIGKILL" in told[0]
    assert "75" in told[1]
    shown = capsys.readouterr().out
    assert "[0] attempt 0" in shown
    assert "[1] attempt 0" in shown
    assert run.log(0).startswith("attempt 0")


@pytest.mark.parametrize(
    ("ends", "number", "max_restarts", "code", "starts"),
    [
        (["0:76", "1:2"], 2, 3, 2, 1),  # another start does not correct a mistake
        (["0:hang", "1:-9"], 2, 0, 128 + signal.SIGKILL, 1),
        (["76"], 1, 2, exit_codes.STALLED, 3),
        (["76", "saved76", "76", "0"], 1, 2, 0, 4),  # a checkpoint restarts the count
        (["76", "begun76", "76", "0"], 1, 2, exit_codes.STALLED, 3),
        (["75"], 1, 0, exit_codes.PREEMPTED, 1),
    ],
)
def test_restarts(run, ends, number, max_restarts, code, starts):
    assert run(*ends, number=number, max_restarts=max_restarts) == code
    assert run.starts(0) == starts


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([76, -9, 76], [1]),
        ([-6, -9, -6], [1]),  # the coordinator was killed, and jax aborted the others
        ([-9, -6, 76], [0]),
        ([76, None, 76], [1]),  # frozen, and stopped in the end
        ([None, -9, None], [1]),
        ([76, 75, 76], []),
        ([-9, -9, -9], []),  # none is left
    ],
)
def test_processes_to_blame(codes, expected):
    assert lost_processes(codes) == expected


def test_a_run_goes_on_with_fewer_processes_of_the_same_batch(run, tmp_path):
    # Of four the second is killed; three are left, and only two divide the batch.
    ends = ("1:-9", "1:0", "0:wait", "0:0", "2:wait", "3:wait")
    assert run(*ends, number=4, smaller_counts=[2]) == 0
    (told,) = (line for line in run.lines if "Lost" in line)
    assert "killed by SIGKILL. Lost process 1 of 4. Going on with 2 processes and the same" in told
    assert "(3 do not divide it)" in told
    counts = (tmp_path / "counts").read_text().split()
    assert sorted(counts) == ["2"] * 2 + ["4"] * 4


def test_a_run_with_too_few_processes_left_waits_for_the_lost_ones(run, tmp_path):
    # The second of three is killed, and then the first of the two that are left.
    ends = ("1:-9", "1:wait", "1:0", "0:wait", "0:-9", "0:0", "2:wait", "2:0")
    assert run(*ends, number=3, smaller_counts=[2]) == 0
    told = [line for line in run.lines if "Lost" in line]
    assert "Going on with 2 processes" in told[0]
    assert "waiting for the lost ones. Restarting all 3" in told[1]
    counts = (tmp_path / "counts").read_text().split()
    assert sorted(counts) == ["2"] * 2 + ["3"] * 6


def test_a_killed_process_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(supervision, "SECONDS_AFTER_A_KILL", 0.1)
    monkeypatch.setattr(supervision, "SECONDS_TO_REPORT", 0.2)
    began = time.monotonic()
    # The other one hangs, in spite of SIGTERM.
    assert run("0:hang", "1:-9", "0", grace=60.0) == 0
    assert run.starts(0) == 2
    assert time.monotonic() - began < 30


def test_a_process_that_failed_by_itself_leaves_the_grace_period(run, monkeypatch):
    monkeypatch.setattr(supervision, "SECONDS_AFTER_A_KILL", 0.0)
    began = time.monotonic()
    assert run("0:wait", "1:3", grace=1.0, max_restarts=0) == 3
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_signals_are_passed_on_and_end_it(number, tmp_path, ctrl_c_counts):
    program = f"""
        import sys
        from MaxText.launchers import supervision
        local = supervision.LocalOptions(
            supervise=True, max_restarts=5, grace_period=5.0, log_dir=sys.argv[1] + "/logs")
        command = ["bash", "-c", {WORKER!r}, sys.argv[1], "wait"]
        sys.exit(supervision.supervise(command, 2, local, sys.argv[1], print))
    """
    with started(program, str(tmp_path)) as process:
        wait_for(process, "[0] attempt")
        while not (tmp_path / "starts.1").exists():
            time.sleep(0.01)
        process.send_signal(number)
        code, output = ended(process)
    assert code == 128 + number, output
    assert "Restarting all" not in output


def test_the_environment_of_a_process():
    assert process_env({"A": "b"}, 1, 0, 5, None) == {"A": "b"}
    assert process_env({}, 2, 1, 5, 4) == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:5",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_LOCAL_DEVICE_IDS": "4,5,6,7",
        "MAXTEXT_NUM_DEVICES": "8",
    }
    # A lost process takes its GPUs with it.
    assert process_env({}, 2, 1, 5, 4, slot=3)["JAX_LOCAL_DEVICE_IDS"] == "12,13,14,15"
    assert process_env({}, 1, 0, 5, 1, slot=3)["JAX_CUDA_VISIBLE_DEVICES"] == "3"
