"""Watchdog: exits a process that makes no progress, and reports the state of all processes.

A process whose peer is stuck waits in a collective forever: neither JAX nor the network notices.
"""

import contextlib
import faulthandler
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from MaxText.exit_codes import STALLED
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.paths import is_object_store_path

FOLDER = "processes"

Item = TypeVar("Item")

# Timeout factors of slow phases; the finish also compiles, to sample text.
_TIMEOUT_FACTORS = {"startup": 6.0, "compile": 6.0, "shutdown": 6.0}
# Phases that a process cannot leave before the others reach them.
_COLLECTIVE = ("step", "checkpoint", "evaluation")
# Minimum seconds between writes of a status file, for storage that bills requests.
_MIN_WRITE_SECONDS = 5.0
_WRITES_PER_SECOND = 50.0  # limit over all processes; with 1,000, each writes every 20 s
# Periods after which a status file that lags behind the newest means a dead or frozen process.
_SILENT_WRITES = 3.0
_PARALLEL_READS = 64
_MAX_ROWS = 32  # table rows; each of 1,000 processes may print the table
_FAILED = "failed"
_LOST = "lost a peer"
_STUCK = "stuck"
_ENDED = "ended"


class Watchdog:
    """Tracks the progress of this process and publishes it to the others.

    With several processes, each writes a status file `<folder>/processes/<process>.json` every few
    seconds: {"process", "host", "pid", "state", "phase", "step", "since", "written"}, times in Unix
    seconds. After `timeout` seconds without `enter`, a process prints all of these, names the
    slowest, dumps every thread's stack to stderr and exits with exit_codes.STALLED. The phases
    `startup` (the first), `compile` and `shutdown` may take six times as long, and so may steps of
    processes that wait for a peer in one of them.
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
        """Prepares the watchdog; `start` starts its threads.

        Args:
          folder: The run folder; None publishes nothing.
          timeout: Seconds without progress after which the process exits; 0 for never.
          process_index: Index of this process.
          process_count: Number of processes of the run.
          say: Prints the report; by default to stderr.
          read_seconds: Limit on reading all status files, because storage may be what is stuck.
        """
        self._folder: epath.Path | None = None
        if folder is not None and process_count > 1:
            self._folder = epath.Path(folder) / FOLDER
        self._timeout = timeout
        self._index = process_index
        self._count = process_count
        self._say = say or functools.partial(print, file=sys.__stderr__, flush=True)
        self._read_seconds = read_seconds
        period = max(_MIN_WRITE_SECONDS, process_count / _WRITES_PER_SECOND)
        self._period = min(period, timeout / 20) if timeout > 0 else period
        self._silent_seconds = _SILENT_WRITES * self._period + 1.0
        self._row: dict[str, Any] = {
            "process": process_index,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": "running",
            "phase": "startup",
            "step": None,
            "since": round(time.time(), 3),
        }
        self._progress = time.monotonic()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> "Watchdog":
        """Starts watching until `close`."""
        self.enter("startup")
        targets = [self._watch] if self._timeout > 0 else []
        if self._folder is not None:
            targets.append(self._write_periodically)
        for target in targets:
            thread = threading.Thread(target=target, daemon=True, name="watchdog")
            thread.start()
            self._threads.append(thread)
        return self

    def enter(self, phase: str, step: int | None = None) -> None:
        """Reports progress: this process is in `phase` (startup, compile, step, ...) of `step`."""
        if (phase, step) != (self._row["phase"], self._row["step"]):
            self._row |= {"phase": phase, "step": step, "since": round(time.time(), 3)}
        self._progress = time.monotonic()

    def watch_iterator(
        self, items: Iterable[Item], phase: str, step: int | None = None
    ) -> Iterator[Item]:
        """Yields `items`, and reports progress in `phase` before and after each."""
        self.enter(phase, step)
        for item in items:
            yield item
            self.enter(phase, step)

    def close(self, state: str = _ENDED) -> None:
        """Stops watching and writes `state` to the status file. Idempotent."""
        if self._over.is_set():
            return
        self._row["state"] = state
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MIN_WRITE_SECONDS)  # storage that hangs must not block the exit

    def fail(self, error: BaseException | None) -> None:
        """Publishes that this process failed, and keeps watching until it exits.

        Args:
          error: Its exception; None if another process died.
        """
        self._row["state"] = _LOST if error is None else f"{_FAILED}: {type(error).__name__}"
        self._write_now()

    def describe_all(self, *, wait: bool = False) -> str:
        """Returns a table of all processes; empty for a single process.

        Args:
          wait: First waits until the status file of a process that just died is old enough to show
            it.
        """
        if self._folder is None:
            return ""
        if wait:
            time.sleep(self._silent_seconds + self._period)
        rows = self._rows()
        if not rows:
            return f"cannot read the status files in {self._folder}"
        return describe(rows, self._silent_seconds)

    def _rows(self) -> list[dict[str, Any]]:
        folder = self._folder
        if folder is None:
            return []
        # Starts at its own index, so that processes do not all read the same file at once.
        order = [(self._index + offset) % self._count for offset in range(self._count)]
        # shared by the readers
        unread = iter(order)
        rows = list[dict[str, Any]]()

        def read() -> None:
            for process in unread:
                rows.append(_read(folder, process))

        # Daemon threads: a pool would wait at exit for those that hang in storage.
        num_readers = min(_PARALLEL_READS, self._count)
        readers = [threading.Thread(target=read, daemon=True) for _ in range(num_readers)]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + self._read_seconds
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return list(rows)

    def _watch(self) -> None:
        previous_check = time.monotonic()
        while not self._over.wait(self._period):
            current_time = time.monotonic()
            # Suspension of the whole process (Ctrl-Z, a sleeping machine) does not count.
            suspended = current_time - previous_check - 2 * self._period - 1.0
            if suspended > 0:  # otherwise a concurrent `enter` could be undone
                self._progress += suspended
            previous_check = current_time
            phase = self._row["phase"]
            silent_seconds = current_time - self._progress
            timeout_factor = _TIMEOUT_FACTORS.get(phase, 1.0)
            longest_factor = max(_TIMEOUT_FACTORS.values())
            if phase == "prepare" or silent_seconds <= self._timeout * timeout_factor:
                continue  # preparing text may take hours
            # A collective takes as long as its last participant.
            may_wait_for_peer = (
                phase in _COLLECTIVE and silent_seconds <= self._timeout * longest_factor
            )
            if not (
                may_wait_for_peer
                and peer_in_long_phase(self._rows(), self._index, self._silent_seconds)
            ):
                self._end(silent_seconds)

    def _end(self, silent_seconds: float) -> None:
        self._row["state"] = _STUCK
        # Exits even if printing blocks, e.g. on a full pipe.
        last_resort = threading.Timer(self._read_seconds + _MIN_WRITE_SECONDS, os._exit, (STALLED,))
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):
            self._say(
                f"error: process {self._index} of {self._count} has made no progress for "
                f"{silent_seconds:.0f} s, in {_where(self._row)} "
                f"(heartbeat_timeout={self._timeout:g}).\n"
                f"{self.describe_all()}\n"
                "  What to do: rerun the command to resume from the newest checkpoint. If a step "
                "or a checkpoint may take this long, raise heartbeat_timeout."
            )
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._write_now()
        os._exit(STALLED)

    def _write_now(self) -> None:
        if self._folder is not None:
            writing = threading.Thread(target=self._write, daemon=True)
            writing.start()
            writing.join(_MIN_WRITE_SECONDS)

    def _write_periodically(self) -> None:
        self._write()
        while not self._over.wait(self._period):
            self._write()
        self._write()  # the final state

    def _write(self) -> None:
        assert self._folder is not None
        # Retried in the next period; only the table depends on it.
        with self._writing, contextlib.suppress(Exception):
            row = self._row | {"written": round(time.time(), 3)}
            if not is_object_store_path(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self._folder / f"{self._index}.json", json.dumps(row))


def describe(rows: Sequence[Mapping[str, Any]], silent_seconds: float) -> str:
    """Returns a table of processes that names the slowest.

    The slowest is the first by: dead or frozen (its file is `silent_seconds` older than the
    newest), failed, stuck on its own, lowest step, in a phase that is not collective, longest in
    its phase.

    Args:
      rows: Contents of the status files; {"process": n} for a missing one.
      silent_seconds: Age relative to the newest file from which a process counts as dead.
    """
    newest_write = max((row.get("written", 0.0) for row in rows), default=0.0)

    def order(row: Mapping[str, Any]) -> tuple:
        state = row.get("state", "")
        phase = row.get("phase")
        step = row.get("step")
        is_silent = state != _ENDED and newest_write - row.get("written", 0.0) > silent_seconds
        return (
            not is_silent,
            not state.startswith(_FAILED),
            state != _STUCK or phase in _COLLECTIVE,
            -1 if step is None else step,
            phase in _COLLECTIVE,
            row.get("since", 0.0),
        )

    ordered = sorted(rows, key=order)
    slowest = ordered[0]
    table_rows = ordered[:_MAX_ROWS]
    lines = [f"  {'process':>7}  {'host':<20}  {'step':>8}  {'phase':<11}  {'for':>7}  state"]
    for row in sorted(table_rows, key=lambda row: row["process"]):
        if "written" not in row:
            lines.append(f"  {row['process']:>7}  no status file")
            continue
        state = row["state"]
        silent = newest_write - row["written"]
        if state == "running" and silent > silent_seconds:
            state = f"silent for {silent:.0f} s: dead or frozen"
        step = "-" if row["step"] is None else row["step"]
        mark = "  <- slowest" if row is slowest else ""
        lines.append(
            f"  {row['process']:>7}  {row['host']:<20}  {step:>8}  {row['phase']:<11}  "
            f"{newest_write - row['since']:>5.0f} s  {state}{mark}"
        )
    if len(rows) > len(table_rows):
        lines.append(f"  and {len(rows) - len(table_rows)} more processes, further ahead")
    lines.append(f"  slowest: process {slowest['process']}, last seen in {_where(slowest)}")
    return "\n".join(lines)


def peer_in_long_phase(
    rows: Sequence[Mapping[str, Any]], process: int, silent_seconds: float
) -> bool:
    """Returns whether a live process other than `process` is in a phase with a longer timeout.

    Args:
      rows: Contents of the status files.
      process: Index of this process.
      silent_seconds: Age relative to the newest file from which a process counts as dead.
    """
    newest_write = max((row.get("written", 0.0) for row in rows), default=0.0)
    return any(
        row["process"] != process
        and row.get("state") == "running"
        and row.get("phase") in _TIMEOUT_FACTORS
        and newest_write - row["written"] <= silent_seconds
        for row in rows
    )


def _where(row: Mapping[str, Any]) -> str:
    phase = row.get("phase", "an unknown phase")
    step = row.get("step")
    if step is None:
        return phase
    return f"step {step}" if phase == "step" else f"{phase} of step {step}"


def _read(folder: epath.Path, process: int) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return json.loads((folder / f"{process}.json").read_text(encoding="utf-8"))
    return {"process": process}
