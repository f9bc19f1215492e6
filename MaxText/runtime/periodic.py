"""Periodic callbacks on a background thread."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Calls `action` on thread `name` every `seconds`, first after that time."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
