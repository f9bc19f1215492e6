"""Output file of scores."""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from MaxText.checkpointing.checkpoint_files import CHECKPOINTS
from MaxText.errors import UserError
from MaxText.metrics.json_lines import to_json_value
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.file_access import is_url
from MaxText.storage.paths import parse_path

_FOLDER = "eval"  # in the run folder


def output_path(asked: str, weights: str) -> epath.Path | None:
    """Returns the requested file, or eval/<step>.json in the weights' run.

    Existing scores are kept: the next file is eval/<step>-2.json. Returns None if the weights
    belong to no run, or to a read-only one. Raises UserError if the requested file is not writable.
    """
    if asked:
        path = parse_path(asked, "eval_output")
        if problem := _write_error(path):
            raise UserError(f"eval_output={asked} cannot be written: {problem}.")
        return path
    step = parse_path(weights, "load_parameters_path")
    if step.parent.name != CHECKPOINTS:
        return None
    folder = step.parent.parent / _FOLDER
    names = (f"{step.name}{'' if n == 1 else f'-{n}'}.json" for n in itertools.count(1))
    path = next(folder / name for name in names if not (folder / name).exists())
    return None if _write_error(path) else path


def _write_error(path: epath.Path) -> str:
    """Returns why a file cannot be written, or ""; creates nothing."""
    if is_url(str(path)):
        return ""
    local = Path(os.fspath(path)).absolute()
    if local.is_dir():
        return "it is a folder"
    there = next(folder for folder in local.parents if folder.exists())
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no permission to write in {there}"
    return ""


def write(path: epath.Path, scores: Mapping[str, Any], show: Callable[[str], None]) -> None:
    """Writes scores as JSON at once, non-finite numbers as null."""
    text = json.dumps(to_json_value(scores), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    except OSError as error:
        raise UserError(
            f"eval_output={path} cannot be written ({error.strerror or error}). The scores above "
            "are complete; name another file to keep them."
        ) from error
    show(f"written to {path}")
