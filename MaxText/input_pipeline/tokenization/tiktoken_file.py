"""tiktoken vocabularies: files with a base64 token and its rank per line.

The word pattern and control tokens of published vocabularies are built in; for others, a
tokenizer_config.json next to the file has them:

    {"word_pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 5000}}
"""

import base64
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
import regex
import tiktoken

from MaxText.errors import UserError
from MaxText.formatting import pluralize
from MaxText.input_pipeline.tokenization.interface import (
    CHECKED_TEXT,
    CONFIG_NAME,
    Tokenizer,
    check_vocab_size,
    control_ids,
    control_token_settings,
    write_files,
)

TIKTOKEN_NAME = "tokenizer.tiktoken"

# Word patterns of published vocabularies. GPT-2's and GPT-4's are in tiktoken's form, which avoids
# backtracking. GPT-2's splits as the original; GPT-4's keeps trailing white space in one word,
# where the original splits it at line ends.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tiktoken searches every text for special tokens; without any it matches the empty string at every
# character, and encoding takes 50 % longer. This one hardly occurs, and is encoded as text.
UNUSED_TOKEN = "\x00unused\x00"

# A text of a megabyte takes less than a second with any pattern that does not backtrack.
SECONDS_PER_TEXT = 60

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+")

_CL100K_SPECIAL = {
    "<|endoftext|>": 100_257,
    "<|fim_prefix|>": 100_258,
    "<|fim_middle|>": 100_259,
    "<|fim_suffix|>": 100_260,
    "<|endofprompt|>": 100_276,
}
_LLAMA3_SPECIAL = {
    "<|begin_of_text|>": 128_000,
    "<|end_of_text|>": 128_001,
    "<|start_header_id|>": 128_006,
    "<|end_header_id|>": 128_007,
    "<|eot_id|>": 128_009,
    **{f"<|reserved_special_token_{i}|>": 128_005 + i for i in range(5, 251)},
}


class _Published(NamedTuple):
    """A published vocabulary: word pattern, rank count, and other ids."""

    word_pattern: str
    num_ranks: int
    special_tokens: Mapping[str, int]


_PUBLISHED = {
    "gpt2": _Published(GPT2_WORDS, 50_256, {"<|endoftext|>": 50_256}),
    "r50k_base": _Published(GPT2_WORDS, 50_256, {"<|endoftext|>": 50_256}),
    "p50k_base": _Published(GPT2_WORDS, 50_280, {"<|endoftext|>": 50_256}),
    "cl100k_base": _Published(CL100K_WORDS, 100_256, _CL100K_SPECIAL),
    "o200k_base": _Published(
        O200K_WORDS, 199_998, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}
    ),
    "llama3": _Published(LLAMA3_WORDS, 128_000, _LLAMA3_SPECIAL),
}


class _Settings(pydantic.BaseModel):
    """Keys of a tokenizer_config.json next to a tiktoken file."""

    word_pattern: str = ""  # or the name of a published vocabulary
    special_tokens: dict[str, pydantic.NonNegativeInt] | None = None


def _read_settings(settings: Mapping[str, Any], origin: str) -> _Settings:
    """Checks the settings of a tiktoken file; raises UserError."""
    try:
        return _Settings.model_validate(settings)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(f"{origin}: {key} in {CONFIG_NAME}: {problem['msg']}") from error


def is_tiktoken_file(head: bytes) -> bool:
    """Returns whether the first line of a file looks like tiktoken's."""
    return _LINE.fullmatch(head.split(b"\n", 1)[0].rstrip(b"\r")) is not None


class TiktokenTokenizer(Tokenizer):
    """A tiktoken vocabulary."""

    def __init__(self, contents: bytes, name: str, origin: str, settings: Mapping[str, Any]):
        """Builds it from file contents.

        Args:
          contents: Of the file.
          name: The file name without extension, which identifies a published vocabulary.
          origin: Names the file in manifests and messages.
          settings: The tokenizer_config.json next to it.

        Raises:
          UserError: A damaged file or an unknown word pattern.
        """
        self.contents = contents
        ranks = _read_ranks(contents, origin)
        pattern, special_tokens = _pattern_and_special_tokens(
            _read_settings(settings, origin), name, ranks, origin
        )
        vocab_size = max([*ranks.values(), *special_tokens.values()], default=-1) + 1
        check_vocab_size(vocab_size, origin)
        try:
            self._encoding = tiktoken.Encoding(
                name,
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens=special_tokens or {UNUSED_TOKEN: vocab_size},
            )
        except ValueError as error:
            raise UserError(
                f'{origin}: "word_pattern" {pattern!r} is not a regular expression: {error}. '
                f"Correct it in {CONFIG_NAME}."
            ) from error
        self._settings = {
            **control_token_settings(settings),
            "word_pattern": pattern,
            "special_tokens": special_tokens,
        }
        self._check_encodes_all_text(ranks, pattern, origin)
        ids = control_ids(settings, special_tokens.get)
        # The ids depend on more than the file, so the digest covers all of it.
        identity = json.dumps([pattern, special_tokens], sort_keys=True).encode()
        super().__init__(
            origin=origin,
            identity=contents + identity,
            vocab_size=vocab_size,
            control_ids=ids,
            engine="tiktoken",
        )

    def _check_encodes_all_text(
        self, ranks: Mapping[bytes, int], pattern: str, origin: str
    ) -> None:
        """Raises UserError if some text would be lost, or end the process."""
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise UserError(
                f"{origin} has no token for {pluralize(len(missing), 'byte')} ({missing[0]:#04x} "
                "...), so not every text can be encoded. Copy it again."
            )
        matches = regex.finditer(pattern, CHECKED_TEXT, timeout=SECONDS_PER_TEXT)
        matched = "".join(word.group() for word in matches)
        if matched != CHECKED_TEXT:
            raise UserError(
                f"{origin}: the word_pattern {pattern!r} matches only {len(matched)} of "
                f"{len(CHECKED_TEXT)} characters of a text, and the others would be lost. Correct "
                f"it in {CONFIG_NAME}."
            )

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # tiktoken fails on 100,000 consecutive white spaces. The package regex, a dependency of
            # tiktoken, does not; a single word stays one word.
            return self._ids_by_words(text)

    def _ids_by_words(self, text: str) -> np.ndarray:
        """Encodes word by word, for texts on which tiktoken fails; slower."""
        pattern = self._settings["word_pattern"]
        try:
            matches = regex.finditer(pattern, text, timeout=SECONDS_PER_TEXT)
            ids = [i for match in matches for i in self._encoding.encode_ordinary(match.group())]
        except (TimeoutError, ValueError) as error:
            raise UserError(
                f"{self.entry.origin} cannot encode a text: {error}. Its word_pattern {pattern!r} "
                "takes exponential time on that text (often nested repetitions such as (a+)+). "
                f"Correct it in {CONFIG_NAME}."
            ) from error
        return np.array(ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes, with control tokens."""
        pieces = []
        for i in map(int, ids):
            if 0 <= i < self.entry.vocab_size:
                # Some vocabularies have gaps between the ranks and the control ids.
                with contextlib.suppress(KeyError):
                    pieces.append(self._encoding.decode_single_token_bytes(i))
        return b"".join(pieces).decode("utf-8", "replace")

    def save(self, folder: Path) -> list[Path]:
        """Writes tokenizer.tiktoken and tokenizer_config.json."""
        return write_files(folder, {TIKTOKEN_NAME: self.contents}, self._settings)


def _pattern_and_special_tokens(
    settings: _Settings, name: str, ranks: Mapping[bytes, int], origin: str
) -> tuple[str, dict[str, int]]:
    """Returns the word pattern and the special tokens, of the settings or as published.

    Args:
      settings: The tokenizer_config.json next to the file.
      name: The file name without extension.
      ranks: Ids of the file's tokens.
      origin: Names the file in messages.

    Raises:
      UserError: There is no pattern, or a special token has the id of another token.
    """
    published = _PUBLISHED.get(settings.word_pattern) or _find_published(name, len(ranks))
    pattern = settings.word_pattern
    if published and pattern in ("", *_PUBLISHED):
        pattern = published.word_pattern
    if not pattern:
        raise UserError(
            f"{origin}: a tiktoken file does not say how to split text into words, and its "
            f"name is none of {', '.join(_PUBLISHED)}. Rename it, or put a {CONFIG_NAME} next "
            'to it with "word_pattern" (one of these names, or a regular expression) and '
            '"special_tokens" (token to id).'
        )
    special_tokens = settings.special_tokens
    if special_tokens is None:
        special_tokens = {}
        # Of a part of a published vocabulary, the ids may mean something else.
        if published and published.num_ranks == len(ranks):
            special_tokens = {**published.special_tokens}
    conflicting_ids = {*special_tokens.values()} & {*ranks.values()}
    if conflicting_ids:
        raise UserError(
            f'{origin}: "special_tokens" in {CONFIG_NAME} have ids of other tokens '
            f"({min(conflicting_ids)}). Give them free ids."
        )
    return pattern, special_tokens


def _read_ranks(contents: bytes, origin: str) -> dict[bytes, int]:
    """Parses bytes -> rank; UserError for invalid or repeated lines."""
    lines = [line.split() for line in contents.splitlines() if line]
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise UserError(
            f"{origin} has a line other than a token in base64 and its rank ({error}). Copy the "
            "file again."
        ) from error
    if ranks and min(ranks.values()) < 0:
        raise UserError(f"{origin} has the rank {min(ranks.values())}. Copy it again.")
    if not len(lines) == len(ranks) == len({*ranks.values()}):
        raise UserError(f"{origin} has one token or rank twice. Copy it again.")
    return ranks


def _find_published(name: str, num_ranks: int) -> _Published | None:
    """Returns the published vocabulary of a file, by its name or (Llama 3) its size."""
    for published_name, published in _PUBLISHED.items():
        if name.lower().replace("-", "").startswith(published_name):
            return published
    # Llama 3's file is named tokenizer.model.
    llama3 = _PUBLISHED["llama3"]
    return llama3 if num_ranks == llama3.num_ranks else None
