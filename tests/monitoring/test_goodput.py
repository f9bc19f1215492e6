"""Where the time went: parts that add up to the time the program ran, whatever happened to it."""

import pytest

from MaxText.monitoring.goodput import PARTS
from MaxText.monitoring.run_record import read_run


def train(run, first, end):
    for step in range(first, end):
        run.add("step", 1.0, step, updates=1, data_seconds=0.0)


def goodput_of(run):
    return read_run(run.write()).goodput


def test_parts_add_up_to_the_whole_time(completed_run, eventful_run):
    for record in (read_run(completed_run), read_run(eventful_run)):
        goodput = record.goodput
        assert set(goodput.seconds) == set(PARTS)
        assert sum(goodput.share(part) for part in PARTS) == pytest.approx(1)
        last = max(row["time"] for row in (*record.marks, *record.steps))
        elapsed = pytest.approx(last - goodput.attempts[0].launched)
        assert goodput.running_seconds + goodput.down_seconds == elapsed
        # Times are stored in milliseconds, durations are not.
        running = sum(attempt.seconds for attempt in goodput.attempts)
        assert running == pytest.approx(goodput.running_seconds, abs=0.01)


def test_each_part(run):
    run.add("step", 10.0, 0, updates=10, data_seconds=2.0)
    run.add("evaluation", 3.0, 0)
    run.now += 4  # nobody says what this was
    run.add("checkpoint", 1.0, 0)
    run.add("sample", 0.5, 0, text="x")
    run.add("stop", 0.25, 0, reason="completed")
    expected = {"useful": 8.0, "data_wait": 2.0, "start_up": 6.0, "compile": 9.0, "other": 4.0}
    expected |= {"evaluation": 3.0, "checkpoint": 1.0, "lost": 0.0, "finish": 0.75}
    assert goodput_of(run).seconds == pytest.approx(expected)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_kill_loses_work_and_the_pause_is_no_running_time(run, interrupted):
    train(run, 0, 10)
    if interrupted:
        run.add("stop", 0.5, None, reason="interrupted")
        stop = run.rows.pop()
    run.kill_and_resume(6, down=100.0)
    if interrupted:
        run.rows.insert(-2, stop)
    train(run, 6, 10)
    goodput = goodput_of(run)
    assert goodput.seconds["lost"] == pytest.approx(4)
    assert goodput.seconds["useful"] == pytest.approx(10)
    assert goodput.seconds["other"] == pytest.approx(0, abs=1e-6)
    assert goodput.down_seconds == pytest.approx(100)
    assert goodput.running_seconds == pytest.approx(25 + 15 + 4 + 0.5 * interrupted)
    first, second = goodput.attempts
    assert (first.stopped, second.stopped) == (interrupted, False)
    assert first.seconds == second.running_before == pytest.approx(25 + 0.5 * interrupted)


def test_work_lost_over_two_attempts(run):
    train(run, 0, 10)
    run.kill_and_resume(10, down=50.0)
    train(run, 10, 13)
    # The newest checkpoint was unreadable: this one goes back behind the second attempt.
    run.kill_and_resume(5, down=70.0)
    goodput = goodput_of(run)
    assert goodput.seconds["lost"] == pytest.approx(8)
    assert goodput.seconds["useful"] == pytest.approx(5)
    assert goodput.down_seconds == pytest.approx(120)
    assert goodput.seconds["other"] == pytest.approx(0, abs=1e-6)


def test_skipped_and_rolled_back_steps_are_lost(run):
    # A record that was skipped costs no step.
    run.add("skip", 0.0, 3, what="record", reason="part.txt:7 is not UTF-8", count=1)
    run.add("step", 10.0, 9, updates=10, data_seconds=0.0)
    seconds = goodput_of(run).seconds
    assert (seconds["lost"], seconds["useful"]) == (0, pytest.approx(10))
    run.add("skip", 0.0, 12, reason="gradient norm", count=1)
    run.add("skip", 0.0, 15, reason="gradient norm", count=1)
    run.add("step", 20.0, 19, updates=10, data_seconds=0.0)
    assert goodput_of(run).seconds["lost"] == pytest.approx(2 * 2.0)
    run.add("rewind", 0.0, 19, to=10, reason="loss")
    seconds = goodput_of(run).seconds
    # All ten are done again, the two among them.
    assert (seconds["lost"], seconds["useful"]) == (pytest.approx(20), pytest.approx(10))
