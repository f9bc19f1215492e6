"""tiktoken against the tokenizers library: the same ids, and used only where they are equal."""

import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from MaxText.input_pipeline.tokenization import hugging_face, word_patterns
from MaxText.input_pipeline.tokenization.byte_pair_encoding import fast_encoder
from MaxText.input_pipeline.tokenization.normal_form import normal_form
from MaxText.input_pipeline.tokenization.word_patterns import LLAMA3_WORDS, O200K_WORDS
from tests.input_pipeline.tokenization.small_tokenizers import (
    SAMPLE,
    STRUCTURES,
    assert_same_ids,
    byte_pairs,
    gpt2,
    llama3,
    loaded,
    split_by,
    texts,
)

NFC = normalizers.NFC()


@pytest.fixture(scope="module")
def by_structure():
    return {name: loaded(make()) for name, make in STRUCTURES.items()}


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=texts())
def test_same_ids_on_any_text(by_structure, name, text):
    assert_same_ids(by_structure[name], [text])


@pytest.mark.parametrize("name", STRUCTURES)
def test_same_ids_around_every_character(by_structure, name):
    # All of the first blocks and strides through the planes that meet all blocks of 64.
    points = [*range(0x600), *range(0x600, 0x33500, 61), *range(0xE0000, 0x110000, 9973)]
    some = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    some = [f"a{c}1{c} {c}b '{c}\u0301{c}\n  {c}" for c in some]
    some = ["".join(some[i : i + 300]) for i in range(0, len(some), 300)]
    assert_same_ids(by_structure[name], [*some, *SAMPLE, ""])


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_same_ids_on_long_runs(by_structure, name):
    runs = [" " * 300_000 + "x", "a" * 50_000, "\n" * 50_000 + "y", "\t " * 20_000 + "z"]
    assert_same_ids(by_structure[name], runs)


def test_lone_surrogates_become_the_replacement_character(by_structure):
    for tokenizer in by_structure.values():
        broken, whole = tokenizer.encode(["a\ud800b\udc00", "\ud83d\ude42"])
        expected = tokenizer.encode(["a\ufffdb\ufffd", "\U0001f642"])
        assert [broken.tolist(), whole.tolist()] == [ids.tolist() for ids in expected]
        (exact,) = tokenizer.encode_by_definition(["a\ud800b\udc00"])
        assert exact.tolist() == broken.tolist()


def test_ids_do_not_depend_on_threads_or_order(by_structure):
    tokenizer = by_structure["gpt_neox"]
    some = [f"{i} {text}" * (i % 7) for i, text in enumerate(SAMPLE * 50)]
    one_by_one = [tokenizer.encode([text])[0].tolist() for text in some]
    for num_threads in (3, 1):
        tokenizer.num_threads = num_threads
        assert [ids.tolist() for ids in tokenizer.encode(some)] == one_by_one
    assert tokenizer.encode([]) == []
    (nothing,) = tokenizer.encode([""])
    assert (nothing.dtype, nothing.size) == (np.uint32, 0)


def test_check_engine_finds_a_difference_and_falls_back(monkeypatch):
    wrong = byte_pairs(1)
    wrong.pre_tokenizer = split_by(r"\S+|\s+")
    other = fast_encoder(wrong)
    monkeypatch.setattr(hugging_face, "fast_encoder", lambda _: other)
    tokenizer = loaded(gpt2())
    assert tokenizer.check_engine([])
    # What lies beyond the first half million characters is not compared.
    assert tokenizer.check_engine(["a" * 500_000, "it's 1a2b."])
    assert tokenizer.engine == "tiktoken"
    assert not tokenizer.check_engine(["it's 1a2b."])
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.check_engine(SAMPLE)
    fast, exact = tokenizer.encode(SAMPLE), tokenizer.encode_by_definition(SAMPLE)
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in exact]


def with_merges(rules, words=(), ignore_merges=False):
    """A tokenizer of the 256 bytes and the given merges, then `words` in the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *(a + b for a, b in rules), *words])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, rules, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture(scope="module")
def base():
    return with_merges([("a", "b"), ("b", "c"), ("\u0120", "a"), ("1", "2")]).to_str()


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, True), ({"pre_tokenizer": {"add_prefix_space": True}}, False),
        ({"pre_tokenizer": {"use_regex": False}}, False), ({"model": {"dropout": 0.1}}, False),
        ({"model": {"byte_fallback": True}}, False), ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "NFKC"}}, False),
    ],
)  # fmt: skip
def test_engine_with_other_parts(base, changes, used):
    whole = json.loads(base)
    for part, values in changes.items():
        whole[part] = {**(whole[part] or {}), **values}
    changed = tokenizers.Tokenizer.from_str(json.dumps(whole))
    assert (fast_encoder(changed) is not None) == used


@pytest.mark.parametrize(
    ("pattern", "behavior", "invert", "used"),
    [
        (LLAMA3_WORDS, "isolated", False, True),
        (O200K_WORDS, "isolated", False, True),
        (r"\S+|\s+", "isolated", False, True),
        (r"\p{L}+|\s+", "isolated", False, False),  # drops what it does not match
        (r"\s+(?!\S)|\S+", "isolated", False, False),  # drops a white space before a word
        (r"\S+|\s+$|\s+", "isolated", False, False),  # $ is also the end of a line for one library
        (r"\S++|\s+", "isolated", False, False),
        (r"\p{N}{1,3}+|\S|\s", "isolated", False, False),
        (r"\w+|\W", "isolated", False, False),
        (LLAMA3_WORDS, "removed", True, True),
        (LLAMA3_WORDS, "removed", False, False),
        (LLAMA3_WORDS, "isolated", True, False),
        (LLAMA3_WORDS, "merged_with_previous", False, False),
        (r"\p{L}+|\s+", "removed", True, True),  # what is not matched is dropped by both
    ],
)
def test_engine_with_split_patterns(base, pattern, behavior, invert, used):
    tokenizer = tokenizers.Tokenizer.from_str(base)
    tokenizer.pre_tokenizer = split_by(pattern, behavior, invert)
    assert (fast_encoder(tokenizer) is not None) == used
    if used:
        assert_same_ids(loaded(tokenizer), ["a1 b, c'd", *SAMPLE])


def test_engine_with_added_tokens(base):
    for flag in ("single_word", "lstrip", "rstrip"):  # they look at the text beside them
        tokenizer = tokenizers.Tokenizer.from_str(base)
        tokenizer.add_tokens([AddedToken("<a>", special=True, **{flag: True})])
        assert fast_encoder(tokenizer) is not None
        tokenizer.add_tokens([AddedToken("<b>", **{flag: True})])
        assert fast_encoder(tokenizer) is None
    # Two tokens that are one after normalization.
    tokenizer = tokenizers.Tokenizer.from_str(base)
    tokenizer.normalizer = NFC
    tokenizer.add_tokens(["\u00e9"])
    assert fast_encoder(tokenizer) is not None
    tokenizer.add_tokens(["e\u0301"])
    assert fast_encoder(tokenizer) is None


def test_engine_where_the_libraries_know_different_characters(base, monkeypatch):
    monkeypatch.setattr(word_patterns, "_kept_by_tiktoken", lambda pattern, text: "")
    word_patterns._same_characters.cache_clear()
    try:
        assert fast_encoder(tokenizers.Tokenizer.from_str(base)) is None
    finally:
        word_patterns._same_characters.cache_clear()


def test_same_ids_with_random_merges():
    """Random merges over two letters, in the order of what they make or nearly so."""
    draw = random.Random(0)
    used = 0
    for _ in range(120):
        tokens, rules = ["a", "b"], []
        for _ in range(draw.randint(1, 9)):
            pair = draw.choice(tokens), draw.choice(tokens)
            if pair not in rules and len("".join(pair)) < 9:
                rules.append(pair)
                tokens.append("".join(pair))
        made = list(dict.fromkeys(tokens))
        if draw.random() < 0.8:
            rules.sort(key=lambda pair: made.index("".join(pair)))
        words = ["".join(draw.choices("ab", k=draw.randint(2, 6))) for _ in range(2)]
        tokenizer = loaded(with_merges(rules, words, ignore_merges=draw.random() < 0.5))
        if tokenizer.engine == "tiktoken":
            used += 1
            some = ["".join(draw.choices("ab", k=draw.randint(1, 12))) for _ in range(60)]
            assert_same_ids(tokenizer, [*some, *words])
    assert 40 < used < 120


def test_bytes_that_no_text_has_may_be_missing():
    def without(characters):
        model = whole["model"]
        model["merges"] = [pair for pair in model["merges"] if not characters & set("".join(pair))]
        model["vocab"] = {t: i for t, i in model["vocab"].items() if not characters & set(t)}
        return tokenizers.Tokenizer.from_str(json.dumps(whole))

    whole = json.loads(llama3().to_str())
    assert_same_ids(loaded(without({"\u00c0", "\u00c1", "\u00f5"})), SAMPLE)
    assert fast_encoder(without({"z"})) is None


def test_normal_form_of_every_character():
    # Stridden: blocks of ideographs and Hangul, and the planes where nothing combines.
    points = [*range(0x80, 0x3400), *range(0x3400, 0xD800, 31), *range(0xE000, 0xF900, 31)]
    points += [*range(0xF900, 0x12000), *range(0x12000, 0x20000, 7), *range(0x20000, 0x110000, 397)]
    for point in points:
        for text in (f"a{chr(point)}\u0323\u0301e\u0301", f"a\u0301{chr(point)}"):
            assert normal_form(text) == NFC.normalize_str(text), hex(point)
