"""Work that the processes of a run share: the first one does it, the others use its result."""

import contextlib
import itertools
import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from MaxText.errors import UserError
from MaxText.runtime import peers, processes
from MaxText.storage.file_access import is_url, local_path

_MAX_WAIT_HOURS = 24.0
# Until all processes have come to a block. They start within minutes of each other.
_MEETING_SECONDS = 3600.0
_SECONDS_BEFORE_NOTICE = 10.0

_ALL = "all"

_block_numbers = itertools.count()  # equal in all processes, as these enter the same blocks


@contextlib.contextmanager
def first_process_first(task: str, folder: str) -> Iterator[bool]:
    """Runs a block in the first process that sees a folder, then in the others that see it.

    For a folder on a shared disk, or a URL, the first process is process 0 of the run. For a folder
    on local disks, it is the first process of each host. The others wait until it has left the
    block. All processes leave the context together. Collective.

    Args:
      task: What the block does, for messages: "preparing the text".
      folder: Folder or URL to which the block writes its result. It is created.

    Yields:
      Whether this process is the first one.

    Raises:
      UserError: The block failed in a process, or did not end there within a day.
    """
    if processes.count() == 1:
        yield True
        return
    block = _Block(task, folder)
    try:
        if not block.is_first:
            block.wait_for_first()
        yield block.is_first
    except BaseException as error:
        block.fail(error)
        raise
    block.wait_for_all()


class _Block:
    """A block that all processes enter; they communicate through JAX's coordinator.

    Devices are not involved: they may not be initialized yet, and collectives have no time limit.
    """

    def __init__(self, task: str, folder: str):
        """Finds the first process that sees the folder. Collective."""
        self._client = peers.connected_client()
        self._process = peers.coordinator_process()
        self._task = task
        self._prefix = f"maxtext/first_process/{next(_block_numbers)}"
        self._first = 0
        markers = self._place_marker(folder)
        self._meet("placed")
        with contextlib.suppress(OSError):
            self._first = next((n for n, marker in enumerate(markers) if marker.exists()), 0)
        self._meet("seen")
        with contextlib.suppress(OSError):
            for marker in markers[self._process :]:
                marker.unlink(missing_ok=True)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one."""
        return self._process == self._first

    def wait_for_first(self) -> None:
        """Waits until the first process has left the block.

        Raises:
          UserError: It failed, or the wait took too long.
        """
        self._raise_failure(self._result_of(str(self._first), f"process {self._first}"))

    def wait_for_all(self) -> None:
        """Waits until all processes have left the block.

        Otherwise a process with less to do would wait elsewhere, where time is short: jax expects
        that all initialize their devices within two minutes.

        Raises:
          UserError: One failed, or the wait took too long.
        """
        self._tell(str(self._process), None)
        if self._process == 0:
            results = (
                self._result_of(str(process), f"process {process}")
                for process in range(1, processes.count())
            )
            self._tell(_ALL, next(filter(None, results), None))
        failure = self._result_of(_ALL, "the other processes")
        if failure is not None:
            peers.wait_until_told(f"{self._prefix}/told")
        self._raise_failure(failure)

    def fail(self, error: BaseException) -> None:
        """Tells the other processes that the block failed in this one."""
        message = str(error) if isinstance(error, UserError) else repr(error)
        failure = f"process {self._process} failed while {self._task}: {message}"
        self._tell(str(self._process), failure)
        if self._process == 0:
            self._tell(_ALL, failure)
        peers.wait_until_told(f"{self._prefix}/told")

    def _raise_failure(self, failure: str | None) -> None:
        if failure is not None:
            raise UserError(failure)

    def _tell(self, name: str, failure: str | None) -> None:
        """Publishes the result of a process, or of _ALL: a failure, or None."""
        self._client.key_value_set(f"{self._prefix}/result/{name}", json.dumps(failure))

    def _result_of(self, name: str, who: str) -> str | None:
        """Waits for the result of a process, or of _ALL; returns its failure, or None.

        Args:
          name: Of `_tell`.
          who: Whom this process waits for, for messages.
        """
        result = self._result_within(name, _SECONDS_BEFORE_NOTICE)
        if result is None:
            sys.stderr.write(f"process {self._process} waits for {who}: {self._task}\n")
            result = self._result_within(name, _MAX_WAIT_HOURS * 3600)
        if result is None:
            return (
                f"{who} did not finish {self._task} within {_MAX_WAIT_HOURS:g} hours. See the "
                "log, or prepare the data before the run (prepare_data.py)."
            )
        return json.loads(result)

    def _place_marker(self, folder: str) -> list[Path]:
        """Creates this process's file in the folder; returns those of it and all before it.

        None are returned if process 0 is the first one anyway: for a URL, and for a folder that
        cannot be written.
        """
        if self._process == 0:
            # A new name, because network disks remember for a while that a file was missing.
            self._client.key_value_set(f"{self._prefix}/marker", f".{secrets.token_hex(8)}")
        name = self._client.blocking_key_value_get(
            f"{self._prefix}/marker", peers.milliseconds(_MEETING_SECONDS)
        )
        if is_url(folder):
            return []
        path = Path(local_path(folder))
        markers = [path / f"{name}-{process}" for process in range(self._process + 1)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            markers[-1].touch()
        except OSError:  # whoever writes there says why it cannot
            return []
        return markers

    def _meet(self, name: str) -> None:
        self._client.wait_at_barrier(f"{self._prefix}/{name}", peers.milliseconds(_MEETING_SECONDS))

    def _result_within(self, name: str, seconds: float) -> str | None:
        """Returns what was told of a process, or of _ALL; None if it was not in time."""
        try:
            return self._client.blocking_key_value_get(
                f"{self._prefix}/result/{name}", peers.milliseconds(seconds)
            )
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
