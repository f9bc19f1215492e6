"""Progress of preparation: a bar on a terminal, log lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_SILENT_SECONDS = 3.0  # shorter work prints no lines
_LONGEST_SILENCE_SECONDS = 60.0


@contextmanager
def show_progress(
    title: str, num_bytes: int, show: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done since its last call."""
    if sys.stderr.isatty():
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=num_bytes)
            yield lambda done: bar.advance(task, done)
        return
    start = shown = time.monotonic()
    done = quarters = 0

    def advance(more: int) -> None:
        nonlocal done, quarters, shown
        done += more
        now = time.monotonic()
        reached = done * 4 // max(num_bytes, 1)
        if now - start < _SILENT_SECONDS or done >= num_bytes:
            return
        if reached > quarters or now - shown > _LONGEST_SILENCE_SECONDS:
            quarters, shown = reached, now
            left = (now - start) * (num_bytes - done) / max(done, 1)
            show(f"{title}: {done / 1e6:,.1f} of {num_bytes / 1e6:,.1f} MB, {left:,.0f} s left")

    yield advance
