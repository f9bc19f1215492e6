"""Reads the files that scores are taken on: lines of text, or lines of JSON. Imports no jax."""

import json
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import without_surrogates

_JSON_LINES = (".jsonl", ".json")


def read_text_file(path: str, key: str) -> str:
    """A whole file.

    Args:
      key: the configuration key that names it, for messages.

    Raises:
      UserError: no path, no such file, not readable, or not UTF-8.
    """
    if not path:
        raise UserError(f"{key} is not set. Name the file: {key}=PATH.")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{key}={path} cannot be read: {error.strerror} (seen from {Path.cwd()})."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}={path} is not UTF-8 text: {error.reason} at byte {error.start}. Name the file "
            "of text itself, unpacked."
        ) from error


def holds_json(path: str) -> bool:
    """Whether the file's name says that each line is a JSON object."""
    return path.lower().endswith(_JSON_LINES)


def json_fields(text: str, field: str, place: str) -> list[tuple[int, str]]:
    """(line number from 1, text in `field`) of each line that is not blank.

    Args:
      place: the file, for messages.

    Raises:
      UserError: a line is no object with text in that field.
    """
    found = []
    # Not splitlines(), which also cuts at separators that JSON lines may hold inside strings.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{place}:{number} is not JSON ({error}). Each line must be one object, for "
                f'example {{"{field}": "..."}}.'
            ) from error
        value = row.get(field) if isinstance(row, dict) else None
        if not isinstance(value, str):
            fields = ", ".join(sorted(row)) if isinstance(row, dict) else "none"
            raise UserError(
                f'{place}:{number} has no text in field "{field}"; its fields: {fields}.'
            )
        found.append((number, without_surrogates(value)))
    return found
