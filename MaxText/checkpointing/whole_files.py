"""Small files that a crash leaves as they were or as they shall be."""

import hashlib
import json
import os
from typing import Any

from etils import epath

from MaxText.buckets.paths import is_bucket


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file and waits until it is on disk; replaces an older one in one go.

    Args:
      path: local, in a folder that exists, or gs://.

    Raises:
      OSError: it cannot be written.
    """
    if is_bucket(path):  # objects appear when they are complete
        path.write_text(text)
        return
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_sealed(path: epath.Path, name: str, value: Any) -> None:
    """Writes `{name: value, "sha256": ...}` as JSON, whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    write_whole(path, json.dumps({name: value, "sha256": _digest(value)}))


def read_sealed(path: epath.Path, name: str) -> Any:
    """The value that `write_sealed` wrote, as JSON has it; None where there is no file.

    Raises:
      OSError: the storage does not give it.
      ValueError: it is not what was written.
    """
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
    # As JSON has it: a tuple that was written is a list when it is read.
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
