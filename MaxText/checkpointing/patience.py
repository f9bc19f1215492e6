"""Lines for who watches a run that waits for its storage."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_SECONDS = 60.0


@contextlib.contextmanager
def told_while_waiting(what: str, show: Callable[[str], None]) -> Iterator[None]:
    """Says once a minute what the block waits for.

    Args:
      what: takes so long, a sentence without its end.
      show: takes the lines, on a thread.
    """
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(_SECONDS):
            waited = time.monotonic() - began
            show(
                f"!!! WARNING: {what}, and the run has waited for {waited:.0f} s. "
                "What a bucket does not take is sent again and again; after heartbeat_timeout the "
                "process ends, and the same command goes on from the last good checkpoint."
            )

    thread = threading.Thread(target=tell, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
