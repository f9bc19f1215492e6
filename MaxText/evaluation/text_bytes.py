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

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

# Every UTF-8 byte: all characters of one and two bytes, and one per longer lead byte.
_EVERY = "".join(
    map(chr, [*range(0x801), *range(0x1000, 0x10001, 0x1000), *range(0x40000, 0x110000, 0x40000)])
)
# Any normalization but NFC changes at least one of these characters.
_NORMALIZED = " a  b\u00a0\ufb01\uff21e\u0301\u3000\tc\r\nd "


class InexactByteCountError(Exception):
    """Raised, with the reason, if ids do not determine text bytes."""


class TokenByteCounts(NamedTuple):
    """Bytes by id."""

    counts_V: np.ndarray  # int32, UTF-8 bytes; 0 for control ids
    # bool, ids that begin with the space that the tokenizer prepends to each text, if any. As the
    # first id of a text, such an id has one byte less.
    has_dummy_prefix_V: np.ndarray


def token_byte_counts(tokenizer: Tokenizer) -> TokenByteCounts:
    """Returns the bytes of each id; InexactByteCountError if undefined."""
    if isinstance(tokenizer, ByteTokenizer):
        bytes_by_id = {byte: bytes([byte]) for byte in range(256)}
    elif isinstance(tokenizer, TiktokenTokenizer):
        ranks = (line.split() for line in tokenizer.contents.splitlines() if line)
        bytes_by_id = {int(rank): base64.b64decode(token) for token, rank in ranks}
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        bytes_by_id = _hugging_face(tokenizer.file_text)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        bytes_by_id = _sentence_piece(tokenizer.model)
    else:
        raise InexactByteCountError(f"the bytes of ids of {type(tokenizer).__name__} are not known")
    counts_V = np.zeros(tokenizer.entry.vocab_size, np.int32)
    has_dummy_prefix_V = np.zeros(tokenizer.entry.vocab_size, bool)
    spelled = b"".join(bytes_by_id.get(int(i), b"") for i in tokenizer.encode(["a"])[0])
    adds_dummy_prefix = spelled.startswith(b" ")
    for i, text in bytes_by_id.items():
        counts_V[i] = len(text)
        has_dummy_prefix_V[i] = adds_dummy_prefix and text.startswith(b" ")
    for probe in (_EVERY, _NORMALIZED):
        (ids,) = tokenizer.encode([probe])
        spelled = tokenizer.decode(ids.tolist())
        size = counts_V[ids].sum() - has_dummy_prefix_V[ids[:1]].sum()
        same = spelled in (probe, unicodedata.normalize("NFC", probe))
        if not same or size != len(spelled.encode()):
            raise InexactByteCountError("the ids of its tokenizer do not spell texts byte by byte")
    return TokenByteCounts(counts_V, has_dummy_prefix_V)


def _sentence_piece(model: Any) -> dict[int, bytes]:
    bytes_by_id = {}
    for i in range(model.get_piece_size()):
        if model.is_byte(i):
            bytes_by_id[i] = b"\0"
        elif not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i)):
            bytes_by_id[i] = model.id_to_piece(i).replace(_SPACE, " ").encode()
    return bytes_by_id


def _hugging_face(file_text: str) -> dict[int, bytes]:
    tokenizer = tokenizers.Tokenizer.from_str(file_text)
    # Of byte-level tokens, one character represents one byte.
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    bytes_by_id = {}
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        if is_byte_level:
            bytes_by_id[i] = bytes(len(token)) if alphabet.issuperset(token) else token.encode()
        else:
            bytes_by_id[i] = b"\0" if token in _BYTES else token.replace(_SPACE, " ").encode()
    for token in json.loads(file_text)["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"]):
            raise InexactByteCountError(f"its token {token['content']!r} strips adjacent spaces")
        bytes_by_id[token["id"]] = b"" if token["special"] else token["content"].encode()
    return bytes_by_id


@dataclasses.dataclass(frozen=True)
class TextBytes:
    """Counts text bytes of targets by tokenizer or manifest, if exact."""

    masked: bool  # whether targets are hidden tokens, which do not form a text
    model_tokenizer: Tokenizer | UserError  # of the weights, or the error of opening it

    @functools.cached_property
    def _of_path(self) -> Callable[[str], Tokenizer]:
        return functools.cache(load_tokenizer)  # for this evaluation: data may be prepared again

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
        self, source: "OpenDataSource | None", num_targets: int, is_whole_split: bool, why: str
    ) -> tuple[int | None, str]:
        """Returns the bytes of scored targets by the manifest, or None and `why`."""
        if source is None or self.masked or not source.dataset.num_text_bytes:
            return None, why
        data = source.dataset
        store = source.dataset.store
        all_targets = len(store) - (len(store.document_offsets) - 1)
        # The first token of each text is a target only if a bos precedes it.
        if data.has_bos and is_whole_split and num_targets >= all_targets:
            return data.num_text_bytes, ""
        return None, f"{why}; and not every token of the split is a target (add_bos, eval_steps)"

    def _tokenizer(self, source: "OpenDataSource") -> Tokenizer:
        """Returns the tokenizer of a source's ids; raises if there is none."""
        folder = source.dataset.tokenizer_folder
        sha256 = source.dataset.tokenizer_sha256
        if folder is None:
            if isinstance(self.model_tokenizer, UserError):
                raise self.model_tokenizer
            return self.model_tokenizer
        tokenizer = self._of_path(str(folder))
        if sha256 and tokenizer.entry.sha256 != sha256:
            raise InexactByteCountError(f"the tokenizer in {folder} is not the one of the ids")
        return tokenizer

    def mismatch(self, source: "OpenDataSource") -> str:
        """Returns a warning if the source's tokenizer is not the model's."""
        folder = source.dataset.tokenizer_folder
        model = self.model_tokenizer
        if folder is None or isinstance(model, UserError):
            return ""
        own = self._of_path(str(folder))
        if own.entry.sha256 == model.entry.sha256:
            return ""
        size = min(own.entry.vocab_size, model.entry.vocab_size)
        different = sum(own.decode([i]) != model.decode([i]) for i in range(size))
        if different <= _SAME_TOKENIZER * size:
            return ""
        return (
            f"warning: {different:,} of {size:,} ids of {source.entry.location} decode differently "
            f"with the tokenizer of the weights ({model.entry.origin}). Prepare the data with that "
            "tokenizer."
        )
