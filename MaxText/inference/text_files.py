"""Text and JSON Lines files named by configuration keys, such as prompts."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config.training_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import without_surrogates


def read_text_file(path: str, key: str) -> str:
    """Reads the file of configuration key `key`; raises UserError on failure."""
    if not path:
        raise UserError(f"{key} is not set. Set it to a file: {key}=PATH.")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{key}={path} cannot be read: {error.strerror} (seen from {Path.cwd()})."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}={path} is not UTF-8 text: {error.reason} at byte {error.start}. Use an "
            "uncompressed text file."
        ) from error


def is_json_lines(path: str) -> bool:
    """Returns whether the file name indicates JSON Lines."""
    return path.lower().endswith((".jsonl", ".json"))


class TextLine(NamedTuple):
    """A text of a file of plain lines or JSON Lines."""

    number: int  # of the line, from 1
    text: str
    fields: dict[str, Any]  # the JSON object; empty for a plain line


def read_lines(path: str, key: str, field: str) -> list[TextLine]:
    """Returns the lines of a file, except blank ones.

    Args:
      path: A plain text file, or JSON Lines by its name.
      key: Configuration key of the path, for messages.
      field: Field of the text in a JSON object.

    Raises:
      UserError: The file is unreadable, empty, or has a line that is not such an object.
    """
    lines = []
    # Only \n separates lines, unlike in splitlines().
    for number, line in enumerate(read_text_file(path, key).split("\n"), 1):
        if not line.strip():
            continue
        if is_json_lines(path):
            text, fields = _text_of_object(line, field, f"{key}={path}:{number}")
            lines.append(TextLine(number, text, fields))
        else:
            lines.append(TextLine(number, line.removesuffix("\r"), {}))
    if not lines:
        raise UserError(f"{key}={path} is empty. Write one text per line.")
    return lines


def _text_of_object(line: str, field: str, location: str) -> tuple[str, dict[str, Any]]:
    """Returns the text of a JSON object, and the object; `location` is for messages."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location} is not JSON ({error}). Each line must be one object, for example "
            f'{{"{field}": "..."}}.'
        ) from error
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        fields = ", ".join(sorted(row)) if isinstance(row, dict) else "none"
        raise UserError(f'{location} has no text in field "{field}"; its fields: {fields}.')
    return without_surrogates(value), row


def check_not_input(output_key: str, output: str, input_key: str, input_file: str) -> None:
    """Refuses to overwrite an input file with the output."""
    real_output = os.path.realpath(os.path.expanduser(output))
    real_input = os.path.realpath(os.path.expanduser(input_file))
    if output and real_output == real_input:
        raise UserError(f"{output_key}={output} is the file of {input_key}. Choose another path.")


class Prompt(NamedTuple):
    """A text to continue, and its .jsonl fields for the output."""

    text: str
    extra_fields: dict[str, Any]


def read_prompts(config: DecodingConfig) -> list[Prompt]:
    """Returns the prompts of prompt_file, or else the one in `prompt`."""
    path = config.prompt_file
    if not path:
        return [Prompt(without_surrogates(config.prompt), {})]
    return [Prompt(line.text, line.fields) for line in read_lines(path, "prompt_file", "prompt")]


class JsonlWriter:
    """Writes decode_output_path: a JSON line per completion, as it finishes.

    The contents of an existing file stay until the first line is written.
    """

    def __init__(self, path: str):
        """Checks that the file is writable; without a path, writes nothing.

        Raises UserError if it is not.
        """
        self._path = Path(path).expanduser() if path else None
        self._mode = "w"  # of the first line, which replaces the contents
        self._write("a", "")

    def _write(self, mode: str, text: str) -> None:
        """Writes text with an open() mode; raises UserError on failure."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A lone surrogate of a prompt's fields becomes the escape it was read from.
            with self._path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"decode_output_path={self._path} cannot be written: {error.strerror}."
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        """Writes one line, at once."""
        self._write(self._mode, json.dumps(row, ensure_ascii=False) + "\n")
        self._mode = "a"
