"""Small tokenizers of the structures that published ones have, and texts to try them on."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer
from MaxText.input_pipeline.tokenization.tiktoken_file import (
    LLAMA3_WORDS,
    O200K_WORDS,
    UNUSED_TOKEN,
)

SAMPLE = [
    "def encode(self, text: str) -> list[int]:\n    return [ord(c) for c in text]\n" * 3,
    "The quick brown fox doesn't jump; it's 3.14159 o'clock, they'll say we've won.\n\n\n",
    "Grüße aus Zürich — 漢字とかな, русский, עברית 🙂🙃 \u00a0\u3000 \t\t x",
]

ADDED = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>x", "<tool>", "<tool>x", "|>x", "tab\t")

QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_pairs(seed: int, count: int = 12_000) -> tokenizers.Tokenizer:
    """A BPE of bytes and random pairs of bytes: wherever a word ends differently, so do its ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draw = random.Random(seed)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    everyday = sorted({level.pre_tokenize_str(c)[0][0] for c in " \n\t\r'aAbstSxe019.,<|>/"})
    merges: dict[tuple[str, str], None] = {(a, b): None for a in everyday for b in alphabet}
    while len(merges) < count:
        merges[draw.choice(alphabet), draw.choice(alphabet)] = None
    order = list(merges)
    draw.shuffle(order)
    # First what tells "'S", "xs" from "'Sxs", then what tells "'ll" from "'", "ll".
    order.sort(key=lambda pair: {"S": 0, "'": 1}.get(pair[0], 2))
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in order)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, order))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def split_by(pattern: str, behavior: str = "isolated", invert: bool = False):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior, invert=invert)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, level])


def gpt2() -> tokenizers.Tokenizer:
    tokenizer = byte_pairs(1)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def gpt_neox() -> tokenizers.Tokenizer:
    """NFC, and runs of 24 to 2 spaces as added tokens that are not special."""
    tokenizer = byte_pairs(2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    return tokenizer


def llama3() -> tokenizers.Tokenizer:
    """Words by an own pattern; words of the vocabulary become one id without any rule."""
    tokenizer = byte_pairs(3)
    tokenizer.pre_tokenizer = split_by(LLAMA3_WORDS)
    contents = json.loads(tokenizer.to_str())
    contents["model"]["ignore_merges"] = True
    for word in ("Ġthequick", "xxxaaa", "doesxx", "ÐµÐ½Ðµ"):
        contents["model"]["vocab"][word] = len(contents["model"]["vocab"])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(contents))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    return tokenizer


def qwen2() -> tokenizers.Tokenizer:
    """NFC, digits one by one, added tokens that are not special, written and normalized."""
    tokenizer = byte_pairs(4)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_by(QWEN2_WORDS)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    added = ["<tool>", "</tool>", "<tool>x", "|>x", "e\u0301\u0301"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=True) for token in ("\u00e9t\u00e9", "tab\t")]
    )
    return tokenizer


def gpt4o() -> tokenizers.Tokenizer:
    tokenizer = byte_pairs(5)
    tokenizer.pre_tokenizer = split_by(O200K_WORDS, "removed", invert=True)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


STRUCTURES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    make.__name__: make for make in (gpt2, gpt_neox, llama3, qwen2, gpt4o)
}


def loaded(tokenizer: tokenizers.Tokenizer, **settings) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tokenizer.to_str(), "a test", settings)


def write(tokenizer: tokenizers.Tokenizer, folder: Path, settings: dict | None = None) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def texts() -> st.SearchStrategy[str]:
    """Texts of words, runs of white space, added tokens, combining and any other characters."""
    pieces = "the quick| the|thequick|xxxaaa|doesxx|'ll|'LL've|'Sxs|'\u017fxs|1234567|..."
    combining = "e\u0301\u0301|\u00e9t\u00e9|e\u0301te\u0301|\u1100\u1161|\u0344|\u212b|\u0958"
    other_texts = (
        "a\u0323\u0307|q\u0307\u0323|\r\n|\n|\u00b2\u2160|\u00a0|\u3000|\u0085|\u200b|\x00"
    )
    chosen = [word for some in (pieces, combining, other_texts) for word in some.split("|")]
    piece = st.one_of(
        st.sampled_from([*chosen, *ADDED, UNUSED_TOKEN]),
        st.builds(lambda n: " " * n, st.integers(1, 60)),
        st.text(" \t\n\r\u00a0", max_size=6),
        st.text("aAbx1'", max_size=5),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    )
    return st.lists(piece, max_size=12).map("".join)


def assert_same_ids(tokenizer: HuggingFaceTokenizer, some: list[str]) -> None:
    pairs = zip(tokenizer.encode(some), tokenizer.encode_reference(some), strict=True)
    for text, (fast, exact) in zip(some, pairs, strict=True):
        np.testing.assert_array_equal(fast, exact, err_msg=repr(text[:200]))
