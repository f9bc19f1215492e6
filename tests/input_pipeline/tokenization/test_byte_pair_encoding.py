"""tiktoken against the tokenizers library: the same ids, and used only where they are."""

import json
import pickle
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from MaxText.input_pipeline.tokenization import hugging_face, word_patterns
from MaxText.input_pipeline.tokenization.byte_pair_encoding import fast_encoder
from MaxText.input_pipeline.tokenization.word_patterns import LLAMA3_WORDS, O200K_WORDS
from tests.input_pipeline.tokenization.small_tokenizers import (
    SAMPLE,
    STRUCTURES,
    assert_same_ids,
    byte_pairs,
    gpt2,
    gpt_neox,
    llama3,
    loaded,
    split_by,
    texts,
)


@pytest.fixture(scope="module")
def by_structure():
    return {name: loaded(make()) for name, make in STRUCTURES.items()}


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=texts())
def test_same_ids_on_any_text(by_structure, name, text):
    assert_same_ids(by_structure[name], [text])


@pytest.mark.parametrize("name", STRUCTURES)
def test_same_words_around_every_character(by_structure, name):
    # All of the first blocks and strides through the planes that meet all blocks of 64.
    points = [*range(0x600), *range(0x600, 0x33500, 61), *range(0xE0000, 0x110000, 9973)]
    points = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    some = [
        "".join(f"a{c}1{c} {c}b '{c}\u0301{c}\n  {c}" for c in points[i : i + 300])
        for i in range(0, len(points), 300)
    ]
    assert_same_ids(by_structure[name], [*some, *SAMPLE])


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama3"])
def test_same_ids_on_extreme_texts(by_structure, name):
    extreme = [" " * 300_000 + "x", "a" * 100_000, "\n" * 200_000 + "y", "\t " * 50_000 + "z", ""]
    assert_same_ids(by_structure[name], extreme)


def test_lone_surrogates_become_the_replacement_character(by_structure):
    for tokenizer in by_structure.values():
        broken, whole = tokenizer.encode(["a\ud800b\udc00", "\ud83d\ude42"])
        expected = tokenizer.encode(["a\ufffdb\ufffd", "\U0001f642"])
        assert broken.tolist() == expected[0].tolist()
        assert whole.tolist() == expected[1].tolist()
        (exact,) = tokenizer.encode_by_definition(["a\ud800b\udc00"])
        assert exact.tolist() == broken.tolist()


def test_runs_of_spaces_are_added_tokens(by_structure):
    tokenizer = by_structure["gpt_neox"]
    (ids,) = tokenizer.encode(["  a" + " " * 25 + "b\n" + " " * 26])
    run = {n: tokenizer._tokenizer.token_to_id(" " * n) for n in (2, 24)}
    assert [i for i in ids if i >= run[24]] == [run[2], run[24], run[24], run[2]]


def test_added_tokens_that_are_not_special_are_found(by_structure):
    tokenizer = by_structure["qwen2"]
    id_of = tokenizer._tokenizer.token_to_id
    assert [i in tokenizer.encode(["y<tool>xz"])[0] for i in map(id_of, ["<tool>", "<tool>x"])] == [
        False,
        True,
    ]
    # Normalised before the search, and not.
    assert tokenizer.encode(["e\u0301te\u0301"])[0].tolist() == [id_of("\u00e9t\u00e9")]
    assert tokenizer.encode(["e\u0301\u0301"])[0].tolist() == [id_of("e\u0301\u0301")]
    # A control token that stays text hides what overlaps it.
    assert id_of("|>x") in tokenizer.encode(["|>x"])[0]
    assert id_of("|>x") not in tokenizer.encode(["<|im_end|>x"])[0]


def test_ids_do_not_depend_on_threads_or_order(by_structure):
    tokenizer = by_structure["gpt_neox"]
    some = [f"{i} {text}" * (i % 7) for i, text in enumerate(SAMPLE * 300)]
    one_by_one = [tokenizer.encode([text])[0].tolist() for text in some]
    for num_threads in (1, 3):
        tokenizer.num_threads = num_threads
        assert [ids.tolist() for ids in tokenizer.encode(some)] == one_by_one
    tokenizer.num_threads = 1
    assert tokenizer.encode([]) == []
    (nothing,) = tokenizer.encode([""])
    assert (nothing.dtype, nothing.size) == (np.uint32, 0)


@pytest.mark.parametrize("name", STRUCTURES)
def test_pickled_without_another_proof(by_structure, name, monkeypatch):
    tokenizer = by_structure[name]
    contents = pickle.dumps(tokenizer)
    monkeypatch.setattr(hugging_face, "fast_encoder", None)
    copy = pickle.loads(contents)
    assert (copy.entry, copy.engine, copy.num_threads) == (tokenizer.entry, "tiktoken", 1)
    some = [*SAMPLE, "<|endoftext|> <|end_of_text|>", " " * 300_000 + "x"]
    assert_same_ids(copy, some)
    for ids, expected in zip(copy.encode(some), tokenizer.encode(some), strict=True):
        np.testing.assert_array_equal(ids, expected)


def test_check_engine_finds_a_difference_and_falls_back():
    tokenizer = loaded(gpt2())
    assert tokenizer.check_engine(SAMPLE)
    assert tokenizer.check_engine([])
    assert tokenizer.engine == "tiktoken"
    wrong = loaded(split(byte_pairs(1), r"\S+|\s+"))
    tokenizer._fast = wrong._fast
    # What lies beyond the first half million characters is not compared.
    beyond = ["a" * 500_000, "it's 1a2b."]
    assert tokenizer.check_engine(beyond)
    assert not tokenizer.check_engine(["it's 1a2b."])
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.check_engine(SAMPLE)
    fast, exact = tokenizer.encode(SAMPLE), tokenizer.encode_by_definition(SAMPLE)
    assert [ids.tolist() for ids in fast] == [ids.tolist() for ids in exact]


def split(tokenizer, pattern):
    tokenizer.pre_tokenizer = split_by(pattern)
    return tokenizer


def changed(tokenizer, **parts):
    """The fast encoder after replacing parts of the tokenizer.json."""
    whole = json.loads(tokenizer.to_str())
    for name, value in parts.items():
        whole[name] = {**whole[name], **value} if isinstance(whole[name], dict) else value
    return fast_encoder(tokenizers.Tokenizer.from_str(json.dumps(whole)))


def test_only_used_where_it_is_the_same():
    tokenizer = gpt2()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert changed(tokenizer) is not None
    assert changed(tokenizer, pre_tokenizer={"add_prefix_space": True}) is None
    assert changed(tokenizer, pre_tokenizer={"use_regex": False}) is None
    assert changed(tokenizer, model={"merges": merges[::-1]}) is None
    assert changed(tokenizer, model={"dropout": 0.1}) is None
    assert changed(tokenizer, model={"byte_fallback": True}) is None
    assert changed(tokenizer, normalizer={"type": "NFC"}) is not None
    assert changed(tokenizer, normalizer={"type": "NFKC"}) is None
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    assert fast_encoder(words) is None
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert fast_encoder(words) is None


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_added_tokens_that_look_around_them_are_left_to_the_library(flag):
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("<a>", special=True, **{flag: True})])
    assert fast_encoder(tokenizer) is not None
    tokenizer.add_tokens([AddedToken("<b>", **{flag: True})])
    assert fast_encoder(tokenizer) is None


def test_added_tokens_that_are_one_after_normalisation_are_left_to_the_library():
    tokenizer = gpt_neox()
    tokenizer.add_tokens(["\u00e9"])
    assert fast_encoder(tokenizer) is not None
    tokenizer.add_tokens(["e\u0301"])
    assert fast_encoder(tokenizer) is None


@pytest.mark.parametrize(
    ("pattern", "used"),
    [
        (LLAMA3_WORDS, True),
        (O200K_WORDS, True),
        (r"\S+|\s+", True),
        (r"\p{L}+|\s+", False),  # drops what it does not match
        (r"\s+(?!\S)|\S+", False),  # drops a white space before a word
        (r"\S+|\s+$|\s+", False),  # $ is also the end of a line for one library
        (r"\S++|\s+", False),
        (r"\p{N}{1,3}+|\S|\s", False),
        (r"\w+|\W", False),
    ],
)
def test_split_patterns_that_both_libraries_read_alike(pattern, used):
    assert (fast_encoder(split(byte_pairs(6, 2000), pattern)) is not None) == used


def test_split_must_keep_the_words_and_nothing_else():
    tokenizer = byte_pairs(6, 4000)
    for behavior, invert, used in (
        ("isolated", False, True),
        ("removed", True, True),
        ("removed", False, False),
        ("isolated", True, False),
        ("merged_with_previous", False, False),
    ):
        tokenizer.pre_tokenizer = split_by(LLAMA3_WORDS, behavior, invert)
        assert (fast_encoder(tokenizer) is not None) == used
    # Here what is not matched is dropped by both.
    tokenizer.pre_tokenizer = split_by(r"\p{L}+|\s+", "removed", invert=True)
    assert_same_ids(loaded(tokenizer), ["a1 b, c'd", *SAMPLE])


def test_not_used_when_the_libraries_know_different_characters(monkeypatch):
    monkeypatch.setattr(word_patterns, "_kept_by_tiktoken", lambda pattern, text: "")
    word_patterns._same_characters.cache_clear()
    try:
        assert fast_encoder(gpt2()) is None
    finally:
        word_patterns._same_characters.cache_clear()


def joining(rules, words=(), ignore_merges=False):
    """A tokenizer with the 256 bytes and the given rules, then `words` in the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *(a + b for a, b in rules), *words])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, rules, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


LETTERS = ["abcd", "abc", "bcd", "aabb", "abab", "dabcabcd", "bcbcbc", "aaaa", "aaa", "a b ab"]


def test_several_rules_for_one_token():
    rules = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c"), ("abc", "d")]
    assert_same_ids(loaded(joining(rules)), LETTERS)
    # The two rules for abc with that of another token between them.
    rules = [("b", "c"), ("a", "b"), ("a", "bc"), ("abc", "d"), ("ab", "c")]
    assert fast_encoder(joining(rules)) is None


def test_same_ids_with_any_rules():
    """Random rules over two letters, in the order of what they make or nearly so."""
    draw = random.Random(0)
    used = 0
    for _ in range(300):
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
        tokenizer = loaded(joining(rules, words, ignore_merges=draw.random() < 0.5))
        if tokenizer.engine == "tiktoken":
            used += 1
            some = ["".join(draw.choices("ab", k=draw.randint(1, 12))) for _ in range(60)]
            assert_same_ids(tokenizer, [*some, *words])
    assert 100 < used < 300


def test_a_token_that_its_own_bytes_never_become():
    # Of abc the rules leave a, bc: b, c come first. So abc is never made.
    rules = [("b", "c"), ("a", "b"), ("ab", "c")]
    tokenizer = loaded(joining(rules))
    assert_same_ids(tokenizer, LETTERS)
    # As a word of its own it is an id; and as a and bc tiktoken would join it in longer ones.
    assert fast_encoder(joining(rules, ignore_merges=True)) is None


def test_words_of_the_vocabulary_become_ids_at_once():
    rules = [("b", "c"), ("a", "b")]
    tokenizer = loaded(joining(rules, words=["dabcd", "no byte: \u4e00"], ignore_merges=True))
    assert_same_ids(tokenizer, ["dabcd", "dabcda", " dabcd", *LETTERS])
    assert tokenizer.encode(["dabcd"])[0].size == 1
    assert tokenizer._tokenizer.model.ignore_merges
    # Without the option the word is not an id.
    tokenizer = loaded(joining(rules, words=["dabcd"]))
    assert_same_ids(tokenizer, ["dabcd", *LETTERS])
    assert tokenizer.encode(["dabcd"])[0].size == 4


def test_bytes_that_no_text_has_may_be_missing():
    whole = json.loads(llama3().to_str())
    never = ["\u00c0", "\u00c1", "\u00f5"]
    vocabulary = whole["model"]["vocab"]
    whole["model"]["merges"] = [
        pair for pair in whole["model"]["merges"] if not set(never) & set("".join(pair))
    ]
    for token in [token for token in vocabulary if set(never) & set(token)]:
        del vocabulary[token]
    assert_same_ids(loaded(tokenizers.Tokenizer.from_str(json.dumps(whole))), SAMPLE)
    del vocabulary["z"]
    whole["model"]["merges"] = [p for p in whole["model"]["merges"] if "z" not in "".join(p)]
    assert fast_encoder(tokenizers.Tokenizer.from_str(json.dumps(whole))) is None


def test_runs_of_spaces_that_leave_lengths_out_are_cut_out_one_by_one():
    tokenizer = byte_pairs(2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in (8, 4)])
    tokenizer.add_special_tokens(["<|a|> "])
    runs = [" " * n + "x\n" + " " * n + "\ty" + " " * n for n in range(1, 20)]
    assert_same_ids(loaded(tokenizer), [*runs, "<|a|>     b", "<|a|>   b"])
