"""The time left over a whole set of runs, with a clock of our own."""

from pathlib import Path

import pytest

from MaxText.comparison.plan import Run
from MaxText.comparison.set_progress import SetProgress
from tests.small_models import tiny_config


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def runs(*weights: float) -> list[Run]:
    config = tiny_config(steps=10)
    return [Run(f"r{i}", 0, config, Path(f"r{i}"), weight) for i, weight in enumerate(weights)]


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    return []


def test_time_left_is_work_left_at_the_speed_so_far(lines):
    clock, (first, second) = Clock(), runs(1.0, 3.0)
    with SetProgress([first, second], [], lines.append, clock) as progress:
        progress.begin(first, 0)
        clock.now += 6  # up to the first step
        progress.steps(1)
        assert progress.left() == ""
        clock.now += 4
        progress.steps(5)  # 0.4 of work in 4 s
        assert progress.left() == ", about 0:00:41 left"  # 3.5 of work, and a start of 6 s
        clock.now += 5
        progress.end(first, "validation loss 4.0")
        assert progress.left() == ", about 0:00:36 left"
        progress.begin(second, 0)
        clock.now += 4
        assert progress.left() == ", about 0:00:36 left"
        progress.steps(0)
        clock.now += 26
        progress.end(second, "diverged at step 3")
    assert lines == [
        "[1/2] r0 seed 0: started",
        "[1/2] r0 seed 0: validation loss 4.0, 0:00:15, about 0:00:36 left",
        "[2/2] r1 seed 0: started",
        "[2/2] r1 seed 0: diverged at step 3, 0:00:30",
    ]


def test_earlier_work_does_not_make_this_start_look_fast(lines):
    clock, (first, second, third) = Clock(), runs(1.0, 1.0, 1.0)
    with SetProgress([first, second, third], [first], lines.append, clock) as progress:
        progress.begin(second, 5)
        progress.steps(6)
        clock.now += 8
        progress.steps(10)
        assert progress.left() == ", about 0:00:20 left"
    assert lines == ["[2/3] r1 seed 0: goes on"]


def test_without_a_terminal_a_line_now_and_then(lines):
    clock, (only,) = Clock(), runs(1.0)
    with SetProgress([only], [], lines.append, clock) as progress:
        progress.begin(only, 0)
        for done in range(1, 9):
            clock.now += 20
            progress.steps(done)
    assert lines[1:] == [
        "[1/1] r0 seed 0: 3/10 steps, about 0:02:20 left",
        "[1/1] r0 seed 0: 6/10 steps, about 0:01:20 left",
    ]


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    clock, shown = Clock(), []
    first, second = runs(1.0, 1.0)
    with SetProgress([first, second], [first], shown.append, clock) as progress:
        progress.begin(second, 0)
        clock.now += 10
        progress.steps(5)
        progress.end(second, "validation loss 4.0")
        progress.close()
    assert not shown  # lines go above the bar
    assert "[2/2] r1 seed 0: validation loss 4.0" in capsys.readouterr().err
