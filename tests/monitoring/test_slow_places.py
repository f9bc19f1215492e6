"""Trackers and buckets that are slow, hang or fail: the run goes on, and its rows stay in order."""

import atexit
import contextlib
import errno
import gc
import io
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from etils import epath

from MaxText.monitoring import event_stream, json_lines
from MaxText.monitoring.event_stream import EventLog
from MaxText.monitoring.events import Sink
from MaxText.monitoring.json_lines import EventFile, JsonlFile, MetricsFile, read_rows
from MaxText.monitoring.sinks import tensorboard_file
from MaxText.monitoring.sinks.background import BackgroundSink
from MaxText.monitoring.sinks.tensorboard import TensorBoardSink
from MaxText.runtime import processes
from tests.programs import ended, started


@pytest.fixture(autouse=True)
def left_behind(monkeypatch):
    """Calls of what lets the process end without its threads."""
    calls = []
    monkeypatch.setattr(processes, "mark_thread_hung", lambda: calls.append(None))
    return calls


class Tracker(Sink):
    """Takes each event when it is let."""

    def __init__(self):
        self.free, self.begun = threading.Event(), threading.Event()
        self.calls = []

    def write(self, event):
        self.begun.set()
        self.free.wait()
        self.calls.append(event.step)

    def flush(self):
        self.calls.append("flush")

    def close(self, until=None):
        self.calls.append("close")


def emit_steps(stream, steps):
    for step in steps:
        stream.emit("step", step=step, seconds=0.5, **{"learning/loss": 2.0})


def test_steps_are_done_while_a_tracker_sleeps_and_reach_it_in_order():
    tracker = Tracker()
    stream = EventLog([BackgroundSink(tracker, "tracker")], flush_every=100)
    emit_steps(stream, range(1000))  # would not come back from the first one
    stream.emit("checkpoint", step=999)
    stream.flush()
    tracker.begun.wait()
    assert tracker.calls == []
    tracker.free.set()
    stream.close()
    stream.close()
    assert [call for call in tracker.calls if call != "flush"] == [*range(1000), 999, "close"]
    # One that was asked for after each 100 steps, or several in one.
    assert tracker.calls.count("flush") > 5
    assert tracker.calls[-2:] == ["flush", "close"]


def test_what_may_wait_is_bounded_and_only_numbers_are_dropped(capsys):
    tracker = Tracker()
    stream = EventLog([BackgroundSink(tracker, "tracker", max_waiting=10)])
    emit_steps(stream, [0])
    tracker.begun.wait()
    emit_steps(stream, range(1, 50))
    stream.emit("rollback", step=20)
    tracker.free.set()
    stream.close()
    assert [call for call in tracker.calls if call != "flush"] == [*range(11), 20, "close"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: tracker cannot keep up")


def test_a_tracker_that_fails_is_reported_once(capsys, monkeypatch):
    tracker, failure = Tracker(), mock.Mock(side_effect=RuntimeError("503\nand more"))
    monkeypatch.setattr(tracker, "write", failure)
    stream = EventLog([BackgroundSink(tracker, "tracker", remedy="wandb sync")])
    emit_steps(stream, range(20))
    stream.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: tracker ")
    assert ": 503." in line
    assert line.endswith("; wandb sync.")


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_tensorboard_touches_no_file_after_an_error(operation, tmp_path, capsys, monkeypatch):
    unraised, registered, operations = [], [], []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(atexit, "register", registered.append)
    failure = OSError(errno.EIO, "Input/output error")
    number_that_fails = {"write": 4, "fsync": 1}[operation]

    class File(io.FileIO):
        """Fails from the first write or sync of the metrics on."""

        def write(self, content):
            operations.append("write")
            if operations.count("write") >= number_that_fails and operation == "write":
                raise failure
            return super().write(content)

    def fsync(descriptor):
        operations.append("fsync")
        if operation == "fsync":
            raise failure

    monkeypatch.setattr(tensorboard_file, "open", lambda path, *_, **__: File(path, "w"), False)
    monkeypatch.setattr(tensorboard_file.os, "fsync", fsync)
    before = set(threading.enumerate())
    sink = BackgroundSink(TensorBoardSink(tmp_path, {"learning_rate": 0.001}, 0), "TensorBoard")
    stream = EventLog([sink], flush_every=1)
    emit_steps(stream, range(20))
    stream.emit("stop", reason="completed")
    stream.close()
    at_the_end = len(operations)
    del sink, stream
    gc.collect()
    assert len(operations) == at_the_end  # nothing was written by the garbage collector
    assert set(threading.enumerate()) <= before
    assert (unraised, registered) == ([], [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: TensorBoard disabled after an error: [Errno 5] Input/output")


@pytest.mark.parametrize(("reason", "seconds"), [("preempted", 10), ("completed", 60)])
def test_the_end_waits_for_so_long_only(monkeypatch, left_behind, capsys, reason, seconds):
    trackers = [Tracker(), Tracker()]
    stream = EventLog([BackgroundSink(tracker, "tracker") for tracker in trackers])
    emit_steps(stream, range(3))
    stream.emit("stop", step=2, reason=reason)
    # The end began so many seconds ago.
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() - seconds + 0.05)
    monkeypatch.setattr(event_stream, "time", clock)
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.count("busy") == len(left_behind) == 2
    for tracker in trackers:
        tracker.free.set()


def test_a_thread_that_hangs_does_not_keep_the_process():
    program = """
        import atexit, threading
        from MaxText.monitoring.events import Event
        from MaxText.monitoring.sinks.background import BackgroundSink
        from MaxText.runtime import processes

        class Hangs:
            def write(self, event):
                threading.Event().wait()
        atexit.register(threading.Event().wait)  # as libraries do

        def main():
            sink = BackgroundSink(Hangs(), "tracker")
            sink.write(Event("step", 0.0))
            sink.request_close()
            sink.close(0.0)
            return 75
        processes.run(main)
    """
    with started(program) as process:
        code, output = ended(process)
    assert (code, output.count("warning")) == (75, 1), output


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Files are objects: written whole, as slowly or badly as the test wants."""
    bucket = SimpleNamespace(free=threading.Event(), begun=threading.Event(), failures=0, writes=0)
    bucket.free.set()
    path_type = type(epath.Path(tmp_path))
    write_bytes = path_type.write_bytes

    def write(path, content):
        bucket.begun.set()
        bucket.free.wait()
        bucket.writes += 1
        if bucket.failures:
            bucket.failures -= 1
            raise RuntimeError("503 from the bucket")
        return write_bytes(path, content)

    monkeypatch.setattr(path_type, "write_bytes", write)
    monkeypatch.setattr(json_lines, "is_object_store_path", lambda path: True)
    return bucket


def opened(folder, first_step=0):
    events = EventFile(epath.Path(folder), first_step)
    return EventLog([events, MetricsFile(epath.Path(folder), "", "tiny", first_step)])


def steps_in(folder, name):
    return [row["step"] for row in read_rows(folder / name)]


def test_steps_are_done_while_a_bucket_sleeps(tmp_path, bucket):
    stream = opened(tmp_path)
    bucket.free.clear()
    emit_steps(stream, range(1000))
    bucket.begun.wait()
    assert steps_in(tmp_path, "events.jsonl") == []
    bucket.free.set()
    stream.flush()  # as before a checkpoint, next to which no row may be missing
    assert steps_in(tmp_path, "events.jsonl") == list(range(1000))
    assert steps_in(tmp_path, "metrics.jsonl") == list(range(1000))
    # Texts that were out of date when their turn came are not written.
    assert bucket.writes < 10
    stream.emit("rollback", step=500, restored_step=500)
    emit_steps(stream, range(500, 600))
    stream.close()
    assert steps_in(tmp_path, "metrics.jsonl") == list(range(600))
    resumed = opened(tmp_path, first_step=580)
    emit_steps(resumed, [580])
    resumed.close()
    assert steps_in(tmp_path, "metrics.jsonl") == list(range(581))


def test_a_bucket_that_fails_is_reported_once_and_gets_all_later(tmp_path, bucket, capsys):
    stream = opened(tmp_path)
    bucket.failures = 4
    for step in range(3):
        emit_steps(stream, [step])
        stream.flush()
    stream.close()
    for name in ("events.jsonl", "metrics.jsonl"):
        assert steps_in(tmp_path, name) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert ["503 from the bucket" in line for line in lines] == [True, True]  # one for each file


def test_a_local_record_that_cannot_be_synced_is_reported_with_its_name(tmp_path, monkeypatch):
    """The run sees it after the step, saves its state and stops."""
    stream = EventLog([EventFile(epath.Path(tmp_path), 0)])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", mock.Mock(side_effect=OSError(28, "no room")))
        stream.emit("checkpoint", step=0)
    stream.close()
    assert stream.failure == f"{tmp_path}/events.jsonl: no room (errno 28)"


class FullDisk:
    """A file of which only `room` more bytes can be written; None: as many as wanted."""

    def __init__(self, file, room):
        self._file = file
        self.room = room

    def write(self, content):
        if self.room == 0:
            raise OSError(28, "no room")
        written = self._file.write(content[: self.room])
        self.room = self.room if self.room is None else self.room - written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 5, 40])
def test_rows_wait_in_memory_until_the_disk_has_room(tmp_path, room, monkeypatch):
    disks = []

    def opened(path, mode, **keywords):
        file = open(path, mode, **keywords)  # noqa: SIM115
        if mode == "rb":
            return file
        disks.append(FullDisk(file, None))
        return disks[-1]

    with monkeypatch.context() as patch:
        patch.setattr(json_lines, "open", opened, raising=False)
        rows = JsonlFile(tmp_path / "rows.jsonl", None)
    rows.append({"step": 0})
    (disk,) = disks
    disk.room = room
    for step in (1, 2, 3, 4, 5):
        with contextlib.suppress(OSError):
            rows.append({"step": step})
    with pytest.raises(OSError, match=r"rows\.jsonl"):
        rows.flush()
    with contextlib.suppress(OSError):
        rows.amend({"more": "x" * 100})
    disk.room = None
    rows.close()
    assert steps_in(tmp_path, "rows.jsonl") == [0, 1, 2, 3, 4, 5]
    assert read_rows(tmp_path / "rows.jsonl")[-1] == {"step": 5, "more": "x" * 100}


@pytest.mark.parametrize("room", [0, 20])
def test_a_row_that_could_not_be_amended_is_appended(room, tmp_path, monkeypatch):
    rows = JsonlFile(tmp_path / "rows.jsonl", None)
    for step in (0, 1):
        rows.append({"step": step})

    def failing_open(*arguments, **keywords):
        return contextlib.closing(FullDisk(open(*arguments, **keywords), room))

    monkeypatch.setattr(json_lines, "open", failing_open, raising=False)
    with contextlib.suppress(OSError):
        rows.amend({"more": "x" * 100})
    rows.close()
    assert [*read_rows(tmp_path / "rows.jsonl")][1] == {"step": 1, "more": "x" * 100}


def test_a_full_segment_asks_a_bucket_that_fails_for_nothing(tmp_path, bucket, monkeypatch):
    rows = JsonlFile(tmp_path / "rows.jsonl", None, segment_bytes=1)
    with monkeypatch.context() as broken:
        broken.setattr(type(rows.path), "exists", mock.Mock(side_effect=RuntimeError("503")))
        for step in range(3):
            rows.append({"step": step})
            rows.flush()
            rows.wait_durable(time.monotonic() + 60)
    rows.close()
    assert steps_in(tmp_path, "rows.jsonl") == [0, 1, 2]
