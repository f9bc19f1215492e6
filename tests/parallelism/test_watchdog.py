"""A process without progress ends, and says which process the others wait for."""

import json
import signal
import threading
import time

import pytest
from etils import epath

from MaxText import exit_codes
from MaxText.parallelism.watchdog import Watchdog, another_takes_long, describe
from tests.parallelism.child_programs import ended, started, wait_for

STUCK_IN_DATA = """
    import sys, time
    from MaxText.parallelism.watchdog import Watchdog

    def a_read_that_hangs():
        time.sleep(60)

    with Watchdog(sys.argv[1], float(sys.argv[2]), 0, 2) as watchdog:
        watchdog.enter(sys.argv[3], 7)
        print("began", flush=True)
        a_read_that_hangs()
"""


def row(process, step, phase, since=90.0, written=100.0, state="running"):
    return {
        "process": process, "host": f"host{process}", "pid": 1, "state": state, "phase": phase,
        "step": step, "since": since, "written": written,
    }  # fmt: skip


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
        ([row(0, None, "start_up"), row(1, 0, "step")], 0),
    ],
    ids=["step", "not collective", "longest", "silent", "failed", "stuck", "no file", "start"],
)
def test_the_slowest_process_is_named(rows, slowest):
    text = describe(rows, silent_seconds=10.0)
    assert f"slowest: process {slowest}, last seen in" in text


def test_the_table_shows_every_process():
    lines = describe(
        [row(0, 12, "step"), row(1, 12, "data", written=70.0), {"process": 2}], 10.0
    ).splitlines()
    assert lines[0].split() == ["process", "host", "step", "phase", "for", "state"]
    assert lines[1].split() == ["0", "host0", "12", "step", "10", "s", "running"]
    assert "silent for 30 s: gone or frozen" in lines[2]
    assert "2  has left no file" in lines[3]


def test_a_process_without_progress_ends_with_stacks(tmp_path):
    with started(STUCK_IN_DATA, str(tmp_path), "1.0", "data") as process:
        code, output = ended(process)
    assert code == exit_codes.STUCK
    assert "process 0 of 2 has made no progress" in output
    assert "in data of step 7 (heartbeat_timeout=1)" in output
    assert "a_read_that_hangs" in output  # its stack
    assert "1  has left no file" in output
    left = json.loads((tmp_path / "processes" / "0.json").read_text())
    assert (left["state"], left["phase"], left["step"]) == ("stuck", "data", 7)


def test_compiling_may_take_longer(tmp_path):
    with started(STUCK_IN_DATA, str(tmp_path), "0.5", "compile") as process:
        wait_for(process, "began")
        time.sleep(1.5)
        assert process.poll() is None
        code, _ = ended(process)
    assert code == exit_codes.STUCK


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
    assert another_takes_long(rows, 0, silent_seconds=10.0) is expected


WAITS_FOR_ONE_THAT_COMPILES = """
    import sys, time
    from MaxText.parallelism.watchdog import Watchdog

    with Watchdog(sys.argv[1], 1.0, 1, 2) as other, Watchdog(sys.argv[1], 1.0, 0, 2) as own:
        other.enter("compile", 7)
        own.enter("step", 7)
        print("began", flush=True)
        time.sleep(3)
        other.enter(sys.argv[2], 7)
        time.sleep(2)
        print("went on", flush=True)
"""


@pytest.mark.parametrize(("then", "code"), [("compile", 0), ("step", exit_codes.STUCK)])
def test_a_step_waits_for_a_process_that_compiles(tmp_path, then, code):
    with started(WAITS_FOR_ONE_THAT_COMPILES, str(tmp_path), then) as process:
        found, output = ended(process)
    assert found == code, output
    assert ("went on" in output) == (code == 0)


def test_time_in_which_it_was_stopped_does_not_count():
    program = """
        import time
        from MaxText.parallelism.watchdog import Watchdog

        with Watchdog(None, 2.0) as watchdog:
            print("began", flush=True)
            for step in range(20):
                watchdog.enter("step", step)
                time.sleep(0.1)
        print("done")
    """
    with started(program) as process:
        wait_for(process, "began")
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        code, output = ended(process)
    assert (code, output) == (0, "done\n")


def test_one_of_a_thousand_is_seen_to_compile(tmp_path, monkeypatch):
    folder = tmp_path / "processes"
    folder.mkdir()
    for process in range(1000):
        stands = row(process, 7, "compile" if process == 999 else "step", written=time.time())
        (folder / f"{process}.json").write_text(json.dumps(stands))
    read = type(epath.Path(folder)).read_text

    def slow(path):
        time.sleep(0.05)
        return read(path)

    monkeypatch.setattr(type(epath.Path(folder)), "read_text", slow)
    watchdog = Watchdog(tmp_path, 600.0, 0, 1000)
    rows = watchdog._rows()
    assert len(rows) == 1000
    assert another_takes_long(rows, 0, 60.0)
    assert len(watchdog.describe_all().splitlines()) < 40


def test_what_came_in_time_counts_where_the_storage_hangs(tmp_path, monkeypatch):
    folder = tmp_path / "processes"
    folder.mkdir()
    for process in range(100):
        stands = row(process, 7, "compile" if process == 20 else "step", written=time.time())
        (folder / f"{process}.json").write_text(json.dumps(stands))
    read, hangs = type(epath.Path(folder)).read_text, threading.Event()

    def hanging(path):
        if path.name == "5.json":
            hangs.wait(60)
        return read(path)

    monkeypatch.setattr(type(epath.Path(folder)), "read_text", hanging)
    monkeypatch.setattr("MaxText.parallelism.watchdog._READ_SECONDS", 1.0)
    rows = Watchdog(tmp_path, 600.0, 0, 100)._rows()
    hangs.set()
    assert {found["process"] for found in rows} == {*range(100)} - {5}
    assert another_takes_long(rows, 0, 60.0)


def test_progress_is_what_counts(tmp_path):
    with Watchdog(tmp_path, 0.5, 1, 2) as watchdog:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            watchdog.enter("evaluation", 3)  # the same again, one batch after another
            time.sleep(0.02)
        while not (tmp_path / "processes" / "1.json").exists():
            time.sleep(0.01)
        assert "1  " in watchdog.describe_all()
    left = json.loads((tmp_path / "processes" / "1.json").read_text())
    assert (left["process"], left["phase"], left["state"]) == (1, "evaluation", "ended")


def test_an_exception_is_left_for_the_others(tmp_path):
    with pytest.raises(ValueError, match="no"), Watchdog(tmp_path, 0, 0, 2):
        raise ValueError("no")
    left = json.loads((tmp_path / "processes" / "0.json").read_text())
    assert left["state"] == "failed: ValueError"


def test_a_folder_that_cannot_be_written_holds_up_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    with Watchdog(tmp_path / "file", 5.0, 0, 2) as watchdog:
        watchdog.enter("step", 1)
        assert "has left no file" in watchdog.describe_all()


def test_one_process_writes_nothing(tmp_path):
    with Watchdog(tmp_path, 5.0) as watchdog:
        assert watchdog.describe_all() == ""
    assert not list(tmp_path.iterdir())
