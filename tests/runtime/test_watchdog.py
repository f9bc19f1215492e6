"""A process without progress ends, and says which process the others wait for."""

import json
import os
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from etils import epath

from MaxText import exit_codes
from MaxText.runtime import watchdog as module
from MaxText.runtime.watchdog import Watchdog, describe, peer_in_long_phase
from tests.programs import ended, started

STUCK_IN_DATA = """
    import sys, time
    from MaxText.runtime.watchdog import Watchdog

    def a_read_that_hangs():
        time.sleep(60)

    Watchdog(sys.argv[1], 0.1, 0, 2).start().enter("data", 7)
    a_read_that_hangs()
"""


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


def left_by(folder, process=0):
    return json.loads((folder / "processes" / f"{process}.json").read_text())


def phase_of(folder, process):
    there = (folder / "processes" / f"{process}.json").exists()
    return left_by(folder, process)["phase"] if there else None


class Clock:
    """Takes the place of the module `time`; threads of watchdogs look at it every period."""

    def __init__(self):
        self.now = 1000.0
        self._looks: dict[threading.Thread, int] = {}

    def time(self):
        return self.now

    def monotonic(self):
        thread = threading.current_thread()
        self._looks[thread] = self._looks.get(thread, 0) + 1
        return self.now

    def advance(self, seconds, steps=1, watchdogs=1):
        """Moves on in steps, after each of which every watchdog looks twice, or has ended."""
        for _ in range(steps):
            self._wait_for(watchdogs, dict(self._looks))
            self.now += seconds / steps
            self._wait_for(watchdogs, dict(self._looks))

    def _wait_for(self, watchdogs, before):
        def has_looked(thread):
            return not thread.is_alive() or self._looks[thread] >= before.get(thread, 0) + 2

        while sum(has_looked(one) for one in [*self._looks] if one.name == "watchdog") != watchdogs:
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", Clock())
    return module.time


@pytest.fixture
def exits(monkeypatch):
    codes = []
    monkeypatch.setattr(module, "os", SimpleNamespace(getpid=os.getpid, _exit=codes.append))
    return codes


def watching(*arguments):
    """A watchdog that stops watching once it has said that there is no progress."""
    watchdog = Watchdog(*arguments, say=lambda line: watchdog.close("stuck"))
    return closing(watchdog.start())


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
    ids=["step", "not collective", "longest", "silent", "failed", "stuck", "no file", "start"],
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


def test_a_process_without_progress_ends_with_stacks(tmp_path):
    with started(STUCK_IN_DATA, str(tmp_path)) as process:
        code, output = ended(process)
    assert code == exit_codes.STALLED
    for words in ("process 0 of 2", "data of step 7 (heartbeat_timeout=0.1)", "a_read_that_hangs"):
        assert words in output  # the last in its stack
    assert left_by(tmp_path).items() >= {"state": "stuck", "phase": "data", "step": 7}.items()


@pytest.mark.parametrize(("phase", "longest"), [("data", 0.2), ("compile", 1.2)])
def test_a_phase_ends_in_time(phase, longest, clock, exits):
    with watching(None, 0.2) as watchdog:
        for _ in range(3):
            watchdog.enter(phase, 3)  # the same again, one batch after another
            clock.advance(0.9 * longest, steps=4)
        assert exits == []
        clock.advance(0.2 * longest)
    assert exits == [exit_codes.STALLED]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(0, 12, "step"), row(1, 11, "compile")], True),
        ([row(0, 12, "step"), row(1, 11, "step")], False),
        ([row(0, 12, "compile"), row(1, 11, "step")], False),  # it asks itself
        ([row(0, 12, "step"), row(1, 11, "compile", written=70.0)], False),
        ([row(0, 12, "step"), row(1, 11, "compile", state="failed: ValueError")], False),
        ([row(0, 12, "step"), {"process": 1}], False),
        ([], False),
    ],
    ids=["compiles", "steps", "itself", "silent", "failed", "no file", "unreadable"],
)
def test_another_takes_long(rows, expected):
    assert peer_in_long_phase(rows, 0, silent_seconds=10.0) is expected


def test_a_step_waits_for_a_process_that_compiles(tmp_path, clock, exits):
    with watching(tmp_path, 0.2, 1, 2) as other, watching(tmp_path, 0.2, 0, 2) as own:
        own.enter("step", 7)
        for phase, seconds in (("compile", 0.8), ("step", 0.1)):
            assert exits == []
            other.enter(phase, 7)
            for number, name in ((0, "step"), (1, phase)):
                while phase_of(tmp_path, number) != name:
                    time.sleep(0.001)
            clock.advance(seconds, steps=round(seconds / 0.1), watchdogs=2)
    assert exits == [exit_codes.STALLED]


def test_time_in_which_it_was_stopped_does_not_count(clock, exits):
    with watching(None, 1.5) as watchdog:
        watchdog.enter("step", 1)
        clock.advance(0.1)
        clock.advance(600.0)  # Ctrl-Z: no thread looks at the clock meanwhile
        assert exits == []
        clock.advance(1.0)
    assert exits == [exit_codes.STALLED]


def test_files_are_read_at_once_and_those_that_hang_are_skipped(tmp_path, monkeypatch):
    folder = tmp_path / "processes"
    folder.mkdir()
    for process in range(40):
        (folder / f"{process}.json").write_text(json.dumps(row(process, 7, "step")))
    read, hangs = type(epath.Path(folder)).read_text, threading.Event()
    others = threading.Barrier(40)

    def slow(path, **options):
        if path.name == "5.json":
            hangs.wait(60)
        else:
            others.wait(60)  # for all to be read at the same time
        return read(path, **options)

    monkeypatch.setattr(type(epath.Path(folder)), "read_text", slow)
    table = Watchdog(tmp_path, 600.0, 0, 41, read_seconds=0.3).describe_all()
    hangs.set()
    assert "40  no status file" in table
    assert "slowest: process 40" in table
    assert f"  {5:>7}  " not in table


def test_an_exception_is_left_for_the_others(tmp_path):
    with closing(Watchdog(tmp_path, 0, 0, 2).start()) as watchdog:
        watchdog.fail(ValueError("no"))
        assert left_by(tmp_path)["state"] == "failed: ValueError"
    with closing(Watchdog(tmp_path, 5.0, 0, 2).start()) as watchdog:
        watchdog.enter("evaluation", 3)
    expected = {"process": 0, "phase": "evaluation", "state": "ended"}
    assert left_by(tmp_path).items() >= expected.items()


def test_what_is_not_written_delays_no_process(tmp_path):
    with closing(Watchdog(tmp_path, 5.0).start()) as watchdog:  # of a run of one process
        assert watchdog.describe_all() == ""
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with closing(Watchdog(tmp_path / "file", 5.0, 0, 2).start()) as watchdog:
        watchdog.enter("step", 1)
        assert "1  no status file" in watchdog.describe_all()
