"""An event file of TensorBoard, written without a thread.

tensorboardX's `SummaryWriter` writes on a thread of its own and closes at the exit of the
interpreter. After a failed write, both print a traceback, and its queue blocks once it is full.
Sinks run on a background thread already, so this file is written where it is called, and nothing
touches it after an error. Only the protocol buffers are tensorboardX's.
"""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary as summaries
from tensorboardX.proto.event_pb2 import Event as EventProto  # pyright: ignore
from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore

from MaxText.storage.tfrecord import frame

_SECONDS_BETWEEN_FLUSHES = 120.0
_FILE_VERSION = "brain.Event:2"


class TensorBoardFile:
    """A new event file in a local folder.

    Attributes:
      path: The file. A later file in the same folder hides the points of earlier ones from its
        `purge_step` on.
    """

    def __init__(self, folder: str | Path, purge_step: int):
        """Creates the file.

        Args:
          folder: Local folder, created if it does not exist.
          purge_step: First step whose older points are hidden.

        Raises:
          OSError: The folder or file cannot be written; as of all other methods.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder, f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}")
        # Without a buffer of Python's, which the garbage collector would write after an error.
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
        self._unwritten = bytearray()
        self._flushed_at = time.monotonic()
        started = SessionLog(status=SessionLog.START)
        for event in (
            EventProto(file_version=_FILE_VERSION),
            EventProto(file_version=_FILE_VERSION, step=purge_step),
            EventProto(session_log=started, step=purge_step),
        ):
            event.wall_time = time.time()
            self._add(event)
        self._write_out()

    def add_scalar(self, tag: str, value: float, step: int, *, walltime: float) -> None:
        """Adds a point of a chart; `walltime` is in Unix seconds."""
        self.add_summary(summaries.scalar(tag, value), step, walltime=walltime)

    def add_text(self, tag: str, text: str, step: int, *, walltime: float | None = None) -> None:
        """Adds a text in Markdown."""
        self.add_summary(summaries.text(tag, text), step, walltime=walltime)

    def add_summary(
        self, summary: Any, step: int | None = None, *, walltime: float | None = None
    ) -> None:
        """Adds a summary of tensorboardX; flushes if the last flush was two minutes ago.

        Args:
          summary: A protocol buffer `Summary`.
          step: Its step, if it has one.
          walltime: Unix seconds, by default now.
        """
        event = EventProto(summary=summary)
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = step
        self._add(event)
        if time.monotonic() - self._flushed_at > _SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def _add(self, event: Any) -> None:
        self._unwritten += frame(event.SerializeToString())

    def _write_out(self) -> None:
        while self._unwritten:
            # Fewer bytes than asked for are written where a disk becomes full.
            written = self._file.write(self._unwritten)
            del self._unwritten[:written]

    def flush(self) -> None:
        """Makes all points durable."""
        self._write_out()
        os.fsync(self._file.fileno())
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def discard(self) -> None:
        """Closes the file without writing what is left; raises nothing."""
        self._unwritten.clear()
        with contextlib.suppress(OSError):
            self._file.close()
