"""UTF-8 bytes of targets, the denominator of bits per byte.

Bytes per id are defined for tokenizers whose text is the concatenation of the ids' bytes: byte
tokenizers, byte-level BPE, tiktoken, and vocabularies with byte fallback (Llama 2, Gemma).
Undefined where text is lowercased or unknown words share an id.

V: ids of the tokenizer.
"""

import base64
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import pre_tokenizers

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import ByteTokenizer, load_tokenizer
from MaxText.input_pipeline.tokenization.sentence_piece import (
    SENTENCE_PIECE_NAME,
    SentencePieceTokenizer,
)
from MaxText.input_pipeline.tokenization.tiktoken_file import TIKTOKEN_NAME, TiktokenTokenizer

if TYPE_CHECKING:
    from MaxText.input_pipeline.data_sources import OpenDataSource

# Share of ids that may decode differently if the same tokenizer is stored in two formats: partial
# characters and spaces do not decode on their own.
_SAME_TOKENIZER = 0.1
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

# Contains every UTF-8 byte: all characters of one and two bytes, and one per longer lead byte.
_EVERY = "".join(
    map(chr, [*range(0x801), *range(0x1000, 0x10001, 0x1000), *range(0x40000, 0x110000, 0x40000)])
)

# Any normalization changes at least one of these characters.
_PROBE = " a  b\u00a0\ufb01\uff21e\u0301\u3000\tc\r\nd "


class InexactByteCountError(Exception):
    """Raised, with the reason, if ids do not determine text bytes."""


class TokenByteCounts(NamedTuple):
    """Bytes by id."""

    counts_V: np.ndarray  # int32, UTF-8 bytes; 0 for control ids
    # bool, ids that begin with the space that the tokenizer prepends to each text, if any. As the
    # first id of a text, such an id has one byte less.
    has_dummy_prefix_V: np.ndarray


def token_byte_counts(tokenizer: TextTokenizer) -> TokenByteCounts:
    """Returns the bytes of each id; InexactByteCountError if undefined."""
    if isinstance(tokenizer, ByteTokenizer):
        bytes_by_id, adds_dummy_prefix = {byte: bytes([byte]) for byte in range(256)}, False
    elif isinstance(tokenizer, TiktokenTokenizer):
        bytes_by_id, adds_dummy_prefix = _tiktoken(_file(tokenizer, TIKTOKEN_NAME)), False
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        bytes_by_id, adds_dummy_prefix = _hugging_face(json.loads(tokenizer.file_text))
    elif isinstance(tokenizer, SentencePieceTokenizer):
        bytes_by_id, adds_dummy_prefix = _sentence_piece(_file(tokenizer, SENTENCE_PIECE_NAME))
    else:
        raise InexactByteCountError(f"the bytes of ids of {type(tokenizer).__name__} are not known")
    counts_V = np.zeros(tokenizer.entry.vocab_size, np.int32)
    has_dummy_prefix_V = np.zeros(tokenizer.entry.vocab_size, bool)
    for i, text in bytes_by_id.items():
        counts_V[i] = len(text)
        has_dummy_prefix_V[i] = adds_dummy_prefix and text[:1] == b" "
    return TokenByteCounts(counts_V, has_dummy_prefix_V)


def _file(tokenizer: TextTokenizer, name: str) -> bytes:
    """Returns the contents of a file saved by the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return (Path(folder) / name).read_bytes()


def _tiktoken(contents: bytes) -> dict[int, bytes]:
    lines = [line.split() for line in contents.splitlines() if line]
    return {int(rank): base64.b64decode(token) for token, rank in lines}


def _sentence_piece(contents: bytes) -> tuple[dict[int, bytes], bool]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=contents)
    size = model.get_piece_size()
    if sum(map(model.is_byte, range(size))) < 256:
        raise InexactByteCountError("its SentencePiece model maps unknown characters to one id")
    if model.decode(model.encode(_PROBE)) != _PROBE:
        raise InexactByteCountError("its SentencePiece model normalizes text")
    bytes_by_id = {}
    for i in range(size):
        if model.is_byte(i):
            bytes_by_id[i] = b"\0"
        elif not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i)):
            bytes_by_id[i] = model.id_to_piece(i).replace(_SPACE, " ").encode()
    first = model.id_to_piece(model.encode("a")[0])
    return bytes_by_id, first.startswith(_SPACE)


def _hugging_face(whole: dict[str, Any]) -> tuple[dict[int, bytes], bool]:
    model, decoders = whole["model"], {part["type"] for part in _parts(whole["decoder"])}
    vocabulary: dict[str, int] = model.get("vocab") or {}
    splitters = list(_parts(whole["pre_tokenizer"]))
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        raise InexactByteCountError(
            f"its tokenizer.json is a {model.get('type')} model, not a byte-level BPE"
        )
    is_byte_level = decoders == {"ByteLevel"}
    if not is_byte_level and not ("ByteFallback" in decoders and model.get("byte_fallback")):
        raise InexactByteCountError("its tokenizer.json does not spell text byte by byte")
    normalizers = {part["type"] for part in _parts(whole["normalizer"])}
    if other := normalizers - ({"NFC"} if is_byte_level else {"Prepend", "Replace"}):
        raise InexactByteCountError(
            f"its tokenizer.json normalizes text ({', '.join(sorted(other))})"
        )
    if is_byte_level:
        if any(part.get("add_prefix_space") for part in splitters):
            raise InexactByteCountError("its tokenizer.json prepends a space to texts")
        # One character represents one byte.
        ((needed, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(_EVERY)
        alphabet, adds_dummy_prefix = set(pre_tokenizers.ByteLevel.alphabet()), False
        bytes_by_id = {
            i: bytes(len(token)) if alphabet.issuperset(token) else token.encode()
            for token, i in vocabulary.items()
        }
    else:
        needed = _BYTES
        adds_dummy_prefix = "Prepend" in normalizers or any(
            part["type"] == "Metaspace" and part.get("prepend_scheme") != "never"
            for part in splitters
        )
        bytes_by_id = {
            i: b"\0" if token in _BYTES else token.replace(_SPACE, " ").encode()
            for token, i in vocabulary.items()
        }
    if not vocabulary.keys() >= set(needed):
        raise InexactByteCountError("its tokenizer.json has no id for some bytes")
    for token in whole["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"]):
            raise InexactByteCountError(f"its token {token['content']!r} strips adjacent spaces")
        bytes_by_id[token["id"]] = b"" if token["special"] else token["content"].encode()
    return bytes_by_id, adds_dummy_prefix


_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def _parts(entry: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields parts of a normalizer, pre-tokenizer or decoder, flattened."""
    if entry is None:
        return
    inner = next((entry[name] for name in _SEQUENCES if name in entry), None)
    if entry["type"] != "Sequence" or inner is None:
        yield entry
        return
    for part in inner:
        yield from _parts(part)


class TextBytes:
    """Counts text bytes of targets by tokenizer, or else by manifest.

    Gives a reason if neither is exact: bytes per token of another text or tokenizer would be wrong.
    """

    def __init__(self, split: str, masked: bool, model_tokenizer: TextTokenizer | UserError):
        """Takes the tokenizer of the weights, or the error of opening it.

        With `masked`, targets are hidden tokens, which do not form a text.
        """
        self._split = split
        self._masked = masked
        self._model_tokenizer = model_tokenizer
        self._of_path = functools.cache(lambda path: load_tokenizer(path, num_threads=1))

    def byte_counts(self, source: "OpenDataSource | None") -> tuple[TokenByteCounts | None, str]:
        """Returns bytes per id of a source, or None and the reason."""
        try:
            if source is None:
                raise InexactByteCountError("random tokens are not text")
            if self._masked:
                raise InexactByteCountError("hidden tokens are not text")
            return token_byte_counts(self._tokenizer(source)), ""
        except (InexactByteCountError, UserError) as error:
            return None, str(error)

    def from_manifest(
        self, source: "OpenDataSource | None", num_targets: int, is_whole_split: bool, why: str
    ) -> tuple[int | None, str]:
        """Returns the bytes of scored targets by the manifest, or None and why.

        `why` is the reason of byte_counts.
        """
        if source is None or self._masked:
            return None, why
        folder = Path(source.entry.location).expanduser()
        if not (folder / MANIFEST_NAME).is_file():
            return None, why
        manifest = read_manifest(str(folder))
        split = manifest.splits[self._split]
        # The first token of each text is a target only if a bos precedes it.
        begins = bool(manifest.options.get("add_bos"))
        if begins and is_whole_split and num_targets >= split.num_tokens - split.num_documents:
            return split.num_text_bytes, ""
        return None, f"{why}; and not every token of the split is a target (add_bos, eval_steps)"

    def _tokenizer(self, source: "OpenDataSource") -> TextTokenizer:
        """Returns the tokenizer of a source's ids; raises if there is none."""
        folder, sha256 = source.data.tokenizer_folder, source.data.tokenizer_sha256
        if folder is None:
            if isinstance(self._model_tokenizer, UserError):
                raise self._model_tokenizer
            return self._model_tokenizer
        tokenizer = self._of_path(str(folder))
        if sha256 and tokenizer.entry.sha256 != sha256:
            raise InexactByteCountError(f"the tokenizer in {folder} is not the one of the ids")
        return tokenizer

    def mismatch(self, source: "OpenDataSource") -> str:
        """Returns a warning if the source's tokenizer is not the model's."""
        folder, model = source.data.tokenizer_folder, self._model_tokenizer
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
