"""Finds and loads tokenizers of any kind."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TOKENIZER_NAME
from MaxText.input_pipeline.tokenization.hugging_face import (
    HuggingFaceTokenizer,
    convert_vocabulary,
)
from MaxText.input_pipeline.tokenization.interface import (
    CONFIG_NAME,
    TextTokenizer,
    read_bytes,
    read_json,
    read_text,
    write_files,
)
from MaxText.input_pipeline.tokenization.sentence_piece import SentencePieceTokenizer
from MaxText.input_pipeline.tokenization.tiktoken_file import TiktokenTokenizer, is_tiktoken_file
from MaxText.storage.errors import is_transient
from MaxText.storage.file_access import is_url, local_path

BYTE_NAMES = ("byte", "bytes")  # values of tokenizer_path for the byte tokenizer
# What a folder holds of each kind, in order of preference.
_WANTED = {
    "huggingface": f"{TOKENIZER_NAME}, or vocab.json with merges.txt",
    "tiktoken": ".tiktoken file",
    "sentencepiece": "SentencePiece .model file",
    "byte": f'{CONFIG_NAME} with "tokenizer_type": "byte"',
}

# prepare_data.py trains a tokenizer if no path is given; train.py needs one for raw text.
_TRAINED = (
    "or prepare the text with prepare_data.py, which trains a tokenizer on it where tokenizer_path "
    "is empty."
)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

TRANSFORMERS_FILES = (
    TOKENIZER_NAME,
    CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# Files to download from a hub repository: never code or weights.
_HUB_FILES = (*TRANSFORMERS_FILES, "spiece.model", "sentencepiece.bpe.model")

_SINGLE_FILES = re.compile(
    rf"{re.escape(TOKENIZER_NAME)}|(tokenizer|spiece|sentencepiece\.bpe)\.model|.+\.tiktoken"
)
_PAIR = {"vocab.json", "merges.txt"}
# Split folders of a dataset; the tokenizer is above them.
_SPLIT = re.compile(r"(train|val|valid|validation|eval|dev|test)([-_].*)?")


class ByteTokenizer(TextTokenizer):
    """An id per byte of UTF-8; 256 is eos, 257 bos, 258 padding."""

    def __init__(self):
        identity = b"bytes of UTF-8, then eos, bos and pad"
        controls = {"eos": 256, "bos": 257, "pad": 258}
        super().__init__("bytes of UTF-8", identity, 259, controls, "numpy")

    def _ids(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes; control ids are written <eos>, <bos>, <pad>."""
        controls = {256: b"<eos>", 257: b"<bos>", 258: b"<pad>"}
        pieces = [controls.get(i) or bytes([i]) for i in map(int, ids) if 0 <= i <= 258]
        return b"".join(pieces).decode("utf-8", "replace")

    def save(self, folder: Path) -> list[Path]:
        return write_files(folder, {}, {"tokenizer_type": "byte"})


def load_tokenizer(tokenizer_path: str | Path, tokenizer_type: str = "auto") -> TextTokenizer:
    """Loads a tokenizer.

    `tokenizer_path` is a folder; a tokenizer.json, SentencePiece model or tiktoken file; `byte` or
    `bytes`; or a hub id. Raises UserError if nothing usable is there, or the hub cannot be reached.
    """
    tokenizer_path = str(tokenizer_path)
    path = Path(tokenizer_path).expanduser()
    named_byte = tokenizer_path in BYTE_NAMES and tokenizer_type in ("auto", "byte")
    try:
        if tokenizer_path and path.is_dir():
            return _load_folder(path, tokenizer_type)
        if tokenizer_path and path.exists():
            return _load_file(path, tokenizer_type)
    except OSError as error:
        raise UserError(
            f"tokenizer_path={tokenizer_path} cannot be read: {error.strerror}. Check its "
            "permissions."
        ) from error
    if named_byte or (tokenizer_type == "byte" and not tokenizer_path):
        return ByteTokenizer()
    is_file_name = path.suffix in (".json", ".model", ".tiktoken", ".txt")
    if is_file_name or tokenizer_type == "byte" or not _HUB_ID.fullmatch(tokenizer_path):
        raise UserError(
            f"tokenizer_path={tokenizer_path}: no such file or folder (seen from {Path.cwd()}). "
            f"Check the path, {_TRAINED}"
        )
    return _load_folder(_fetch(tokenizer_path), tokenizer_type, origin=f"hub {tokenizer_path}")


def _fetch(hub_id: str) -> Path:
    """Downloads the tokenizer of a hub repository, from its cache if possible."""
    # Imported lazily: it takes a third of a second.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # The hub's client raises many kinds.
        raise UserError(
            f"tokenizer_path={hub_id}: no such folder here, and the Hugging Face hub did "
            f"not give it ({type(error).__name__}). Without network, copy the tokenizer's "
            f"{TOKENIZER_NAME} to this machine and give its path, {_TRAINED}"
        ) from error


def _load_folder(folder: Path, tokenizer_type: str, origin: str | None = None) -> TextTokenizer:
    for kind in _WANTED if tokenizer_type == "auto" else (tokenizer_type,):
        if file := _file_of(folder, kind):
            return _load_file(file, kind, origin)
        if kind == "huggingface" and all((folder / name).is_file() for name in _PAIR):
            settings = _settings(folder)
            text = convert_vocabulary(folder, settings)
            return HuggingFaceTokenizer(text, origin or "files vocab.json and merges.txt", settings)
        if kind == "byte" and _settings(folder).get("tokenizer_type") == "byte":
            return ByteTokenizer()
    wanted = _WANTED.get(
        tokenizer_type, f"{TOKENIZER_NAME}, vocab.json with merges.txt, .model or .tiktoken file"
    )
    raise UserError(
        f"tokenizer_path={folder}: the folder holds no {wanted}. Save the tokenizer there with "
        "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def _file_of(folder: Path, kind: str) -> Path | None:
    """Returns the only tokenizer file of a kind in a folder, or None."""
    if kind == "huggingface":
        return folder / TOKENIZER_NAME if (folder / TOKENIZER_NAME).is_file() else None
    endings = {"tiktoken": (".tiktoken", ".model"), "sentencepiece": (".model",)}.get(kind, ())
    named = sorted(path for path in folder.iterdir() if path.name.endswith(endings))
    found = [path for path in named if _kind(path) == kind]
    if len(found) > 1:
        # Prefer the usual name: other files may be unrelated models.
        found = [path for path in found if path.stem == "tokenizer"] or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(
            f"tokenizer_path={folder}: the folder holds several tokenizers ({names}). Give the "
            "path of one."
        )
    return found[0] if found else None


def _load_file(path: Path, tokenizer_type: str, origin: str | None = None) -> TextTokenizer:
    origin = origin or f"file {path.name}"
    settings = _settings(path.parent)
    kind = _kind(path) if tokenizer_type == "auto" else tokenizer_type
    if kind == "huggingface":
        return HuggingFaceTokenizer(read_text(path), origin, settings)
    if kind == "tiktoken":
        return TiktokenTokenizer(read_bytes(path), path.stem, origin, settings)
    if kind == "sentencepiece":
        return SentencePieceTokenizer(read_bytes(path), origin, settings)
    raise UserError(
        f"tokenizer_path={path} is a file, and tokenizer_type=byte reads none. Set "
        "tokenizer_path=bytes."
    )


def _kind(path: Path) -> str:
    """Returns the kind of a tokenizer file by its contents."""
    with path.open("rb") as file:
        head = file.read(4096)
    if path.suffix == ".json" or (path.suffix != ".model" and head.lstrip()[:1] == b"{"):
        return "huggingface"
    if path.suffix == ".tiktoken" or is_tiktoken_file(head):
        return "tiktoken"
    return "sentencepiece"


def _settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, with special_tokens_map.json."""
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / CONFIG_NAME)}


def find_tokenizer_near(file: str, location: str, tokenizer_path: str = "") -> Path | None:
    """Returns the tokenizer folder of a local file, else tokenizer_path.

    Searches from the file up to `location`, and above folders named like a split.
    """
    if not is_url(file):
        top = Path(os.path.abspath(local_path(location)))
        folder = Path(os.path.abspath(local_path(file))).parent
        while not _has_tokenizer(folder):
            if not (top in folder.parents or _SPLIT.fullmatch(folder.name)):
                break
            folder = folder.parent
        else:
            return folder
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
