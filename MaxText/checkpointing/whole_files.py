"""Atomic writes of small files."""

import hashlib
import json
import os
from typing import Any

from etils import epath

from MaxText.storage.paths import is_bucket


def write_whole(path: epath.Path, text: str) -> None:
    """Replaces a file, local or gs://, atomically and durably."""
    if is_bucket(path):  # objects appear only when complete
        path.write_text(text)
        return
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_sealed(path: epath.Path, name: str, value: Any) -> None:
    """Writes `{name: value, "sha256": ...}` as JSON, atomically."""
    write_whole(path, json.dumps({name: value, "sha256": _digest(value)}))


def read_sealed(path: epath.Path, name: str) -> Any:
    """Returns the value, or None without a file; ValueError if it is not what was written."""
    try:
        content = json.loads(path.read_text())
        if content["sha256"] != _digest(content[name]):
            raise ValueError("not what was written (SHA-256 differs)")
        return content[name]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _digest(value: Any) -> str:
    # Via JSON: a tuple that was written is read back as a list.
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
