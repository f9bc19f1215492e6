"""What processes say of each other through the coordinator of jax.distributed."""

import pytest

from MaxText.runtime.peers import (
    LivenessTracker,
    StatusBoard,
    describe,
    peer_in_long_phase,
    shows_culprit,
)
from tests.runtime.coordinator import Coordinator


def row(process, step, phase, since=90.0, written=100.0, state="running"):
    return {
        "process": process,
        "host": f"host{process}",
        "pid": 1,
        "state": state,
        "phase": phase,
        "step": step,
        "since": since,
        "written": written,
    }


@pytest.mark.parametrize(
    ("rows", "slowest"),
    [
        ([row(0, 12, "step"), row(1, 11, "step"), row(2, 12, "step")], 1),
        ([row(0, 12, "step", since=1.0), row(1, 12, "data")], 1),
        ([row(0, 12, "checkpoint", since=50.0), row(1, 12, "checkpoint", since=40.0)], 1),
        ([row(0, 12, "data"), row(1, 13, "step", written=70.0)], 1),
        ([row(0, 12, "data"), row(1, 13, "step", state="failed: ValueError")], 1),
        ([row(0, 12, "step", state="stuck"), row(1, 12, "data", state="stuck")], 1),
        ([row(0, 12, "step"), {"process": 1}], 1),
        ([row(0, None, "startup"), row(1, 0, "step")], 0),
    ],
    ids=["step", "not collective", "longest", "silent", "failed", "stuck", "no status", "start"],
)
def test_the_slowest_process_is_named(rows, slowest):
    last = describe(rows, silent_seconds=10.0).splitlines()[-1]
    assert last.strip().startswith(f"slowest: process {slowest},")


def test_the_table_shows_every_process(told):
    rows = [row(0, 12, "step"), row(1, 12, "data", written=70.0), {"process": 2}]
    table = describe(rows, 10.0)
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["0", "1", "2"]
    told(table)
    many = [row(process, 7, "step") for process in range(1000)]
    assert len(describe(many, 10.0).splitlines()) < 40


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(0, 12, "step"), row(1, 11, "compile")], True),
        ([row(0, 12, "step"), row(1, 11, "step")], False),
        ([row(0, 12, "compile"), row(1, 11, "step")], False),  # it asks itself
        # Clocks of machines differ; who is dead is found otherwise.
        ([row(0, 12, "step"), row(1, 11, "compile", written=70.0)], True),
        ([row(0, 12, "step"), row(1, 11, "compile", state="failed: ValueError")], False),
        ([row(0, 12, "step"), {"process": 1}], False),
        ([], False),
    ],
    ids=["compiles", "steps", "itself", "another clock", "failed", "no status", "unreadable"],
)
def test_another_takes_long(rows, expected):
    assert peer_in_long_phase(rows, 0) is expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(0, 12, "step"), row(1, 11, "step")], False),
        ([row(0, 12, "step"), row(1, 11, "step", written=70.0)], True),
        ([row(0, 12, "step"), row(1, 11, "data", written=70.0, state="ended")], False),
        ([row(0, 12, "step"), row(1, 11, "step", state="failed: ValueError")], True),
        ([row(0, 12, "step"), {"process": 1}], False),
        ([], False),
    ],
    ids=["all well", "silent", "ended", "failed", "no status", "unreadable"],
)
def test_one_to_blame(rows, expected):
    assert shows_culprit(rows, silent_seconds=10.0) is expected


def test_a_board_has_the_newest_row_of_each_process():
    board = StatusBoard(Coordinator(), 3)
    for step in (1, 2):
        board.publish(row(2, step, "step"))
    assert board.rows() == [{"process": 0}, {"process": 1}, row(2, 2, "step")]
    assert board.row(2) == row(2, 2, "step")
    assert board.row(1) == {"process": 1}


def test_the_first_verdict_stands():
    board = StatusBoard(Coordinator(), 3)
    assert board.lost() is None
    board.declare_lost(row(2, 7, "step"), "dead")
    board.declare_lost(row(1, 7, "step"), "dead, too")
    assert board.lost() == row(2, 7, "step") | {"reason": "dead"}


def test_a_coordinator_that_does_not_answer_is_not_waited_for():
    store = Coordinator()
    board = StatusBoard(store, 2)
    board.publish(row(1, 2, "step"))
    assert len(board.try_rows(60.0)) == 2
    store.is_gone = True
    assert board.try_rows(60.0) == []
    store.answers.clear()
    assert board.try_rows(0.01) == []
    store.answers.set()


def lost_after(seconds, *rows, tracker=None):
    """What a tracker says of rows that it saw at second 0, and again later."""
    tracker = tracker or LivenessTracker(0.0)
    tracker.observe(rows, 0.0)
    tracker.observe(rows, seconds)
    return tracker.lost(rows, seconds, 100.0)


def test_a_process_is_lost_if_its_status_stays_the_same():
    running = row(1, 7, "compile")
    assert lost_after(100.0, running) is None
    reason = "no sign of life for 101 s: dead or frozen"
    assert lost_after(101.0, running) == (running, reason)
    assert lost_after(600.0, {"process": 1}) is None  # it has not published one yet
    assert lost_after(601.0, {"process": 1})
    assert lost_after(101.0, row(1, 7, "step", state="lost a peer"))  # and it has exited
    assert lost_after(101.0, row(1, 7, "step", state="ended")) is None


def test_a_clock_of_another_machine_does_not_matter():
    tracker = LivenessTracker(0.0)
    for seconds in (0.0, 60.0, 120.0):
        rows = [row(1, 7, "step", written=9000.0 - seconds)]
        tracker.observe(rows, seconds)
        assert tracker.lost(rows, seconds, 100.0) is None


def test_own_suspension_is_no_silence_of_others():
    tracker = LivenessTracker(0.0)
    rows = [row(1, 7, "step"), {"process": 2}]
    tracker.observe(rows, 0.0)
    tracker.shift(3600.0)
    tracker.observe(rows, 3601.0)
    assert tracker.lost(rows, 3601.0, 100.0) is None


@pytest.mark.parametrize(
    ("phase", "state", "is_lost"),
    [
        ("step", "failed: ValueError", True),
        ("data", "stuck", True),
        ("step", "stuck", False),  # it waits for the one to blame
        ("step", "lost a peer", False),
    ],
)
def test_a_process_that_failed_is_lost_at_once(phase, state, is_lost):
    failed = row(1, 7, phase, state=state)
    assert lost_after(0.0, row(2, 7, "step"), failed) == ((failed, state) if is_lost else None)
