"""Watchdog: exits a process that makes no progress or has lost a peer, and reports all processes.

A process whose peer is stuck waits in a collective forever: neither JAX nor the network notices.
"""

import contextlib
import faulthandler
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from MaxText.exit_codes import STALLED
from MaxText.runtime import peers

Item = TypeVar("Item")

# Longer timeout of peers.LONG_PHASES.
_TIMEOUT_FACTOR = 6.0
# Seconds between updates of a process's status.
_MIN_PERIOD_SECONDS = 2.0
_UPDATES_PER_SECOND = 500.0  # limit over all processes; of 2,000, each updates every 4 s
# Periods after which a status that lags behind the newest means a dead or frozen process.
_SILENT_PERIODS = 3.0
_JOIN_SECONDS = 5.0  # for threads that may hang in a request


class Watchdog:
    """Tracks the progress of this process, and with several processes that of its peers.

    With several processes, each publishes its status every few seconds to the coordinator of
    jax.distributed (`peers.StatusBoard`). A process exits with exit_codes.STALLED, names the
    process to blame, and dumps every thread's stack to stderr

    - after `timeout` seconds without `enter`. The phases `startup` (the first), `compile` and
      `shutdown` may take six times as long, and so may steps of processes that wait for a peer in
      one of them;
    - once process 0 says that a peer failed or is lost, or, if that is process 0 itself, once the
      coordinator has not answered for peers.LOST_SECONDS.
    """

    def __init__(
        self,
        timeout: float,
        process_index: int = 0,
        process_count: int = 1,
        *,
        store: peers.KeyValueStore | None = None,
        say: Callable[[str], Any] | None = None,
        read_seconds: float = 5.0,
    ):
        """Prepares the watchdog; `start` starts its threads.

        Args:
          timeout: Seconds without progress after which the process exits; 0 for never.
          process_index: Index of this process.
          process_count: Number of processes of the run.
          store: That of the coordinator; None publishes nothing.
          say: Prints the report; by default to stderr.
          read_seconds: Limit on reading the status of all, as the coordinator may be what is stuck.
        """
        self._board: peers.StatusBoard | None = None
        if store is not None and process_count > 1:
            self._board = peers.StatusBoard(store, process_count)
        self._timeout = timeout
        self._index = process_index
        self._count = process_count
        self._say = say or functools.partial(print, file=sys.__stderr__, flush=True)
        self._read_seconds = read_seconds
        period = max(_MIN_PERIOD_SECONDS, process_count / _UPDATES_PER_SECOND)
        self._period = min(period, timeout / 20) if timeout > 0 else period
        self._silent_seconds = _SILENT_PERIODS * self._period + 1.0
        self._lost_seconds = min(peers.LOST_SECONDS, timeout)
        self._row: peers.Row = {
            "process": process_index,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "state": peers.RUNNING,
            "phase": "startup",
            "step": None,
            "since": round(time.time(), 3),
        }
        self._progress = time.monotonic()
        self._last_answer = self._progress  # of the coordinator
        self._coordinator_row: peers.Row = {"process": 0}
        self._over = threading.Event()
        self._has_left = threading.Event()
        self._ending = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> "Watchdog":
        """Starts watching until `close`."""
        self.enter("startup")
        targets = [self._watch] if self._timeout > 0 else []
        if self._board is not None:
            targets.append(self._exchange_status)
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

    def leave(self) -> None:
        """Publishes that this process needs no peer any more, before it disconnects. Idempotent."""
        if self._has_left.is_set():
            return
        if self._row["state"] == peers.RUNNING:
            self._row["state"] = peers.ENDED
        self._has_left.set()
        self._publish_now()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        self.leave()
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)  # a coordinator that hangs must not block the exit

    def fail(self, error: BaseException | None) -> None:
        """Publishes that this process failed, and keeps watching until it exits.

        Args:
          error: Its exception; None if another process died.
        """
        state = peers.LOST_A_PEER if error is None else f"{peers.FAILED}: {type(error).__name__}"
        self._row["state"] = state
        if self._index == 0 and error is not None:
            self._in_time(lambda board: board.declare_lost(self._row_now(), state))
        self._publish_now()

    def let_peers_report(self) -> None:
        """Keeps the coordinator until the others have read that this process exits."""
        if self._board is not None:
            peers.keep_coordinator(self._index, 2 * self._period)

    def describe_all(self, *, wait: bool = False) -> str:
        """Returns a table of all processes; empty for a single process.

        Args:
          wait: First waits until the status of a process that just died is old enough to show it,
            or one says that it failed.
        """
        board = self._board
        if board is None:
            return ""
        answers = self._coordinator_answers()
        rows = board.try_rows(self._read_seconds) if answers else []
        deadline = time.monotonic() + self._silent_seconds + self._period
        while wait and answers and not peers.shows_culprit(rows, self._silent_seconds):
            if time.monotonic() > deadline:
                break
            time.sleep(min(self._period, 0.5))
            rows = board.try_rows(self._read_seconds) or rows
        if not rows:
            host = self._coordinator_row.get("host", "an unknown host")
            return (
                f"  the coordinator, process 0 on {host}, does not answer; last seen in "
                f"{peers.where(self._coordinator_row)}"
            )
        return peers.describe(rows, self._silent_seconds)

    def _watch(self) -> None:
        previous_check = time.monotonic()
        while not self._over.wait(self._period):
            current_time = time.monotonic()
            # Suspension of the whole process (Ctrl-Z, a sleeping machine) does not count.
            suspended = self._suspended_seconds(current_time - previous_check)
            if suspended > 0:  # otherwise a concurrent `enter` could be undone
                self._progress += suspended
                self._last_answer += suspended
            previous_check = current_time
            self._check_coordinator(current_time)
            phase = self._row["phase"]
            silent_seconds = current_time - self._progress
            timeout_factor = _TIMEOUT_FACTOR if phase in peers.LONG_PHASES else 1.0
            if phase == "prepare" or silent_seconds <= self._timeout * timeout_factor:
                continue  # preparing text may take hours
            # A collective takes as long as its last participant.
            may_wait_for_peer = (
                phase in peers.COLLECTIVE_PHASES
                and silent_seconds <= self._timeout * _TIMEOUT_FACTOR
            )
            if not (may_wait_for_peer and self._peer_takes_long()):
                self._end_stuck(silent_seconds)

    def _suspended_seconds(self, seconds: float) -> float:
        """Returns how much longer than a period a wait for it took, if that says anything."""
        return max(0.0, seconds - 2 * self._period - 1.0)

    def _peer_takes_long(self) -> bool:
        if self._board is None:
            return False
        rows = self._board.try_rows(self._read_seconds)
        return peers.peer_in_long_phase(rows, self._index)

    def _coordinator_answers(self) -> bool:
        """Returns whether requests make sense: jax may abort this process while it waits."""
        return time.monotonic() - self._last_answer < self._silent_seconds + self._period

    def _check_coordinator(self, current_time: float) -> None:
        """Ends this process if process 0 has not answered for too long."""
        if self._board is None or self._index == 0 or self._has_left.is_set():
            return
        silent_seconds = current_time - self._last_answer
        if silent_seconds > self._lost_seconds:
            reason = f"its coordinator has not answered for {silent_seconds:.0f} s"
            self._end_without_peer(self._coordinator_row | {"reason": reason})

    def _exchange_status(self) -> None:
        """Publishes this process's status, and reads about the others, in every period."""
        board = self._board
        assert board is not None
        previous = time.monotonic()
        tracker = peers.LivenessTracker(previous)
        while not self._has_left.is_set():
            # An error is retried in the next period; `_watch` counts the time without an answer.
            with contextlib.suppress(RuntimeError):
                board.publish(self._row_now())
                if self._index == 0:
                    self._judge_peers(board, tracker)
                else:
                    self._coordinator_row = board.row(0)
                self._last_answer = time.monotonic()
                lost_row = board.lost()
                if lost_row is not None and lost_row["process"] != self._index:
                    self._end_without_peer(lost_row)
            self._has_left.wait(self._period)
            current_time = time.monotonic()
            tracker.shift(self._suspended_seconds(current_time - previous))
            previous = current_time

    def _judge_peers(self, board: peers.StatusBoard, tracker: peers.LivenessTracker) -> None:
        if self._timeout == 0:
            return
        rows = [row for row in board.rows() if row["process"] != self._index]
        current_time = time.monotonic()
        tracker.observe(rows, current_time)
        lost = tracker.lost(rows, current_time, self._lost_seconds)
        if lost is not None:
            board.declare_lost(*lost)

    def _end_stuck(self, silent_seconds: float) -> None:
        self._row["state"] = peers.STUCK
        self._end(
            f"error: process {self._index} of {self._count} has made no progress for "
            f"{silent_seconds:.0f} s, in {peers.where(self._row)} "
            f"(heartbeat_timeout={self._timeout:g}).",
            "If a step or a checkpoint may take this long, raise heartbeat_timeout.",
        )

    def _end_without_peer(self, row: peers.Row) -> None:
        if self._row["state"] != peers.RUNNING or self._has_left.is_set():
            return  # it ends by itself, and says why
        self._row["state"] = peers.LOST_A_PEER
        host = "an unknown host"
        since = ""
        if "host" in row:  # it has published a status
            host = f"{row['host']}, pid {row['pid']}"
            since = f", since {time.strftime('%H:%M:%S', time.gmtime(row['since']))} UTC"
        self._end(
            f"error: lost process {row['process']} of {self._count} on {host} ({row['reason']}), "
            f"last seen in {peers.where(row)}{since}.",
            "See the end of its log for the reason.",
        )

    def _end(self, message: str, advice: str) -> None:
        """Prints the message, the state of all processes and the stacks, and exits."""
        # Both threads may find a reason.
        if not self._ending.acquire(blocking=False):
            return
        # Exits even if printing blocks, e.g. on a full pipe.
        last_resort = threading.Timer(2 * self._read_seconds + _JOIN_SECONDS, os._exit, (STALLED,))
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):
            self._say(
                f"{message}\n{self.describe_all()}\n"
                "  What to do: rerun the command to resume from the newest checkpoint. "
                f"{advice}"
            )
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._publish_now()
        self.let_peers_report()
        os._exit(STALLED)

    def _row_now(self) -> peers.Row:
        return self._row | {"written": round(time.time(), 3)}

    def _publish_now(self) -> None:
        self._in_time(lambda board: board.publish(self._row_now()))

    def _in_time(self, request: Callable[[peers.StatusBoard], None]) -> None:
        """Makes a request to the coordinator, and does not wait long for it."""
        board = self._board
        if board is None or not self._coordinator_answers():
            return

        def make_request() -> None:
            with contextlib.suppress(RuntimeError):
                request(board)

        thread = threading.Thread(target=make_request, daemon=True)
        thread.start()
        thread.join(_JOIN_SECONDS)
