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
    Tokenizer,
    read_bytes,
    read_json,
    read_text,
    write_files,
)
from MaxText.input_pipeline.tokenization.sentence_piece import SentencePieceTokenizer
from MaxText.input_pipeline.tokenization.tiktoken_file import TiktokenTokenizer, is_tiktoken_file
from MaxText.storage.file_access import is_url, local_path

BYTE_NAMES = ("byte", "bytes")  # values of tokenizer_path for the byte tokenizer
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

# Tokenizers in a folder, in order of preference.
_PATTERNS = (
    TOKENIZER_NAME,
    "merges.txt",
    "*.tiktoken",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Split folders of a dataset; the tokenizer is above them.
_SPLIT = re.compile(r"(train|val|valid|validation|eval|dev|test)([-_].*)?")


class ByteTokenizer(Tokenizer):
    """An id per byte of UTF-8; 256 is eos, 257 bos, 258 padding."""

    def __init__(self):
        """Takes no file."""
        super().__init__(
            origin="bytes of UTF-8",
            identity=b"bytes of UTF-8, then eos, bos and pad",
            vocab_size=259,
            control_ids={"eos": 256, "bos": 257, "pad": 258},
            engine="numpy",
        )

    def _ids(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes; control ids are written <eos>, <bos>, <pad>."""
        control_tokens = {256: b"<eos>", 257: b"<bos>", 258: b"<pad>"}
        pieces = []
        for token_id in map(int, ids):
            if token_id in control_tokens:
                pieces.append(control_tokens[token_id])
            elif 0 <= token_id < 256:
                pieces.append(bytes([token_id]))
        return b"".join(pieces).decode("utf-8", "replace")

    def save(self, folder: Path) -> list[Path]:
        """Writes a tokenizer_config.json with the type."""
        return write_files(folder, {}, {"tokenizer_type": "byte"})


def load_tokenizer(tokenizer_path: str | Path, tokenizer_type: str = "auto") -> Tokenizer:
    """Loads a tokenizer.

    Args:
      tokenizer_path: A folder; a tokenizer.json, SentencePiece model or tiktoken file; `byte` or
        `bytes`; or a hub id.
      tokenizer_type: A value of the key tokenizer_type; "auto" detects it by the file.

    Raises:
      UserError: Nothing usable is there, or the hub cannot be reached.
    """
    name = str(tokenizer_path)
    path = Path(name).expanduser()
    is_byte = tokenizer_type == "byte"
    if name and os.path.isdir(path):
        return _load_folder(path, tokenizer_type)
    if name and os.path.exists(path) and not is_byte:
        return _load_file(path, tokenizer_type)
    byte_names = (*BYTE_NAMES, "") if is_byte else BYTE_NAMES
    if name in byte_names and tokenizer_type in ("auto", "byte"):
        return ByteTokenizer()
    is_file_name = path.suffix in (".json", ".model", ".tiktoken", ".txt")
    if is_file_name or is_byte or not _HUB_ID.fullmatch(name):
        raise UserError(
            f"tokenizer_path={name}: no such file or folder (seen from {Path.cwd()}), or none of "
            f"tokenizer_type={tokenizer_type}. Check the path, {_TRAINED}"
        )
    return _load_folder(_fetch(name), tokenizer_type, origin=f"hub {name}")


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


def _load_folder(folder: Path, tokenizer_type: str, origin: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a folder; UserError if there is none, or several."""
    file = _find_file(folder, tokenizer_type)
    if file is not None:
        return _load_file(file, tokenizer_type, origin)
    if tokenizer_type in ("auto", "byte") and _is_byte(folder):
        return ByteTokenizer()
    kind = "" if tokenizer_type == "auto" else f" of tokenizer_type={tokenizer_type}"
    raise UserError(
        f"tokenizer_path={folder}: the folder holds no {', '.join(_PATTERNS)}{kind}. Save "
        "it there with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def _find_file(folder: Path, tokenizer_type: str = "auto") -> Path | None:
    """Returns the preferred tokenizer file of a folder; UserError for several tiktoken files."""
    candidates = [path for pattern in _PATTERNS for path in sorted(folder.glob(pattern))]
    vocabularies = [path.name for path in candidates if path.suffix == ".tiktoken"]
    if len(vocabularies) > 1 and tokenizer_type in ("auto", "tiktoken"):
        raise UserError(
            f"{folder} holds several tokenizers ({', '.join(vocabularies)}). Set tokenizer_path to "
            "one of these files."
        )
    return next((path for path in candidates if tokenizer_type in ("auto", _kind(path))), None)


def _is_byte(folder: Path) -> bool:
    """Returns whether a folder has the settings of a byte tokenizer."""
    return _settings(folder).get("tokenizer_type") == "byte"


def _load_file(path: Path, tokenizer_type: str, origin: str | None = None) -> Tokenizer:
    """Loads a tokenizer file with the settings next to it."""
    origin = origin or f"file {path.name}"
    settings = _settings(path.parent)
    kind = _kind(path) if tokenizer_type == "auto" else tokenizer_type
    if path.name == "merges.txt":
        return HuggingFaceTokenizer(convert_vocabulary(path.parent, settings), origin, settings)
    if kind == "huggingface":
        return HuggingFaceTokenizer(read_text(path), origin, settings)
    if kind == "tiktoken":
        return TiktokenTokenizer(read_bytes(path), path.stem, origin, settings)
    return SentencePieceTokenizer(read_bytes(path), origin, settings)


def _kind(path: Path) -> str:
    """Returns the tokenizer_type of a file."""
    if path.suffix == ".json" or path.name == "merges.txt":
        return "huggingface"
    is_tiktoken = path.suffix == ".tiktoken" or is_tiktoken_file(read_bytes(path))
    return "tiktoken" if is_tiktoken else "sentencepiece"


def _settings(folder: Path) -> dict[str, Any]:
    """Returns a tokenizer's settings; tokenizer_config.json takes precedence."""
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / CONFIG_NAME)}


def find_tokenizer_near(file: str, location: str, tokenizer_path: str = "") -> Path | None:
    """Returns the tokenizer folder of a local file, else tokenizer_path if that exists.

    Searches from the file up to `location`, and above folders named like a split.

    Args:
      file: Path of data or weights; of a URL only tokenizer_path is tried.
      location: The folder or file that the user named.
      tokenizer_path: Fallback; empty for none.
    """
    if not is_url(file):
        top_folder = Path(os.path.abspath(local_path(location)))
        for folder in Path(os.path.abspath(local_path(file))).parents:
            if _has_tokenizer(folder):
                return folder
            if not (top_folder in folder.parents or _SPLIT.fullmatch(folder.name)):
                break
    path = Path(tokenizer_path).expanduser()
    return path if tokenizer_path and os.path.exists(path) else None


def _has_tokenizer(folder: Path) -> bool:
    # The byte tokenizer has only a configuration file, which may be of anything.
    with contextlib.suppress(UserError):
        return _find_file(folder) is not None or _is_byte(folder)
    return False
