"""Prompts and output file of decode.py."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config.inference_sections import Decoding
from MaxText.errors import UserError
from MaxText.inference.text_files import check_not_input, read_lines
from MaxText.input_pipeline.tokenization.interface import without_surrogates


class Prompt(NamedTuple):
    """A text to continue, and its .jsonl fields for the output."""

    text: str
    extra_fields: dict[str, Any]


def read_prompts(section: Decoding) -> list[Prompt]:
    """Returns the prompts of prompt_file, or else the one in `prompt`.

    Raises UserError if the file is unreadable or empty, or a line has no prompt.
    """
    path = section.prompt_file
    if not path:
        return [Prompt(without_surrogates(section.prompt), {})]
    return [Prompt(text, row) for _, text, row in read_lines(path, "prompt_file", "prompt")]


class JsonlWriter:
    """JSON lines, one per finished text. Overwrites the file."""

    def __init__(self, name: str, prompt_file: str):
        """Checks that `name` is writable and not the prompt file."""
        self._path = Path(name).expanduser() if name else None
        self._mode = "w"  # of the first text, which replaces the contents
        if self._path is None:
            return
        check_not_input("decode_output", name, "prompt_file", prompt_file)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Checks write access without truncating an existing file.
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        return UserError(f"decode_output={self._path} cannot be written: {error.strerror}.")

    def add(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        # Writes a lone surrogate of a prompt's fields as the escape it was read from.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        try:
            with self._path.open(self._mode, encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise self._write_error(error) from error
        self._mode = "a"
