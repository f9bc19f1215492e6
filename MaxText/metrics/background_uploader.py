"""An object in storage, overwritten by a thread with the newest text."""

import sys
import threading
import time
from collections.abc import Callable

from etils import epath

from MaxText.errors import first_line

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


class BackgroundUploader:
    """Writes contents on a thread, skipping outdated ones, with retries."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._content: Callable[[], bytes] = bytes
        self._asked = self._tried = self._done = 0  # sequence numbers of writes
        self._ends = self._warned = False
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="records", daemon=True).start()

    def write(self, content: Callable[[], bytes]) -> None:
        """Schedules a write; the thread calls `content` at each try."""
        with self._changed:
            self._content = content
            self._asked += 1
            self._changed.notify_all()

    @property
    def is_durable(self) -> bool:
        return self._done >= self._asked

    def wait_durable(self, until: float) -> None:
        """Waits until the newest contents are stored or failed, or `until`."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._tried >= asked, max(0.0, until - time.monotonic()))

    def close(self, until: float) -> None:
        """Waits for pending writes and ends the thread. Idempotent."""
        self.wait_durable(until)
        with self._changed:
            self._ends = True
            left = not self.is_durable
            self._changed.notify_all()
        if left:
            self._warn("timed out at the end of the run")

    def _work(self) -> None:
        wait: float | None = None  # seconds until a retry
        while True:
            with self._changed:
                # A new write retries at once, because its caller waits for the result.
                self._changed.wait_for(lambda: self._ends or self._asked > self._tried, wait)
                if self._ends and self._asked == self._tried:
                    return
                number, content = self._asked, self._content
            try:
                self._path.write_bytes(content())
                done, wait = number, None
            except Exception as error:  # storage clients raise anything
                self._warn(first_line(error))
                done, wait = self._done, min(max(_FIRST_WAIT, 2 * (wait or 0.0)), _LONGEST_WAIT)
            with self._changed:
                self._tried, self._done = number, done
                self._changed.notify_all()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                f"warning: upload of {self._path} failed: {why.rstrip('.')}. Training continues, "
                "and the upload is retried.\n"
            )
