"""Readers of text and JSON Lines files for tasks."""

import json
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import without_surrogates

_JSON_LINES = (".jsonl", ".json")


def read_text_file(path: str, key: str) -> str:
    """Reads the file of configuration key `key`; raises UserError on failure."""
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
    """Returns whether the file name indicates JSON Lines."""
    return path.lower().endswith(_JSON_LINES)


def json_fields(text: str, field: str, place: str) -> list[tuple[int, str]]:
    """Returns (line number from 1, text in `field`) of each non-blank line.

    Raises UserError, citing `place`, if a line is no object with text in that field.
    """
    found = []
    # Unlike splitlines(), keeps other line separators inside JSON strings.
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
