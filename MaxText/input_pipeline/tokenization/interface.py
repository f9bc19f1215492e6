"""Interface of all tokenizers, and reading and writing of their files.

`Tokenizer` is what the rest of the program sees of a Hugging Face, SentencePiece, tiktoken or byte
tokenizer. `load_tokenizer` makes one from a path.
"""

import abc
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TokenizerEntry

CONFIG_NAME = "tokenizer_config.json"

# Usual spellings of control tokens, tried in order without a tokenizer_config.json.
KNOWN_CONTROL_TOKENS = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>"),
    "pad": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "mask": ("[MASK]", "<mask>"),
}


# Text on which engines may differ: contractions, white space, digits, normal forms, scripts,
# symbols, control characters.
CHECKED_TEXT = (
    "It's 1,234.5 o'clock; I'LL  they've\tDON'T\n\n  x = y[i]**2  # ok?\r\n   \u00a0end \n"
    "na\u00efve nai\u0308ve \u1e69 s\u0323\u0307 \uac00 \u1100\u1161 \ufb01 \u2460 \u00bd "
    "\u01c5\u02b0 \u4e2d\u6587 \u0939\u093f\u0928\u094d \u0627\u0644 \u0e44\u0e17 \u0663 "
    "\U0001f642\U0001f469\u200d\U0001f680\u20ac\u2028\u0000\x1b\ue000\ufeff\u200b "
    "<a>[B]{c}</s> \u2581x ##y"
)

MAX_VOCAB_SIZE = 2**24
"""Ids of the largest vocabulary: a table of counts of more would not fit into memory."""


class Tokenizer(abc.ABC):
    """A text tokenizer, which can be pickled for worker processes.

    Deterministic: files that ask for random ids (BPE dropout, sampling of segmentations) are read
    without that, and `notes` says so.

    Attributes:
      entry: Description for manifests: origin, digest, vocabulary size and control ids.
      engine: Name of the library that encodes.
      notes: Messages for the user about the file.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        origin: str,
        identity: bytes,
        vocab_size: int,
        control_ids: Mapping[str, int | None],
        engine: str,
    ):
        """Describes the tokenizer in `entry`.

        Args:
          origin: Names it in manifests and messages.
          identity: All that determines the ids, such as the contents of the file; it is hashed.
          vocab_size: Largest id plus one, control ids included.
          control_ids: By name (eos, bos, pad, mask); None for those it does not have.
          engine: Name of the library that encodes.

        Raises:
          UserError: Ids beyond MAX_VOCAB_SIZE.
        """
        check_vocab_size(vocab_size, origin)
        self.entry = TokenizerEntry(
            origin=origin,
            sha256=hashlib.sha256(identity).hexdigest(),
            vocab_size=vocab_size,
            **{f"{name}_id": control for name, control in control_ids.items()},
        )
        self.engine = engine

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with the library's spelling of control tokens.

        Invalid UTF-8 becomes U+FFFD; unknown ids are omitted.
        """

    @abc.abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Writes the files for `load_tokenizer(str(folder))`; returns their paths."""

    @abc.abstractmethod
    def _ids(self, text: str) -> np.ndarray:
        """Returns ids (uint32 [N]) of a text without lone surrogates."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns ids (uint32 [N], maybe read-only) of each text.

        Control tokens in a text are encoded as text, lone surrogates as U+FFFD.
        """
        return [self._ids(without_surrogates(text)) for text in texts]

    def check_engine(self, texts: Iterable[str]) -> bool:
        """Returns whether a fast engine is exact on a sample; drops it if not."""
        return True

    def _check_special_tokens_as_text(self, spellings: Mapping[int, str], remedy: str) -> None:
        """Raises UserError if a text could be encoded to a control id."""
        for control, token in spellings.items():
            contexts = [token, f"a {token} b", f"a{token}b", f"\n{token}\n", token * 2]
            if any(control in ids for ids in self.encode(contexts)):
                raise UserError(
                    f"{self.entry.origin}: a document that contains {token!r} would get the "
                    f"control id {control}. {remedy}"
                )


def check_vocab_size(vocab_size: int, origin: str) -> None:
    """Raises UserError for a vocabulary without ids, or with ids beyond MAX_VOCAB_SIZE."""
    if vocab_size < 1:
        raise UserError(f"{origin} has an empty vocabulary. Train or copy the tokenizer again.")
    if vocab_size > MAX_VOCAB_SIZE:
        raise UserError(
            f"{origin} has the id {vocab_size - 1:,}, and ids up to {MAX_VOCAB_SIZE - 1:,} are "
            "supported. No vocabulary is that large: the file is damaged. Copy it again."
        )


def control_token_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer_config.json.

    Each is a string or an object with the field `content`.
    """
    tokens: dict[str, str] = {}
    for name in KNOWN_CONTROL_TOKENS:
        token = settings.get(f"{name}_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[f"{name}_token"] = token
    return tokens


def control_ids(
    settings: Mapping[str, Any], id_of: Callable[[str], int | None]
) -> dict[str, int | None]:
    """Returns the id of each control token by name; None for one that is not in the vocabulary.

    Args:
      settings: A tokenizer_config.json. Without a token there, the usual spellings are tried.
      id_of: Returns the id of a token, or None.
    """
    configured = control_token_settings(settings)
    ids: dict[str, int | None] = {}
    for name, usual_tokens in KNOWN_CONTROL_TOKENS.items():
        token = configured.get(f"{name}_token")
        candidates = usual_tokens if token is None else (token,)
        candidate_ids = (id_of(candidate) for candidate in candidates)
        ids[name] = next(
            (control_id for control_id in candidate_ids if control_id is not None), None
        )
    return ids


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates (possible in JSON) by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # UTF-16 joins matching surrogate pairs into one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_bytes(path: Path) -> bytes:
    """Reads a file; UserError on failure or if empty."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Check its name and its permissions."
        ) from error
    if not contents:
        raise UserError(f"{path} is empty. Copy it again.")
    return contents


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, preserving line ends; raises as `read_bytes`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be read: invalid UTF-8 at offset {error.start}. Copy it again."
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
    """Writes files by name, and `settings` as tokenizer_config.json; returns the paths."""
    contents = dict(files)
    if settings:
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        contents[CONFIG_NAME] = text.encode()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]
