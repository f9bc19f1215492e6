"""What a thread does now and then while a block of code runs. Imports no jax."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def meanwhile(action: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Calls `action` on a thread every `seconds`, for the first time after them.

    Args:
      name: of the thread.
    """
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
