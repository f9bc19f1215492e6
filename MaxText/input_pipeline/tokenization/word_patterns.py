"""How text is cut into words before byte pairs are joined, and which ways tiktoken cuts alike.

Imports no jax.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import tiktoken
import tokenizers
from tokenizers import pre_tokenizers

# The regular expressions of published vocabularies. GPT-2's and GPT-4's are in the form that
# tiktoken has, without backtracking where that is possible. GPT-2's cuts as its original does;
# GPT-4's keeps white space that ends a text in one word, where the original cuts it at line ends.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The bytes that occur in UTF-8 at all; a vocabulary need not have the others.
BYTES_OF_UTF8 = tuple(byte for byte in range(256) if byte not in (0xC0, 0xC1, *range(0xF5, 256)))

# tiktoken looks for its special tokens in every text, and where it has none for the empty text: at
# every character. With one that hardly occurs (it is not allowed, so it would be text) the search
# is free; without, encoding takes half as long again.
UNUSED_TOKEN = "\x00unused\x00"

# What both libraries' regular expressions read alike: named characters and sets of them, groups,
# alternatives, lookahead, greedy repetition. A second sign after a repetition (lazy, possessive)
# is left out because Oniguruma takes {1,3}+ for a repetition of the repetition, and $ because it
# means the end of a line there.
_CLASSES = ("L", "N", "M", "Lu", "Ll", "Lt", "Lm", "Lo")
_CHARACTER = rf"\\[pP]\{{(?:{'|'.join(_CLASSES)})\}}|\\[sSrnt]|[A-Za-z0-9 '/,:;<>=@~_\"!-]"
_PORTABLE = re.compile(
    rf"(?:(?:{_CHARACTER}|\[\^?(?:{_CHARACTER}|\.)+\]|\)|\||\((?:\?i:|\?:|\?!|\?=)?)"
    r"(?:(?:[?*+]|\{\d+(?:,\d*)?\})(?![?*+{]))?)+"
)

# The first characters of each version of Unicode since 13 that are letters, digits or marks. A
# library that knows an older version takes them for unassigned.
_LATELY_ASSIGNED = (
    "\u08be\u0d04\U00010e80\U00010fb0\U0001e2c0\U0001fbf0\U00030000"  # 12 and 13
    "\u0870\u0898\ua7c0\U00010570\U00010780\U0001e290\U0002b739"  # 14
    "\U00011f04\U00011f50\U00011f00\U0001e030\U0001e4d0\U00031350"  # 15
    "\U0002ebf0"  # 15.1
    "\u1c89\ua7cb\U000105c0\U00010d40\U00010d4a\U00010d69\U00016d40\U00016d70"  # 16
    "\u088f\ua7ce\U00010940\U00011db0\U00011de0\U00016ea0\U000323b0"  # 17
)

# One or more characters of every kind that a word pattern may treat in its own way.
_ALL_KINDS = (
    "aA1 \t\n\r\u00a0'.-_/<\u00df\u01c5\u02b0\u4e00\u0301\u0903\u20dd\u00b2\u2160\u20ac\u200b"
    "\u0000\ue000\u0378\U0001f642"
)


def tiktoken_pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The regular expression with which tiktoken cuts as the pre-tokenizer of a tokenizer.json.

    Returns:
      None where it could differ.
    """
    steps = _steps(pre_tokenizer or {})
    if not steps or not _same_characters():
        return None
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if last.get("use_regex", True):
        return None if before else GPT2_WORDS
    if len(before) != 1 or before[0].get("type") != "Split":
        return None
    (split,) = before
    pattern = (split.get("pattern") or {}).get("Regex")
    kept = (split.get("behavior"), bool(split.get("invert")))
    if kept not in (("Isolated", False), ("Removed", True)) or not isinstance(pattern, str):
        return None
    if not _PORTABLE.fullmatch(pattern):
        return None
    # What the pattern does not match is a word of its own for "Isolated" and dropped by tiktoken.
    return pattern if kept[1] or _matches_everything(pattern) else None


def with_runs_of_spaces(longest: int) -> str:
    """GPT2_WORDS for a vocabulary in which runs of 2 to `longest` spaces are words.

    These runs are found first and the text between them is cut as if it stood alone. So a white
    space of another word is either no space, or a space without another one behind it; and where
    such a word reaches two spaces, the lookahead sees a white space and lets it end there.
    """
    white = r"(?:[^\S ]| (?! ))"
    head, tail = GPT2_WORDS.split(r"|\s++$")
    assert tail == r"|\s+(?!\S)|\s"
    return rf" {{2,{longest}}}|{head}|{white}++$|{white}+(?!\S)|\s"


def _steps(pre_tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers", []))
    return [pre_tokenizer] if pre_tokenizer else []


@functools.lru_cache(maxsize=1)
def _same_characters() -> bool:
    """Whether both libraries know the same version of Unicode."""
    between = "\x01"
    text = between.join(_LATELY_ASSIGNED)
    for name in _CLASSES:
        pattern = rf"\p{{{name}}}"
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
        others = "".join(word for word, _ in split.pre_tokenize_str(text))
        matched = _kept_by_tiktoken(pattern, text)
        if set(matched) != set(_LATELY_ASSIGNED) - set(others):
            return False
    return True


def _matches_everything(pattern: str) -> bool:
    """Whether the pattern leaves out no character, whichever other one stands beside it."""
    text = "".join(first + second for first in _ALL_KINDS for second in _ALL_KINDS)
    alone = (first + second for first in _ALL_KINDS for second in _ALL_KINDS)
    return all(_kept_by_tiktoken(pattern, part) == part for part in (text, *alone))


def _kept_by_tiktoken(pattern: str, text: str) -> str:
    return (encoding := _byte_encoding(pattern)).decode(encoding.encode_ordinary(text))


@functools.lru_cache(maxsize=16)
def _byte_encoding(pattern: str) -> tiktoken.Encoding:
    """An encoding whose ids are the bytes of what the pattern matches."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
