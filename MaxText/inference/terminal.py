"""Text for the terminal, shown at once, whatever the terminal is."""

import os
import sys
from collections.abc import Callable


def writer() -> Callable[[str], None]:
    """A function that writes to the standard output.

    Characters that the terminal's encoding lacks are escaped. Whoever reads the output may leave
    (head, less): then nothing more is shown, and the work goes on for the sake of its files.
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
