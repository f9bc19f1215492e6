"""Text to ids: trains or loads a Hugging Face tokenizer and finds its control ids.

Imports no jax.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import TOKENIZER_NAME, TokenizerEntry
from MaxText.input_pipeline.tokenization.byte_pair_encoding import fast_encoder

END_OF_TEXT = "<|endoftext|>"

# Control tokens by the names that published tokenizers use, tried in this order when no
# tokenizer_config.json says which they are.
_KNOWN = {
    "eos": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", END_OF_TEXT),
    "pad": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
}

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class TextTokenizer:
    """A tokenizer ready to encode documents.

    Attributes:
      entry: what the manifest says about it.
      file_text: contents of its tokenizer.json.
      engine: the library that encodes, for reports.
    """

    def __init__(self, file_text: str, origin: str, settings: dict[str, Any]):
        """Builds it from the text of a tokenizer.json and the tokenizer_config.json beside it.

        Raises:
          UserError: the text is not a tokenizer, or documents could forge a control id.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(file_text)
        except Exception as error:  # The library raises bare Exception.
            raise UserError(f"{origin} is not a Hugging Face tokenizer.json: {error}") from error
        self.file_text = file_text
        # Windows are cut by the reader, and a control token in a text is text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = {name: self._control_id(name, settings) for name in _KNOWN}
        self.entry = TokenizerEntry(
            origin=origin,
            sha256=hashlib.sha256(file_text.encode()).hexdigest(),
            vocab_size=max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            pad_id=ids["pad"],
        )
        self._refuse_forgery()
        self._fast = fast_encoder(self._tokenizer)
        self.engine = "tiktoken" if self._fast else "tokenizers"

    def _control_id(self, name: str, settings: dict[str, Any]) -> int | None:
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        candidates = (token,) if isinstance(token, str) else _KNOWN[name]
        for candidate in candidates:
            found = self._tokenizer.token_to_id(candidate)
            if found is not None:
                return found
        return None

    def _refuse_forgery(self) -> None:
        for control in (self.entry.bos_id, self.entry.eos_id, self.entry.pad_id):
            if control is None:
                continue
            token = self._tokenizer.id_to_token(control)
            text = self._tokenizer.encode(f"a {token} b", add_special_tokens=False)
            if control in text.ids:
                raise UserError(
                    f"{self.entry.origin}: a document that contains {token!r} would get the "
                    f'control id {control}. Mark that token "special": true among the '
                    f"added_tokens of {TOKENIZER_NAME}."
                )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids [N] of each text, on all cores, without control ids."""
        if self._fast:
            return self._fast(list(texts))
        return self.encode_by_definition(texts)

    def encode_by_definition(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode`, always by the tokenizers library."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def use_definition(self) -> None:
        """Encodes by the tokenizers library from now on."""
        self._fast = None
        self.engine = "tokenizers"


def train_tokenizer(sample: Sequence[str], vocab_size: int, origin: str) -> TextTokenizer:
    """Trains a byte-level BPE: <|endoftext|> is id 0, then the 256 bytes, then joined pieces.

    The same sample gives the same tokenizer. It has fewer than `vocab_size` ids when the sample
    has no more pairs to join.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    settings = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    return TextTokenizer(tokenizer.to_str(), origin, settings)


def load_tokenizer(tokenizer_path: str) -> TextTokenizer:
    """Loads a tokenizer from a folder, a tokenizer.json, or by its hub id.

    Raises:
      UserError: nothing usable there, or the hub cannot be reached.
    """
    path = Path(tokenizer_path).expanduser()
    if path.is_dir():
        if not (path / TOKENIZER_NAME).is_file():
            raise UserError(
                f"tokenizer_path={tokenizer_path}: the folder holds no {TOKENIZER_NAME}. Save one "
                "there with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        path = path / TOKENIZER_NAME
    if path.is_file():
        try:
            file_text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return TextTokenizer(file_text, f"file {path.name}", _settings_beside(path))
    if path.suffix == ".json" or not _HUB_ID.fullmatch(tokenizer_path):
        raise UserError(
            f"tokenizer_path={tokenizer_path}: no such file or folder (seen from {Path.cwd()})."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_pretrained(tokenizer_path)
    except Exception as error:  # The hub's client raises many kinds, the library bare Exception.
        raise UserError(
            f"tokenizer_path={tokenizer_path}: no such folder here, and the Hugging Face hub did "
            f"not give it ({type(error).__name__}). Without network, copy the tokenizer's "
            f"{TOKENIZER_NAME} to this machine and give its path; or leave tokenizer_path empty to "
            "train one on the text."
        ) from error
    return TextTokenizer(tokenizer.to_str(), f"hub {tokenizer_path}", {})


def _settings_beside(path: Path) -> dict[str, Any]:
    beside = path.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        settings = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{beside} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}
