"""Output file of decode.py (decode_output)."""

import json
import os
from pathlib import Path
from typing import IO, Any

from MaxText.errors import UserError


class Output:
    """JSON lines, one per finished text. Overwrites the file at the first text."""

    def __init__(self, name: str, prompt_file: str):
        """Checks that `name` is writable and not the prompt file; empty names mean none."""
        self._path = Path(name).expanduser() if name else None
        self._file: IO[str] | None = None
        if self._path is None:
            return
        if prompt_file and _same(self._path, Path(prompt_file).expanduser()):
            raise UserError(
                f"decode_output={name} is the file of the prompts, which would be lost. Name "
                "another."
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Checks write access without truncating an existing file.
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"decode_output={self._path} cannot be written: {error.strerror}.")

    def add(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        # Writes a lone surrogate of a prompt's fields as the escape it was read from.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._file = None  # closing it would fail as well
            raise self._unwritable(error) from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False  # one of them does not exist yet
