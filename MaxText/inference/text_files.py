"""Text and JSON Lines files named by a configuration key."""

import json
import os
from pathlib import Path
from typing import Any

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


def read_lines(path: str, key: str, field: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Returns (line number from 1, text, object) of JSON Lines, or of plain lines.

    Raises UserError if the file is unreadable or empty.
    """
    text = read_text_file(path, key)
    if is_json_lines(path):
        rows = json_rows(text, field, f"{key}={path}")
    else:
        rows = [(number, line.removesuffix("\r"), {}) for number, line in _nonblank_lines(text)]
    if not rows:
        raise UserError(f"{key}={path} is empty. Write one text per line.")
    return rows


def _nonblank_lines(text: str) -> list[tuple[int, str]]:
    # Only \n separates lines, unlike in splitlines().
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def json_rows(text: str, field: str, location: str) -> list[tuple[int, str, dict[str, Any]]]:
    """Returns (line number from 1, text in `field`, object) by line.

    Raises UserError, citing `location`, if a line is not an object with text in that field.
    """
    found = []
    for number, line in _nonblank_lines(text):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{location}:{number} is not JSON ({error}). Each line must be one object, for "
                f'example {{"{field}": "..."}}.'
            ) from error
        value = row.get(field) if isinstance(row, dict) else None
        if not isinstance(value, str):
            fields = ", ".join(sorted(row)) if isinstance(row, dict) else "none"
            raise UserError(
                f'{location}:{number} has no text in field "{field}"; its fields: {fields}.'
            )
        found.append((number, without_surrogates(value), row))
    return found


def check_not_input(output_key: str, output: str, input_key: str, input_file: str) -> None:
    """Refuses to overwrite an input file with the output."""
    try:
        paths = Path(output).expanduser(), Path(input_file).expanduser()
        is_same = bool(output and input_file) and os.path.samefile(*paths)
    except OSError:
        return  # one of them does not exist yet
    if is_same:
        raise UserError(
            f"{output_key}={output} is the file of {input_key}, which would be overwritten. Choose "
            "another path."
        )
