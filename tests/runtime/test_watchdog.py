"""A process without progress ends, and says which process the others wait for."""

import os
import socket
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from MaxText import exit_codes
from MaxText.runtime import watchdog as module
from MaxText.runtime.peers import StatusBoard
from MaxText.runtime.watchdog import Watchdog
from tests.programs import ended, started
from tests.runtime.coordinator import Coordinator

STUCK_IN_DATA = """
    import time
    from MaxText.runtime.watchdog import Watchdog
    from tests.runtime.coordinator import Coordinator

    def a_read_that_hangs():
        time.sleep(60)

    Watchdog(0.1, 1, 2, store=Coordinator()).start().enter("data", 7)
    a_read_that_hangs()
"""


def row_of(store, process):
    return StatusBoard(store, 2).row(process)


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Clock:
    """Takes the place of the module `time`; threads of watchdogs look at it every period."""

    def __init__(self):
        self.now = 1000.0
        self._looks: dict[threading.Thread, int] = {}

    def time(self):
        return self.now

    def sleep(self, seconds):
        pass

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


def watching(*arguments, told=None, **options):
    """A watchdog that stops watching once it has said why it ends."""

    def say(text):
        if told is not None:
            told.append(text)
        watchdog.close()

    watchdog = Watchdog(*arguments, say=say, **options)
    return closing(watchdog.start())


def test_a_process_without_progress_ends_with_stacks():
    with started(STUCK_IN_DATA) as process:
        code, output = ended(process)
    assert code == exit_codes.STALLED
    for words in ("process 1 of 2", "data of step 7 (heartbeat_timeout=0.1)", "a_read_that_hangs"):
        assert words in output  # the last in its stack


@pytest.mark.parametrize(("phase", "longest"), [("data", 0.2), ("compile", 1.2)])
def test_a_phase_ends_in_time(phase, longest, clock, exits):
    with watching(0.2) as watchdog:
        for _ in range(3):
            watchdog.enter(phase, 3)  # the same again, one batch after another
            clock.advance(0.9 * longest, steps=4)
        assert exits == []
        clock.advance(0.2 * longest)
    assert exits == [exit_codes.STALLED]


def test_a_step_waits_for_a_process_that_compiles(clock, exits):
    store = Coordinator()
    with watching(0.2, 1, 2, store=store) as other, watching(0.2, 0, 2, store=store) as own:
        own.enter("step", 7)
        for phase, seconds in (("compile", 0.8), ("step", 0.1)):
            assert exits == []
            other.enter(phase, 7)
            for number, name in ((0, "step"), (1, phase)):
                while row_of(store, number).get("phase") != name:
                    time.sleep(0.001)
            for _ in range(round(seconds / 0.1)):
                time.sleep(0.05)  # real time, in which both publish
                clock.advance(0.1, watchdogs=4)
    assert exits
    assert set(exits) == {exit_codes.STALLED}


def test_time_in_which_it_was_stopped_does_not_count(clock, exits):
    with watching(1.5) as watchdog:
        watchdog.enter("step", 1)
        clock.advance(0.1)
        clock.advance(600.0)  # Ctrl-Z: no thread looks at the clock meanwhile
        assert exits == []
        clock.advance(1.0)
    assert exits == [exit_codes.STALLED]


def test_a_failed_peer_ends_this_process_and_is_named(exits):
    store = Coordinator()
    told = []
    with watching(5.0, 0, 2, store=store, told=told):
        with closing(Watchdog(5.0, 1, 2, store=store).start()) as other:
            other.enter("data", 7)
            other.fail(ValueError("no"))
        wait_until(lambda: exits)
    assert exits == [exit_codes.STALLED]
    place = f"{socket.gethostname()}, pid {os.getpid()}"
    assert f"lost process 1 of 2 on {place} (failed: ValueError)" in told[0]
    assert "last seen in data of step 7, since " in told[0]
    assert "slowest: process 1" in told[0]


def test_the_failure_of_the_first_process_ends_the_others(exits):
    store = Coordinator()
    told = []
    first = Watchdog(5.0, 0, 2, store=store).start()
    with watching(5.0, 1, 2, store=store, told=told), closing(first):
        first.fail(ValueError("no"))
        wait_until(lambda: exits)
    assert "lost process 0 of 2" in told[0]


@pytest.mark.parametrize("hangs", [False, True], ids=["gone", "frozen"])
def test_a_coordinator_without_an_answer_ends_this_process(hangs, exits):
    store = Coordinator()
    told = []
    row = {"process": 0, "host": "first", "pid": 7, "phase": "step", "step": 7}
    StatusBoard(store, 2).publish(row | {"since": 0.0, "written": 0.0})
    watchdog = Watchdog(1.0, 1, 2, store=store, say=told.append, read_seconds=0.1).start()
    with closing(watchdog):
        wait_until(lambda: row_of(store, 1).get("phase"))
        store.answers.clear() if hangs else setattr(store, "is_gone", True)
        while not exits:
            watchdog.enter("data", 8)  # it makes progress itself
            time.sleep(0.01)
        store.answers.set()
    assert set(exits) == {exit_codes.STALLED}
    assert "lost process 0 of 2 on first, pid 7 (its coordinator has not answered" in told[0]
    assert "last seen in step 7, since 00:00:00 UTC" in told[0]


def test_what_others_see_of_an_end():
    store = Coordinator()
    with closing(Watchdog(5.0, 1, 2, store=store).start()) as watchdog:
        watchdog.enter("evaluation", 3)
        watchdog.leave()
        assert row_of(store, 1).items() >= {"phase": "evaluation", "state": "ended"}.items()
    with closing(Watchdog(0, 0, 2, store=store).start()) as watchdog:
        watchdog.fail(ValueError("no"))
        assert row_of(store, 0)["state"] == "failed: ValueError"


def test_a_run_of_one_process_has_no_table():
    with closing(Watchdog(5.0, store=Coordinator()).start()) as watchdog:
        assert watchdog.describe_all() == ""
