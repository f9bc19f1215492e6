"""Watchdog: ends a process without progress, and reports where all processes stand.

A process whose peer is stuck waits in a collective forever: neither jax nor the network notices.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from MaxText.exit_codes import STUCK

FOLDER = "processes"

Item = TypeVar("Item")

# Phases that may take this many times as long. The end of a run compiles, too: what samples text.
_LONG = {"start_up": 6.0, "compile": 6.0, "finish": 6.0}
# Phases that a process cannot leave before the others get there.
_COLLECTIVE = ("step", "checkpoint", "evaluation")
# Between two writes of a status file: enough for storage that counts requests.
_MOST_SECONDS = 5.0
# Of all processes together: that grows the period to 20 s with 1,000 of them.
_WRITES_PER_SECOND = 50.0
# A file that is so many writes older than the newest one is of a process that is gone or frozen.
_SILENT_WRITES = 3.0
_PARALLEL_READS = 64
# Lines of the table: each of 1,000 processes may print one.
_MOST_LINES = 32
_FAILED = "failed"
_LOST = "waited for one that is gone"
_STUCK = "stuck"
_ENDED = "ended"


class Watchdog:
    """Watches the progress of this process, and publishes it to the others.

    Each process of several writes `<folder>/processes/<process>.json` every few seconds, on a
    thread: {"process", "host", "pid", "state", "phase", "step", "since", "written"}, times in Unix
    seconds. After `timeout` seconds without progress a process prints these of all, names the
    slowest, dumps the stack of every thread to stderr and ends with exit_codes.STUCK.

        with Watchdog(run_folder, timeout, jax.process_index(), jax.process_count()) as watchdog:
            watchdog.enter("compile")
            ...
            for step in ...:
                watchdog.enter("data", step)
                batch = ...
                watchdog.enter("step", step)
                ...
                watchdog.enter("checkpoint", step)  # before save
                for batch in watchdog.each(batches, "evaluation", step):
                    ...
            watchdog.enter("finish")

    or between `start` and `close`. Every call of `enter` is progress. The first phase is
    `start_up`; it, `compile` and `finish` may take six times as long, and meanwhile so may a step
    of the others, which wait for it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        timeout: float,
        process_index: int = 0,
        process_count: int = 1,
        *,
        say: Callable[[str], Any] | None = None,
        read_seconds: float = 20.0,
    ):
        """Starts nothing yet.

        Args:
          folder: Of the run, shared by its processes; may be gs://. None writes no files.
          timeout: heartbeat_timeout, seconds; 0 never ends the process.
          say: Takes lines; by default they go to stderr at once.
          read_seconds: Limit for reading the files of all processes: storage may be what is stuck.
        """
        several = folder is not None and process_count > 1
        self._folder = epath.Path(folder) / FOLDER if several and folder is not None else None
        self._timeout = timeout
        self._index, self._count = process_index, process_count
        self._say = say or _to_stderr
        self._read_seconds = read_seconds
        period = max(_MOST_SECONDS, process_count / _WRITES_PER_SECOND)
        self._period = min(period, timeout / 20) if timeout > 0 else period
        self._silent_seconds = _SILENT_WRITES * self._period + 1.0
        self._phase: tuple[str, int | None, float] = ("start_up", None, time.time())
        self._state = "running"
        self._progress = time.monotonic()
        self._over = threading.Event()
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> "Watchdog":
        """Starts watching until `close`; a `with` block does both."""
        self.enter("start_up")
        targets = [self._watch] if self._timeout > 0 else []
        if self._folder is not None:
            targets.append(self._write_again_and_again)
        for target in targets:
            thread = threading.Thread(target=target, daemon=True, name="watchdog")
            thread.start()
            self._threads.append(thread)
        return self

    __enter__ = start

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(_ENDED if error is None else _failed(error))

    def enter(self, phase: str, step: int | None = None) -> None:
        """Reports progress in a phase, cheaply.

        Args:
          phase: One of start_up, compile, data, step, checkpoint, evaluation, finish.
        """
        before, step_before, since = self._phase
        if (phase, step) != (before, step_before):
            since = time.time()
        self._phase = (phase, step, since)
        self._progress = time.monotonic()

    def each(self, items: Iterable[Item], phase: str, step: int | None = None) -> Iterator[Item]:
        """Yields the items, each of which is progress of a phase."""
        self.enter(phase, step)
        for item in items:
            yield item
            self.enter(phase, step)

    def close(self, state: str = _ENDED) -> None:
        """Stops watching and leaves `state` in the status file. Safe to call twice."""
        if self._over.is_set():
            return
        self._state = state
        self._over.set()
        self._changed.set()  # wakes the writer
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MOST_SECONDS)  # storage that hangs shall not keep us

    def fail(self, error: BaseException | None) -> None:
        """Leaves an error in the status file, and keeps watching: see processes.fail.

        `error` is None if another process is gone.
        """
        self._state = _LOST if error is None else _failed(error)
        self._write_now()

    def describe_all(self, *, wait: bool = False) -> str:
        """Returns a table of where each process stands, naming the slowest one.

        With `wait`, first waits until the file of a process that has just died is seen to be old.
        """
        if self._folder is None:
            return ""
        if wait:
            time.sleep(self._silent_seconds + self._period)
        rows = self._rows()
        if not rows:
            return f"the files of the processes in {self._folder} cannot be read"
        return describe(rows, self._silent_seconds)

    def _rows(self) -> list[dict[str, Any]]:
        """Returns the status files that can be read in time."""
        folder = self._folder
        if folder is None:
            return []
        # Each process begins with its own, so that not all read the same ones at once.
        order = [(self._index + other) % self._count for other in range(self._count)]
        unread, rows = iter(order), list[dict[str, Any]]()
        taking = threading.Lock()

        def read() -> None:
            while (process := _next(unread, taking)) is not None:
                rows.append(_read(folder, process))

        # Daemons: a pool would wait for those that hang in the storage when the program ends.
        readers = [
            threading.Thread(target=read, daemon=True)
            for _ in range(min(_PARALLEL_READS, self._count))
        ]
        for reader in readers:
            reader.start()
        until = time.monotonic() + self._read_seconds
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        return list(rows)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._period):
            now = time.monotonic()
            # Time in which nobody ran, this thread included (Ctrl-Z, a machine that slept), is not
            # the fault of the loop.
            suspended = now - before - 2 * self._period - 1.0
            if suspended > 0:  # else a concurrent `enter` of the main thread could be undone
                self._progress += suspended
            before = now
            phase, step, _ = self._phase
            silent = now - self._progress
            own, longest = _LONG.get(phase, 1.0), max(_LONG.values())
            if silent <= self._timeout * own:
                continue
            # A collective takes as long as the last one to get there.
            waits = phase in _COLLECTIVE and silent <= self._timeout * longest
            if not (waits and another_takes_long(self._rows(), self._index, self._silent_seconds)):
                self._end(phase, step, silent)

    def _end(self, phase: str, step: int | None, silent: float) -> None:
        self._state = _STUCK
        # Whatever happens to the lines below, such as a pipe that nobody reads.
        last_resort = threading.Timer(self._read_seconds + _MOST_SECONDS, os._exit, (STUCK,))
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):
            self._say(
                f"error: process {self._index} of {self._count} has made no progress for "
                f"{silent:.0f} s, in {_where(phase, step)} (heartbeat_timeout={self._timeout:g}).\n"
                f"{self.describe_all()}\n"
                "  What to do: the same command goes on from the newest checkpoint. Where an "
                "update or a checkpoint may take so long, raise heartbeat_timeout."
            )
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._write_now()
        os._exit(STUCK)

    def _write_now(self) -> None:
        """Writes the status file, unless the storage takes too long."""
        if self._folder is not None:
            writing = threading.Thread(target=self._write, daemon=True)
            writing.start()
            writing.join(_MOST_SECONDS)

    def _write_again_and_again(self) -> None:
        while True:
            self._changed.clear()
            is_last = self._over.is_set()  # asked before: the state it is closed with is written
            self._write()
            if is_last:
                return
            self._changed.wait(self._period)

    def _write(self) -> None:
        # A write that fails is tried again in a moment, and nothing depends on it but a table.
        with self._writing, contextlib.suppress(Exception):
            self._write_row()

    def _write_row(self) -> None:
        phase, step, since = self._phase
        row = {
            "process": self._index,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": self._state,
            "phase": phase,
            "step": step,
            "since": round(since, 3),
            "written": round(time.time(), 3),
        }
        assert self._folder is not None
        file = self._folder / f"{self._index}.json"
        if "://" in str(file):
            file.write_text(json.dumps(row))  # whole or not at all
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        writing = self._folder / f".{self._index}.json.writing"
        writing.write_text(json.dumps(row))
        writing.replace(file)


def describe(rows: Sequence[Mapping[str, Any]], silent_seconds: float) -> str:
    """Describes where each process stands, and which one the others wait for.

    That is the first of these: one that is gone or frozen (its file is `silent_seconds` older than
    the newest), one that failed, one that found itself stuck, the lowest step, among equals one
    whose phase needs no other process, and then the one that has been in it longest.

    Args:
      rows: Of the status files; {"process": n} alone for one that has none.
    """
    now = max((row.get("written", 0.0) for row in rows), default=0.0)

    def order(row: Mapping[str, Any]) -> tuple:
        state, phase, step = row.get("state", ""), row.get("phase"), row.get("step")
        is_silent = state != _ENDED and now - row.get("written", 0.0) > silent_seconds
        return (
            not is_silent,
            not state.startswith(_FAILED),
            state != _STUCK or phase in _COLLECTIVE,
            -1 if step is None else step,
            phase in _COLLECTIVE,
            row.get("since", 0.0),
        )

    slowest = min(rows, key=order)
    lines = [f"  {'process':>7}  {'host':<20}  {'step':>8}  {'phase':<11}  {'for':>7}  state"]
    shown = sorted(rows, key=order)[:_MOST_LINES]
    for row in sorted(shown, key=lambda row: row["process"]):
        if "written" not in row:
            lines.append(f"  {row['process']:>7}  has left no file")
            continue
        state = row["state"]
        silent = now - row["written"]
        if state == "running" and silent > silent_seconds:
            state = f"silent for {silent:.0f} s: gone or frozen"
        step = "-" if row["step"] is None else row["step"]
        lines.append(
            f"  {row['process']:>7}  {row['host']:<20}  {step:>8}  {row['phase']:<11}  "
            f"{now - row['since']:>5.0f} s  {state}{'  <- slowest' if row is slowest else ''}"
        )
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more processes, ahead of these")
    where = _where(slowest.get("phase", "nothing that is known"), slowest.get("step"))
    lines.append(f"  slowest: process {slowest['process']}, last seen in {where}")
    return "\n".join(lines)


def another_takes_long(
    rows: Sequence[Mapping[str, Any]], process: int, silent_seconds: float
) -> bool:
    """Returns whether another process is alive and in a phase that may take longer than a step."""
    now = max((row.get("written", 0.0) for row in rows), default=0.0)
    return any(
        row["process"] != process
        and row.get("state") == "running"
        and row.get("phase") in _LONG
        and now - row["written"] <= silent_seconds
        for row in rows
    )


def _where(phase: str, step: int | None) -> str:
    if step is None:
        return phase
    return f"step {step}" if phase == "step" else f"{phase} of step {step}"


def _next(items: Iterator[Item], taking: threading.Lock) -> Item | None:
    with taking:
        return next(items, None)


def _read(folder: epath.Path, process: int) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return json.loads((folder / f"{process}.json").read_text())
    return {"process": process}


def _failed(error: BaseException) -> str:
    return f"{_FAILED}: {type(error).__name__}"


def _to_stderr(text: str) -> None:
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()
