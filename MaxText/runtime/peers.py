"""Status of every process of a run, in the key-value store of jax.distributed's coordinator.

Process 0 hosts the coordinator. It also judges the others: it sees their status change, by its own
clock, and publishes which one is lost. The others read that verdict, and judge process 0 by whether
the coordinator answers them.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

# A row: {"process", "host", "pid", "state", "phase", "step", "since", "written"}, times in Unix
# seconds; {"process": n} for one without a status.
Row = dict[str, Any]

# Without a sign of life for so long a process counts as lost: jax.distributed's default for
# heartbeats, of which jax itself only tells by aborting every process.
LOST_SECONDS = 100.0
# A process that has not yet published anything may still be initializing its devices.
_START_FACTOR = 6.0
# Phases that take longer than a step; the finish also compiles, to sample text.
LONG_PHASES = ("startup", "compile", "shutdown")
# Phases that a process cannot leave before the others reach them.
COLLECTIVE_PHASES = ("step", "checkpoint", "evaluation")

RUNNING = "running"
FAILED = "failed"
LOST_A_PEER = "lost a peer"
STUCK = "stuck"
ENDED = "ended"

# After a failure that all processes read: until all know it, and until they have exited.
_TOLD_SECONDS = 10.0
EXIT_SECONDS = 2.0

_STATUS = "maxtext/processes/"
_VERDICT = "maxtext/lost_process"
_MAX_ROWS = 32  # table rows; each of 1,000 processes may print the table


class KeyValueStore(Protocol):
    """The methods of jax.distributed's client that are used here; all raise if it is gone."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a value."""

    def key_value_try_get(self, key: str) -> str:
        """Returns a value; raises an error with NOT_FOUND if there is none."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys and values under a prefix."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for a value and returns it; raises an error with DEADLINE_EXCEEDED."""
        ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Waits until all processes have come to a barrier."""


def coordinator_client() -> KeyValueStore | None:
    """Returns the client of jax.distributed's coordinator; None for a single process."""
    # jax has no public access to the store, which Orbax uses in the same way.
    from jax._src.distributed import global_state

    return global_state.client


def connected_client() -> KeyValueStore:
    """Returns the client of the coordinator in a run of several processes, which has one."""
    client = coordinator_client()
    assert client is not None, "several processes have a coordinator"
    return client


def coordinator_process() -> int:
    """Returns the index of this process; unlike jax.process_index, it initializes no device."""
    from jax._src.distributed import global_state

    return global_state.process_id


def keep_coordinator(process: int, seconds: float) -> None:
    """Waits for some seconds in the process whose part the coordinator is.

    Call it before an exit that the others do not expect: once the coordinator is gone, jax aborts
    them before they can read and say what happened.

    Args:
      process: Index of this process.
      seconds: Time that the others take to read what happened, and to exit.
    """
    if process == 0:
        time.sleep(seconds)


def wait_until_told(barrier: str) -> None:
    """Waits, after a failure that all processes read, until they know of it and exit.

    Returns after some seconds even if a process does not come.

    Args:
      barrier: Name of a barrier of this failure, the same in all processes.
    """
    with contextlib.suppress(RuntimeError):
        connected_client().wait_at_barrier(barrier, milliseconds(_TOLD_SECONDS))
    keep_coordinator(coordinator_process(), EXIT_SECONDS)


def milliseconds(seconds: float) -> int:
    """Returns a time limit in the unit of the coordinator's client."""
    return round(seconds * 1000)


class StatusBoard:
    """The status of the processes of a run.

    Without the coordinator, every method but `try_rows` raises RuntimeError or blocks for minutes.
    """

    def __init__(self, store: KeyValueStore, process_count: int):
        """Keeps the store; `process_count` is the number of processes of the run."""
        self._store = store
        self._count = process_count

    def publish(self, row: Row) -> None:
        """Publishes the row of this process."""
        self._store.key_value_set(
            f"{_STATUS}{row['process']}", json.dumps(row), allow_overwrite=True
        )

    def row(self, process: int) -> Row:
        """Returns the row of one process."""
        text = self._try_get(f"{_STATUS}{process}")
        return json.loads(text) if text else {"process": process}

    def rows(self) -> list[Row]:
        """Returns the rows of all processes, in their order."""
        texts = [text for _, text in self._store.key_value_dir_get(_STATUS)]
        rows: dict[int, Row] = {process: {"process": process} for process in range(self._count)}
        for text in texts:
            row = json.loads(text)
            rows[row["process"]] = row
        return list(rows.values())

    def declare_lost(self, row: Row, reason: str) -> None:
        """Tells all processes that one is lost. The first verdict stands."""
        with contextlib.suppress(RuntimeError):  # there is one already
            self._store.key_value_set(_VERDICT, json.dumps(row | {"reason": reason}))

    def lost(self) -> Row | None:
        """Returns the row of the process that process 0 declared lost, with the `reason`."""
        text = self._try_get(_VERDICT)
        return json.loads(text) if text else None

    def _try_get(self, key: str) -> str:
        try:
            return self._store.key_value_try_get(key)
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return ""
            raise

    def try_rows(self, seconds: float) -> list[Row]:
        """Returns the rows of all processes; none if the coordinator does not answer in time."""
        rows: list[Row] = []

        def read() -> None:
            with contextlib.suppress(RuntimeError):
                rows.extend(self.rows())

        # A daemon thread: the request may hang for minutes, and the process has to exit.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(seconds)
        return list(rows)


class LivenessTracker:
    """For how long the status of each process has not changed, by this process's clock."""

    def __init__(self, now: float):
        """Starts at `now`, in monotonic seconds."""
        self._start = now
        self._written: dict[int, Any] = {}
        self._changed: dict[int, float] = {}

    def observe(self, rows: Iterable[Row], now: float) -> None:
        """Compares the rows with those of the last call."""
        for row in rows:
            process = row["process"]
            written = row.get("written")
            if process not in self._changed or written != self._written[process]:
                self._changed[process] = self._start if written is None else now
                self._written[process] = written

    def shift(self, seconds: float) -> None:
        """Leaves out seconds in which this process itself was suspended."""
        self._start += seconds
        for process in self._changed:
            self._changed[process] += seconds

    def lost(self, rows: Sequence[Row], now: float, lost_seconds: float) -> tuple[Row, str] | None:
        """Returns the first process that is lost, and the reason; None if there is none.

        Args:
          rows: Those of the last `observe`.
          now: Monotonic seconds.
          lost_seconds: Time without a change of a running process's row until it counts as lost;
            six times as long for one without a row.
        """
        for row in rows:
            state = row.get("state", RUNNING)
            is_stuck = state == STUCK and row["phase"] not in COLLECTIVE_PHASES
            if is_stuck or state.startswith(FAILED):
                return row, state
            silent_seconds = now - self._changed[row["process"]]
            limit = lost_seconds if "written" in row else _START_FACTOR * lost_seconds
            if state != ENDED and silent_seconds > limit:
                return row, f"no sign of life for {silent_seconds:.0f} s: dead or frozen"
        return None


def describe(rows: Sequence[Mapping[str, Any]], silent_seconds: float) -> str:
    """Returns a table of processes that names the slowest.

    The slowest is the first by: dead or frozen (its row is `silent_seconds` older than the
    newest), failed, stuck on its own, lowest step, in a phase that is not collective, longest in
    its phase.

    Args:
      rows: Those of all processes.
      silent_seconds: Age relative to the newest row from which a process counts as dead.
    """
    newest_write = _newest_write(rows)

    def order(row: Mapping[str, Any]) -> tuple:
        state = row.get("state", "")
        phase = row.get("phase")
        step = row.get("step")
        is_silent = state != ENDED and newest_write - row.get("written", 0.0) > silent_seconds
        return (
            not is_silent,
            not state.startswith(FAILED),
            state != STUCK or phase in COLLECTIVE_PHASES,
            -1 if step is None else step,
            phase in COLLECTIVE_PHASES,
            row.get("since", 0.0),
        )

    ordered = sorted(rows, key=order)
    slowest = ordered[0]
    table_rows = ordered[:_MAX_ROWS]
    lines = [f"  {'process':>7}  {'host':<20}  {'step':>8}  {'phase':<11}  {'for':>7}  state"]
    for row in sorted(table_rows, key=lambda row: row["process"]):
        if "written" not in row:
            lines.append(f"  {row['process']:>7}  no status")
            continue
        state = row["state"]
        silent = newest_write - row["written"]
        if state == RUNNING and silent > silent_seconds:
            state = f"silent for {silent:.0f} s: dead or frozen"
        step = "-" if row["step"] is None else row["step"]
        mark = "  <- slowest" if row is slowest else ""
        lines.append(
            f"  {row['process']:>7}  {row['host']:<20}  {step:>8}  {row['phase']:<11}  "
            f"{newest_write - row['since']:>5.0f} s  {state}{mark}"
        )
    if len(rows) > len(table_rows):
        lines.append(f"  and {len(rows) - len(table_rows)} more processes, further ahead")
    lines.append(f"  slowest: process {slowest['process']}, last seen in {where(slowest)}")
    return "\n".join(lines)


def shows_culprit(rows: Sequence[Mapping[str, Any]], silent_seconds: float) -> bool:
    """Returns whether rows show a process that failed, or that is dead or frozen."""
    newest_write = _newest_write(rows)
    return any(
        row.get("state", "").startswith(FAILED)
        or (row.get("state") == RUNNING and newest_write - row["written"] > silent_seconds)
        for row in rows
    )


def peer_in_long_phase(rows: Sequence[Mapping[str, Any]], process: int) -> bool:
    """Returns whether a running process other than `process` is in a phase with a longer timeout.

    One that died there is found by `LivenessTracker`.

    Args:
      rows: Those of all processes.
      process: Index of this process.
    """
    return any(
        row["process"] != process
        and row.get("state") == RUNNING
        and row.get("phase") in LONG_PHASES
        for row in rows
    )


def where(row: Mapping[str, Any]) -> str:
    """Returns where a process is, as in "checkpoint of step 12"."""
    phase = row.get("phase", "an unknown phase")
    step = row.get("step")
    if step is None:
        return phase
    return f"step {step}" if phase == "step" else f"{phase} of step {step}"


def _newest_write(rows: Sequence[Mapping[str, Any]]) -> float:
    return max((row.get("written", 0.0) for row in rows), default=0.0)
