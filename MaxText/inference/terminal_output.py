"""Text output to any terminal."""

import os
import sys
from collections.abc import Callable


def stdout_writer() -> Callable[[str], None]:
    """Returns a function for unbuffered writes to standard output.

    Escapes characters that the terminal's encoding lacks. Discards output after a broken pipe
    (head, less), so that the program still writes its files.
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
