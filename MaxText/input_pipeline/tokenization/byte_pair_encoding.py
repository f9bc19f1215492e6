"""The ids of a byte-level BPE through tiktoken: several times less CPU time for the same ids.

tiktoken joins the adjacent pair whose joined bytes have the lowest rank, Hugging Face's BPE the
adjacent pair with the earliest rule; of equals both take the leftmost. `_reachable_ranks` keeps
the tokens t that the rules make of t's own bytes, and requires that rules come in the order of the
ids of what they make. Then both give the same ids on every word:

Suppose they first part where tiktoken would join x and y into t. Nothing was joined across the
ends of t before, so the joins inside it were those that the rules do on t alone, whose course is
fixed and ends with t: x, y is its last step, hence a rule. So the rules part by another step t',
which cannot have a lower rank (tiktoken would take it too) and not a higher one (its rule comes
later). It is t once more, further right. There, too, the course of t alone has come to two parts;
these are x and y again, by the same rule, and of equals the leftmost comes first. The same shows
that the rules never make a token that was not kept.

With `ignore_merges` a word that is in the vocabulary becomes its id at once, as for tiktoken. A
token that the rules do not make of its bytes is then kept too when they leave it in three or more
parts: the course of t alone never comes to two, so nobody joins two parts into t.

Imports no jax.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import normalizers

from MaxText.input_pipeline.tokenization.added_tokens import (
    AddedTokenFinder,
    finder_of,
    longest_run_of_spaces,
)
from MaxText.input_pipeline.tokenization.normal_form import normal_form
from MaxText.input_pipeline.tokenization.word_patterns import (
    BYTES_OF_UTF8,
    GPT2_WORDS,
    UNUSED_TOKEN,
    tiktoken_pattern,
    with_runs_of_spaces,
)

_OTHER_MODEL_OPTIONS = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)


class FastEncoder:
    """Encodes by tiktoken what stands between added tokens. Can be pickled."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        normalizes: bool,
        written: AddedTokenFinder | None,
        normalized: AddedTokenFinder | None,
    ):
        """The parts that a text goes through: written, normalizes, normalized, encoding.

        Args:
          encoding: words and ranks.
          normalizes: whether text is brought to normal form C.
          written: added tokens that are looked for in the text as it is written.
          normalized: those that are looked for after normalisation.
        """
        self._encoding = encoding
        self._normalizes = normalizes
        self._written = written
        self._normalized = normalized

    def encode(self, text: str) -> np.ndarray:
        """Ids uint32 [N]; control tokens written in the text are read as text.

        Raises:
          ValueError: the text is beyond what tiktoken's word finder can do.
        """
        if self._written is None:
            return self._encode_written(text)
        return _join(
            [
                self._encode_written(piece) if isinstance(piece, str) else _one(piece)
                for piece in self._written.split(text)
            ]
        )

    def _encode_written(self, text: str) -> np.ndarray:
        if self._normalizes:
            text = normal_form(text)
        if self._normalized is None:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        return _join(
            [
                self._encoding.encode_to_numpy(piece, disallowed_special=())
                if isinstance(piece, str)
                else _one(piece)
                for piece in self._normalized.split(text)
            ]
        )


def fast_encoder(tokenizer: tokenizers.Tokenizer) -> FastEncoder | None:
    """An encoder that gives the same ids as `tokenizer` on every text; None when it could not."""
    whole = json.loads(tokenizer.to_str())
    normalizer = whole["normalizer"]
    normalizes = normalizer == {"type": "NFC"}
    pattern = tiktoken_pattern(whole["pre_tokenizer"])
    if pattern is None or not (normalizer is None or normalizes):
        return None
    ranks = _model_ranks(tokenizer, whole["model"])
    if ranks is None or any(
        token["single_word"] or token["lstrip"] or token["rstrip"]
        for token in whole["added_tokens"]
        if not token["special"]
    ):
        return None

    written: dict[str, int] = {}
    normalized: dict[str, int] = {}
    control: set[str] = set()
    for token in whole["added_tokens"]:
        content = token["content"]
        if token["normalized"] and normalizes:
            content = normalizers.NFC().normalize_str(content)
        if not content or content in written or content in normalized:
            return None
        (normalized if token["normalized"] else written)[content] = token["id"]
        if token["special"]:
            control.add(content)

    longest = longest_run_of_spaces([*written, *normalized], control)
    if longest and pattern == GPT2_WORDS:
        # The runs are not worth a cut each: code is full of them.
        pattern = with_runs_of_spaces(longest)
        for tokens in (written, normalized):
            for token in [token for token in tokens if " " in token]:
                # A rank that nothing can be joined into: no other word has two spaces in a row.
                ranks[token.encode()] = tokens.pop(token)
    encoding = tiktoken.Encoding(
        "data set",
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={UNUSED_TOKEN: max(ranks.values()) + 1},
    )
    return FastEncoder(
        encoding, normalizes, finder_of(written, control), finder_of(normalized, control)
    )


def _model_ranks(
    tokenizer: tokenizers.Tokenizer, model: Mapping[str, Any]
) -> dict[bytes, int] | None:
    """Bytes -> id of the tokens of a BPE; None when tiktoken could join others."""
    if model["type"] != "BPE" or any(model.get(option) for option in _OTHER_MODEL_OPTIONS):
        return None
    ignore_merges = bool(model.get("ignore_merges"))
    if not ignore_merges:
        return _reachable_ranks(tokenizer, model, whole_words=False)
    tokenizer.model.ignore_merges = False
    try:
        return _reachable_ranks(tokenizer, model, whole_words=True)
    finally:
        tokenizer.model.ignore_merges = True


def _reachable_ranks(
    tokenizer: tokenizers.Tokenizer, model: Mapping[str, Any], whole_words: bool
) -> dict[bytes, int] | None:
    """See the module's text; `whole_words`: words of the vocabulary become ids at once."""
    vocabulary: dict[str, int] = model["vocab"]
    character_of = _character_of_byte()
    if not all(character_of[byte] in vocabulary for byte in BYTES_OF_UTF8):
        return None
    pairs = [rule.split(" ") if isinstance(rule, str) else rule for rule in model["merges"]]
    joined = [first + second for first, second in pairs]

    # Characters that stand for no byte become one that is no byte.
    byte_of = str.maketrans(
        {chr(byte): "\uffff" for byte in range(256)}
        | {character: chr(byte) for byte, character in character_of.items()}
    )
    tokens = [*character_of.values(), *joined]
    candidates = {token: None for token in tokens if token in vocabulary}
    if whole_words:
        candidates.update(dict.fromkeys(vocabulary))
    tokenize = tokenizer.model.tokenize
    ranks: dict[bytes, int] = {}
    made: set[str] = set()
    for token in candidates:
        try:
            data = token.translate(byte_of).encode("latin-1")
        except UnicodeEncodeError:
            continue  # With such a character it is part of no word.
        parts = tokenize(token)
        if len(parts) == 1 and parts[0].id == vocabulary[token]:
            made.add(token)
        elif not whole_words:
            continue
        elif len(parts) == 2:
            return None
        ranks[data] = vocabulary[token]
    ids = [vocabulary[token] for token in joined if token in made]
    in_order = all(first <= second for first, second in itertools.pairwise(ids))
    return ranks if in_order else None


def _character_of_byte() -> dict[int, str]:
    """GPT-2's table: the printable character that stands for each byte in a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return table


def _one(id_: int) -> np.ndarray:
    return np.array([id_], np.uint32)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)
