"""Ends a child process with its parent."""

import multiprocessing
import os
import threading
from multiprocessing import connection


def end_with_parent() -> None:
    """Exits this process when its parent dies, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
