"""Unbuffered text output to any terminal."""

import os
import sys
from collections.abc import Callable


def writer() -> Callable[[str], None]:
    """Returns a function that writes to the standard output.

    Characters that the terminal's encoding lacks are escaped. After a broken pipe (head, less)
    nothing more is shown, and the work continues for the sake of its files.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return write
