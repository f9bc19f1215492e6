"""Reads and writes tokenizer files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from MaxText.errors import UserError

CONFIG_NAME = "tokenizer_config.json"


def read_bytes(path: Path) -> bytes:
    """Reads a file; raises UserError if that fails or it is empty."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Check its name and its permissions."
        ) from error
    if not contents:
        raise UserError(f"{path} is empty. Copy the tokenizer again.")
    return contents


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, preserving line ends; raises UserError as `read_bytes` does."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be read: at offset {error.start} is no UTF-8. Copy it again."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        contents = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not JSON: {error}. Copy it again.") from error
    if not isinstance(contents, dict):
        raise UserError(
            f"{path} holds a {type(contents).__name__} where a JSON object is expected. "
            "Copy it again."
        )
    return contents


def write_files(
    folder: Path, files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> list[Path]:
    """Writes files, and nonempty settings as tokenizer_config.json; returns the paths."""
    contents = dict(files)
    if settings:
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        contents[CONFIG_NAME] = text.encode()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]
