"""fastokens against the tokenizers library: the same ids, and used only where they are equal."""

from unittest import mock

import fastokens
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, models, pre_tokenizers

from tests.input_pipeline.tokenization.small_tokenizers import (
    SAMPLE,
    STRUCTURES,
    assert_same_ids,
    byte_pairs,
    gpt2,
    loaded,
    split_by,
    texts,
)


@pytest.fixture(scope="module")
def by_structure():
    tokenizers = {name: loaded(make()) for name, make in STRUCTURES.items()}
    assert {tokenizer.engine for tokenizer in tokenizers.values()} == {"fastokens"}
    return tokenizers


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
        broken, replaced = tokenizer.encode(["a\ud800b\udc00", "\ud83d\ude42"])
        expected = tokenizer.encode(["a\ufffdb\ufffd", "\U0001f642"])
        assert [broken.tolist(), replaced.tolist()] == [ids.tolist() for ids in expected]
        (exact,) = tokenizer.encode_reference(["a\ud800b\udc00"])
        assert exact.tolist() == broken.tolist()


def test_ids_do_not_depend_on_other_texts(by_structure):
    tokenizer = by_structure["gpt_neox"]
    some = [f"{i} {text}" * (i % 7) for i, text in enumerate(SAMPLE * 50)]
    one_by_one = [tokenizer.encode([text])[0].tolist() for text in some]
    assert [ids.tolist() for ids in tokenizer.encode(some)] == one_by_one
    assert tokenizer.encode([]) == []
    (nothing,) = tokenizer.encode([""])
    assert (nothing.dtype, nothing.size) == (np.uint32, 0)


def test_check_engine_finds_a_difference_and_falls_back(monkeypatch):
    engine = fastokens.Tokenizer.from_json_str(gpt2().to_str())

    def encode(texts, **options):
        return engine.encode_batch_flat([t.replace("wrong", "") for t in texts], **options)

    wrong = mock.Mock(encode_batch_flat=encode)
    monkeypatch.setattr(fastokens, "Tokenizer", mock.Mock(from_json_str=lambda _: wrong))
    tokenizer = loaded(gpt2())
    assert tokenizer.check_engine([])
    # What lies beyond the first half million characters is not compared.
    assert tokenizer.check_engine(["a" * 500_000, "wrong"])
    assert tokenizer.engine == "fastokens"
    assert not tokenizer.check_engine(["a wrong word"])
    assert tokenizer.engine == "tokenizers"
    assert_same_ids(tokenizer, ["a wrong word", *SAMPLE])


def test_an_engine_that_differs_on_anything_usual_is_never_used(monkeypatch):
    other = byte_pairs(1)
    other.pre_tokenizer = split_by(r"\S+|\s+")
    wrong = fastokens.Tokenizer.from_json_str(other.to_str())
    monkeypatch.setattr(fastokens, "Tokenizer", mock.Mock(from_json_str=lambda _: wrong))
    assert loaded(gpt2()).engine == "tokenizers"


@pytest.mark.parametrize("model", [models.WordPiece, models.Unigram, models.WordLevel])
def test_other_models_are_encoded_by_their_library(model):
    tokens = ["[UNK]", "it", "a"]
    options = {"unk_id": 0} if model is models.Unigram else {"unk_token": "[UNK]"}
    unigram = [(word, -1.0) for word in tokens]
    vocabulary = unigram if model is models.Unigram else {w: i for i, w in enumerate(tokens)}
    tokenizer = loaded(tokenizers.Tokenizer(model(vocabulary, **options)))
    assert tokenizer.engine == "tokenizers"
    assert tokenizer.encode(["it"])[0].tolist() == [1]


def with_merges(rules):
    """A tokenizer of the 256 bytes and the given merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *(a + b for a, b in rules)])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, rules))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize(
    "pattern", [r"\p{L}+|\s+", r"\s+(?!\S)|\S+", r"\S+|\s+$|\s+", r"\p{N}{1,3}+|\S|\s", r"\w+|\W"]
)
@pytest.mark.parametrize("behavior", ["isolated", "removed", "merged_with_previous"])
@pytest.mark.parametrize("invert", [False, True])
def test_same_ids_with_any_pattern(pattern, behavior, invert):
    tokenizer = with_merges([("a", "b"), ("1", "2")])
    tokenizer.pre_tokenizer = split_by(pattern, behavior, invert)
    assert_same_ids(loaded(tokenizer), ["a1 b, c'd", *SAMPLE])


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_same_ids_with_added_tokens_that_look_next_to_them(flag):
    tokenizer = with_merges([("a", "b")])
    tokenizer.add_tokens([AddedToken("<b>", **{flag: True}), AddedToken("<s>", special=True)])
    assert_same_ids(loaded(tokenizer), ["x <b> y <b>z a<b><s> <s>", *SAMPLE])
