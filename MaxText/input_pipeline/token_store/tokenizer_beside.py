"""Finds the tokenizer next to files of token ids."""

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TOKENIZER_NAME
from MaxText.input_pipeline.tokenization.byte_tokenizer import BYTE_NAMES
from MaxText.input_pipeline.tokenization.tokenizer_files import CONFIG_NAME, read_json
from MaxText.storage.errors import is_transient
from MaxText.storage.file_access import is_url, local_path

_SINGLE_FILES = re.compile(
    rf"{re.escape(TOKENIZER_NAME)}|(tokenizer|spiece|sentencepiece\.bpe)\.model|.+\.tiktoken"
)
_PAIR = {"vocab.json", "merges.txt"}
# Split folders of a dataset; the tokenizer is above them.
_SPLIT = re.compile(r"(train|val|valid|validation|eval|dev|test)([-_].*)?")


def tokenizer_beside(files: Sequence[str], location: str, tokenizer_path: str) -> Path | None:
    """Returns the tokenizer folder of some files, for showing ids as text, else tokenizer_path.

    Searches from the first file up to `location`, and above folders named like a split.
    """
    top = Path(os.path.abspath(local_path(location)))
    for file in [file for file in files if not is_url(file)][:1]:
        folder = Path(os.path.abspath(local_path(file))).parent
        while True:
            if _has_tokenizer(folder):
                return folder
            if not (top in folder.parents or _SPLIT.fullmatch(folder.name)):
                break
            folder = folder.parent
    named = Path(tokenizer_path).expanduser()
    return named if tokenizer_path and os.path.exists(named) else None


def _has_tokenizer(folder: Path) -> bool:
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        if is_transient(error, remote=False):
            raise
        return False
    if names >= _PAIR or any(map(_SINGLE_FILES.fullmatch, names)):
        return True
    # The byte tokenizer has only a configuration file.
    with contextlib.suppress(UserError):
        return read_json(folder / CONFIG_NAME).get("tokenizer_type") in BYTE_NAMES
    return False


def holds_tokenizer(tokenizer_path: str, sha256: str, folder: Path | None) -> bool:
    """Returns whether a path is the tokenizer in `folder`, or has this digest."""
    path = Path(tokenizer_path).expanduser()
    if folder is not None and folder.resolve() in (path.resolve(), path.resolve().parent):
        return True
    for file in (path, path / TOKENIZER_NAME):
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
                return True
        except OSError:
            continue
    return False
