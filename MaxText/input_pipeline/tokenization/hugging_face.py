"""Hugging Face tokenizers: tokenizer.json, GPT-2's files, trained BPE."""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import TOKENIZER_NAME
from MaxText.input_pipeline.tokenization.determinism import to_text, without_dropout
from MaxText.input_pipeline.tokenization.interface import (
    CHECKED_TEXT,
    Tokenizer,
    check_vocab_size,
    control_ids,
    control_token_settings,
    read_json,
    without_surrogates,
    write_files,
)
from MaxText.value_types import JsonValue

END_OF_TEXT = "<|endoftext|>"
_REFERENCE = "tokenizers"  # the engine that defines the ids

_COMPARED_CHARACTERS = 500_000
_CHECKED_TOKENS = 64  # added tokens to check; some files reserve thousands


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, encoded by the package fastokens where its ids equal those of tokenizers.

    Attributes:
      file_text: The file without BPE dropout.
    """

    def __init__(self, file_text: str, origin: str, settings: Mapping[str, Any]):
        """Builds it from a tokenizer.json.

        Args:
          file_text: Contents of the file.
          origin: Names the file in manifests and messages.
          settings: The tokenizer_config.json next to it.

        Raises:
          UserError: The file is invalid, or documents could forge a control id.
        """
        self._settings = control_token_settings(settings)
        try:
            contents = json.loads(file_text)
            deterministic = without_dropout(contents)
        except (ValueError, RecursionError):
            contents = deterministic = None  # _parse reports the damage
        _check_declared_ids(contents, origin)
        if deterministic is not contents:
            file_text = to_text(deterministic)
            self.notes = (
                f"note: the BPE dropout of {origin} is not used: equal texts have equal ids",
            )
        self.file_text = file_text
        self._tokenizer = _parse(file_text, origin)
        ids = control_ids(self._settings, self._tokenizer.token_to_id)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{origin} has an empty vocabulary. Train or copy the tokenizer again.")
        vocab_size = max(vocabulary.values()) + 1
        super().__init__(origin, file_text.encode(), vocab_size, ids, _REFERENCE)
        self._fast = _fast_engine(file_text)
        if self._fast:
            self.engine = "fastokens"
            decoder = self._tokenizer.get_added_tokens_decoder()
            added_tokens = [str(token.content) for token in decoder.values()]
            contexts = [
                f"a{token} {token}b {token}{token}" for token in added_tokens[:_CHECKED_TOKENS]
            ]
            self.check_engine([CHECKED_TEXT, *contexts])
        self._check_special_tokens_as_text(
            {i: self._tokenizer.id_to_token(i) or "" for i in ids.values() if i is not None},
            f'Mark that token "special": true among the added_tokens of {TOKENIZER_NAME}.',
        )

    def __getstate__(self) -> dict[str, Any]:
        # The library's own pickle loses encode_special_tokens.
        return {n: value for n, value in vars(self).items() if n not in ("_tokenizer", "_fast")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokenizer = _parse(self.file_text, self.entry.origin)
        self._fast = None if self.engine == _REFERENCE else _fast_engine(self.file_text)

    def _ids(self, text: str) -> np.ndarray:
        if self._fast is not None:
            # ValueError is excessive backtracking of a regular expression.
            with contextlib.suppress(ValueError):
                # One text at a time runs in this thread: other processes use the other cores.
                ids, _ = self._fast.encode_batch_flat([text], split_special_tokens=True)
                return np.frombuffer(ids, np.uint32)
        return self.encode_reference([text])[0]

    def encode_reference(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of the tokenizers library."""
        plain = [without_surrogates(text) for text in texts]
        # Only the batch call can skip computing character offsets.
        with panics_as_user_error(self):
            encodings = self._tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def check_engine(self, texts: Iterable[str]) -> bool:
        """Returns whether fastokens is exact on a sample; drops it if not."""
        sample: list[str] = []
        num_characters = _COMPARED_CHARACTERS
        for text in texts:
            sample.append(text[:num_characters])
            num_characters -= len(text)
            if num_characters <= 0:
                break
        pairs = zip(self.encode(sample), self.encode_reference(sample), strict=True)
        same = all(np.array_equal(fast, exact) for fast, exact in pairs)
        if not same:
            self._fast = None
            self.engine = _REFERENCE
        return same

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes, with control tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def control_token_codec(self) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
        """Returns an encoder that reads control tokens, and a decoder that omits them.

        As in transformers; `encode` takes control tokens in a text as text.
        """
        library = _parse(self.file_text, self.entry.origin)
        library.encode_special_tokens = False

        def encode(text: str) -> list[int]:
            with panics_as_user_error(self):
                return library.encode(without_surrogates(text), add_special_tokens=False).ids

        return encode, lambda ids: library.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> list[Path]:
        """Writes tokenizer.json and tokenizer_config.json."""
        return write_files(folder, {TOKENIZER_NAME: self.file_text.encode()}, self._settings)


# The file descriptor of stderr is one for all threads.
_stderr_lock = threading.Lock()


@contextlib.contextmanager
def panics_as_user_error(tokenizer: HuggingFaceTokenizer) -> Iterator[None]:
    """Converts a panic of the tokenizers library into a UserError.

    The library panics when a regular expression of the file takes too long on a text. It prints
    a stack trace to stderr then, which is withheld.
    """
    if "Regex" not in tokenizer.file_text:
        yield
        return
    panic = None
    with _stderr_lock, tempfile.TemporaryFile() as captured:
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if not _is_panic(error):
                raise
            panic = error
        finally:
            os.dup2(stderr, 2)
            if panic is None:  # of other threads
                captured.seek(0)
                _write_all(stderr, captured.read())
            os.close(stderr)
    if panic is not None:
        raise UserError(
            f"{tokenizer.entry.origin} cannot encode a text: {panic}. One of its regular "
            "expressions takes exponential time on that text (often nested repetitions such as "
            "(a+)+). Correct it, or use another tokenizer_path."
        ) from None


def _is_panic(error: BaseException) -> bool:
    # It is no Exception, and its type cannot be imported.
    return type(error).__name__ == "PanicException"


def _write_all(descriptor: int, content: bytes) -> None:
    """Writes to a file descriptor until all bytes are written."""
    while content:
        content = content[os.write(descriptor, content) :]


def _check_declared_ids(contents: JsonValue, origin: str) -> None:
    """Raises UserError for too large ids, for which the libraries would allocate tables."""
    if not isinstance(contents, dict):
        return
    model = contents.get("model")
    added_tokens = contents.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(added_tokens, list):
        ids += [token.get("id") for token in added_tokens if isinstance(token, dict)]
    largest_id = max((number for number in ids if type(number) is int), default=0)
    check_vocab_size(largest_id + 1, origin)


def _fast_engine(file_text: str) -> fastokens.Tokenizer | None:
    """Returns a fastokens engine, or None for other than byte-level BPE."""
    try:
        engine = fastokens.Tokenizer.from_json_str(file_text)
    except BaseException as error:
        # ValueError, or a Rust panic, which is no Exception.
        if isinstance(error, Exception) or _is_panic(error):
            return None
        raise
    engine.no_truncation()
    engine.no_padding()
    return engine


def _parse(file_text: str, origin: str) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer, without truncation and padding; raises UserError."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(file_text)
    except BaseException as error:  # The library raises bare Exception, or panics.
        if not (isinstance(error, Exception) or _is_panic(error)):
            raise
        raise UserError(
            f"{origin} is not a Hugging Face {TOKENIZER_NAME}: {error}. Copy it again, or give "
            "another tokenizer_path."
        ) from error
    # The reader slices windows, and control tokens in a text are text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def convert_vocabulary(folder: Path, settings: Mapping[str, Any]) -> str:
    """Returns a tokenizer.json for GPT-2's vocab.json and merges.txt.

    Tokens of added_tokens.json, and the vocabulary's control tokens, become special.

    Args:
      folder: Contains the files.
      settings: Its tokenizer_config.json.

    Raises:
      UserError: The files are damaged, or added tokens have other ids than the next free ones.
    """
    vocabulary_path = str(folder / "vocab.json")
    merges_path = str(folder / "merges.txt")
    vocabulary = read_json(folder / "vocab.json")
    _check_declared_ids({"model": {"vocab": vocabulary}}, vocabulary_path)
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(vocabulary_path, merges_path))
    except Exception as error:  # The library raises bare Exception.
        raise UserError(
            f"{vocabulary_path} and {merges_path} are not a byte-level BPE: {error}. Copy both "
            "again."
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=settings.get("add_prefix_space") is True
    )
    tokenizer.decoder = decoders.ByteLevel()
    ids = control_ids(settings, tokenizer.token_to_id).values()
    tokens = {tokenizer.id_to_token(i) or "" for i in ids if i is not None}
    added_tokens = read_json(folder / "added_tokens.json")
    if not all(type(token_id) is int for token_id in added_tokens.values()):
        raise UserError(
            f"{folder / 'added_tokens.json'} gives a token an id that is not an integer. Copy it "
            "again."
        )
    tokenizer.add_special_tokens(
        [*sorted(tokens), *sorted(added_tokens, key=lambda token: added_tokens[token])]
    )
    for token, token_id in added_tokens.items():
        if tokenizer.token_to_id(token) != token_id:
            raise UserError(
                f"{folder / 'added_tokens.json'} gives {token!r} the id {token_id}, which is not "
                f"the next free one. Save a {TOKENIZER_NAME} with transformers and give that."
            )
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=2)


def train_tokenizer(
    sample: Sequence[str],
    vocab_size: int,
    origin: str,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE: special tokens, the 256 bytes, merges.

    Deterministic.

    Args:
      sample: Texts to train on.
      vocab_size: Number of ids; there are fewer if the sample has no more pairs to merge.
      origin: Names the tokenizer in manifests and messages.
      special_tokens: The first one ends (and may begin) documents.

    Raises:
      UserError: Invalid special tokens, or a too small `vocab_size`.
    """
    if not special_tokens or len({*special_tokens} - {""}) != len(special_tokens):
        raise UserError(
            f"tokenizer_special_tokens={list(special_tokens)} names no token, an empty one, or one "
            f"twice. Give at least the one that ends documents, for example {END_OF_TEXT}."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    min_vocab_size = len(special_tokens) + len(alphabet)
    if vocab_size < min_vocab_size:
        raise UserError(
            f"tokenizer_vocab_size={vocab_size} has no room for {len(special_tokens)} special "
            f"tokens and 256 bytes. Set it to {min_vocab_size} or more."
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    settings = {"eos_token": special_tokens[0], "bos_token": special_tokens[0]}
    return HuggingFaceTokenizer(tokenizer.to_str(), origin, settings)
