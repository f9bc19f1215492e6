"""UTF-8 bytes of targets, the denominator of bits per byte.

Bytes per id are defined for tokenizers whose text is the concatenation of the ids' bytes: byte
tokenizers, byte-level BPE, tiktoken, and vocabularies with byte fallback (Llama 2, Gemma).
Undefined where text is lowercased or unknown words share an id.

V: ids of the tokenizer.
"""

import base64
import dataclasses
import functools
import json
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer
from MaxText.input_pipeline.tokenization.interface import Tokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import ByteTokenizer, load_tokenizer
from MaxText.input_pipeline.tokenization.sentence_piece import SentencePieceTokenizer
from MaxText.input_pipeline.tokenization.tiktoken_file import TiktokenTokenizer

if TYPE_CHECKING:
    from MaxText.input_pipeline.data_sources import OpenDataSource

# Share of ids that may decode differently if the same tokenizer is stored in two formats: partial
# characters and spaces do not decode on their own.
_SAME_TOKENIZER = 0.1
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))  # of byte fallback

# Every UTF-8 byte: all characters of one and two bytes, and one per longer lead byte.
_ALL_BYTES_PROBE = "".join(
    map(chr, [*range(0x801), *range(0x1000, 0x10001, 0x1000), *range(0x40000, 0x110000, 0x40000)])
)
# Any normalization but NFC changes at least one of these characters.
_NORMALIZATION_PROBE = " a  b\u00a0\ufb01\uff21e\u0301\u3000\tc\r\nd "


class InexactByteCountError(Exception):
    """Raised, with the reason, if ids do not determine text bytes."""


class TokenByteCounts(NamedTuple):
    """Bytes by id."""

    counts_V: np.ndarray  # int32, UTF-8 bytes; 0 for control ids
    # bool, ids that begin with the space that the tokenizer prepends to each text, if any. As the
    # first id of a text, such an id has one byte less.
    has_dummy_prefix_V: np.ndarray


def token_byte_counts(tokenizer: Tokenizer) -> TokenByteCounts:
    """Returns the bytes of each id.

    The counts are checked on two probe texts, so tokenizers of any origin are safe to count with.
    Raises InexactByteCountError if ids do not determine text bytes.
    """
    if isinstance(tokenizer, ByteTokenizer):
        bytes_by_id = {byte: bytes([byte]) for byte in range(256)}
    elif isinstance(tokenizer, TiktokenTokenizer):
        ranks = (line.split() for line in tokenizer.contents.splitlines() if line)
        bytes_by_id = {int(rank): base64.b64decode(token) for token, rank in ranks}
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        bytes_by_id = _hugging_face_bytes(tokenizer.file_text)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        bytes_by_id = _sentence_piece_bytes(tokenizer.model)
    else:
        raise InexactByteCountError(f"the bytes of ids of {type(tokenizer).__name__} are not known")
    counts_V = np.zeros(tokenizer.entry.vocab_size, np.int32)
    has_dummy_prefix_V = np.zeros(tokenizer.entry.vocab_size, bool)
    (letter_ids,) = tokenizer.encode(["a"])
    letter_bytes = b"".join(bytes_by_id.get(token_id, b"") for token_id in letter_ids.tolist())
    adds_dummy_prefix = letter_bytes.startswith(b" ")
    for token_id, token_bytes in bytes_by_id.items():
        counts_V[token_id] = len(token_bytes)
        has_dummy_prefix_V[token_id] = adds_dummy_prefix and token_bytes.startswith(b" ")
    for probe in (_ALL_BYTES_PROBE, _NORMALIZATION_PROBE):
        (ids,) = tokenizer.encode([probe])
        decoded = tokenizer.decode(ids.tolist())
        num_bytes = counts_V[ids].sum() - has_dummy_prefix_V[ids[:1]].sum()
        round_trips = decoded in (probe, unicodedata.normalize("NFC", probe))
        if not round_trips or num_bytes != len(decoded.encode()):
            raise InexactByteCountError("the ids of its tokenizer do not spell texts byte by byte")
    return TokenByteCounts(counts_V, has_dummy_prefix_V)


def _sentence_piece_bytes(model: Any) -> dict[int, bytes]:
    """Returns the bytes of ids of a SentencePieceProcessor; one placeholder for a byte token."""
    bytes_by_id = {}
    for i in range(model.get_piece_size()):
        if model.is_byte(i):
            bytes_by_id[i] = b"\0"
        elif not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i)):
            bytes_by_id[i] = model.id_to_piece(i).replace(_SPACE, " ").encode()
    return bytes_by_id


def _hugging_face_bytes(file_text: str) -> dict[int, bytes]:
    """Returns bytes of ids of a tokenizer.json.

    Only their number, and whether they begin with a space, is exact: a byte token or a token of
    byte-level BPE may have placeholders.

    Raises InexactByteCountError for added tokens that strip adjacent spaces.
    """
    tokenizer = tokenizers.Tokenizer.from_str(file_text)
    # Of byte-level tokens, one character represents one byte.
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    bytes_by_id = {}
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        if is_byte_level and alphabet.issuperset(token):
            bytes_by_id[i] = bytes(len(token))
        elif is_byte_level:
            bytes_by_id[i] = token.encode()
        elif token in _BYTE_TOKENS:
            bytes_by_id[i] = b"\0"
        else:
            bytes_by_id[i] = token.replace(_SPACE, " ").encode()
    for token in json.loads(file_text)["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"]):
            raise InexactByteCountError(f"its token {token['content']!r} strips adjacent spaces")
        bytes_by_id[token["id"]] = b"" if token["special"] else token["content"].encode()
    return bytes_by_id


@dataclasses.dataclass(frozen=True)
class TextBytes:
    """Counts the UTF-8 bytes of scored targets, if they can be counted exactly.

    Either by id, with the tokenizer of the data, or from the manifest of a prepared dataset if
    every token of the split was a target.
    """

    masked: bool  # whether targets are hidden tokens, which do not form a text
    model_tokenizer: Tokenizer | UserError  # of the weights, or the error of opening it

    @functools.cached_property
    def _load_tokenizer(self) -> Callable[[str], Tokenizer]:
        # Cached for this evaluation only, because data may be prepared again.
        return functools.cache(load_tokenizer)

    def byte_counts(self, source: "OpenDataSource | None") -> tuple[TokenByteCounts | None, str]:
        """Returns bytes per id of a source, or None and the reason."""
        try:
            if source is None:
                raise InexactByteCountError("random tokens are not text")
            if self.masked:
                raise InexactByteCountError("hidden tokens are not text")
            return token_byte_counts(self._tokenizer(source)), ""
        except (InexactByteCountError, UserError) as error:
            return None, str(error)

    def from_manifest(
        self,
        source: "OpenDataSource | None",
        num_targets: int,
        *,
        is_whole_split: bool,
        reason: str,
    ) -> tuple[int | None, str]:
        """Returns the bytes of scored targets by the manifest, or None and the reason.

        Args:
          source: The data that were scored; None for random tokens.
          num_targets: How many targets were scored.
          is_whole_split: Whether no limit (eval_steps) left out a part of the split.
          reason: Why the bytes cannot be counted by id.
        """
        if source is None or self.masked or not source.dataset.num_text_bytes:
            return None, reason
        data = source.dataset
        store = source.dataset.store
        all_targets = len(store) - (len(store.document_offsets) - 1)
        # The first token of each text is a target only if a bos precedes it.
        if data.has_bos and is_whole_split and num_targets >= all_targets:
            return data.num_text_bytes, ""
        return None, f"{reason}; and not every token of the split is a target (add_bos, eval_steps)"

    def _tokenizer(self, source: "OpenDataSource") -> Tokenizer:
        """Returns the tokenizer of a source's ids.

        That is the one in its folder, else the model's. Raises InexactByteCountError if it changed
        since, and the UserError of opening the model's.
        """
        folder = source.dataset.tokenizer_folder
        sha256 = source.dataset.tokenizer_sha256
        if folder is None:
            if isinstance(self.model_tokenizer, UserError):
                raise self.model_tokenizer
            return self.model_tokenizer
        tokenizer = self._load_tokenizer(str(folder))
        if sha256 and tokenizer.entry.sha256 != sha256:
            raise InexactByteCountError(f"the tokenizer in {folder} is not the one of the ids")
        return tokenizer

    def mismatch(self, source: "OpenDataSource") -> str:
        """Returns a warning if the source's tokenizer is not the model's, else "".

        Files may differ in format for the same tokenizer, so decoded ids are compared.
        """
        folder = source.dataset.tokenizer_folder
        model_tokenizer = self.model_tokenizer
        if folder is None or isinstance(model_tokenizer, UserError):
            return ""
        data_tokenizer = self._load_tokenizer(str(folder))
        if data_tokenizer.entry.sha256 == model_tokenizer.entry.sha256:
            return ""
        num_ids = min(data_tokenizer.entry.vocab_size, model_tokenizer.entry.vocab_size)
        num_different = sum(
            data_tokenizer.decode([i]) != model_tokenizer.decode([i]) for i in range(num_ids)
        )
        if num_different <= _SAME_TOKENIZER * num_ids:
            return ""
        return (
            f"warning: {num_different:,} of {num_ids:,} ids of {source.entry.location} decode "
            f"differently with the tokenizer of the weights ({model_tokenizer.entry.origin}). "
            "Prepare the data with that tokenizer."
        )
