"""The bytes that ids spell, against the text itself."""

import json
import unicodedata

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from tokenizers import decoders, models, normalizers, pre_tokenizers

from MaxText.evaluation.text_bytes import InexactByteCountError, token_byte_counts
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.input_pipeline.tokenization import small_tokenizers
from tests.input_pipeline.tokenization.small_tokenizers import SAMPLE, byte_pairs, loaded
from tests.input_pipeline.tokenization.test_tiktoken_file import write as write_tiktoken


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Tokenizers of all kinds, with the bytes of their ids."""
    folder = tmp_path_factory.mktemp("exact")
    by_kind = {name: loaded(make()) for name, make in small_tokenizers.STRUCTURES.items()}
    by_kind["byte"] = load_tokenizer("byte")
    options = {"word_pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 5000}}
    by_kind["tiktoken"] = load_tokenizer(write_tiktoken(folder / "ranks.tiktoken", **options))
    return {name: (tokenizer, token_byte_counts(tokenizer)) for name, tokenizer in by_kind.items()}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=small_tokenizers.texts())
def test_ids_spell_as_many_bytes_as_the_text_has(exact, text):
    for name, (tokenizer, byte_counts) in exact.items():
        if name in ("gpt_neox", "qwen2"):  # which bring text to normal form
            text = unicodedata.normalize("NFC", text)
        (ids,) = tokenizer.encode([text])
        assert byte_counts.counts_V[ids].sum() == len(text.encode()), name
        assert not byte_counts.has_dummy_prefix_V.any()


def test_control_ids_spell_nothing(exact):
    for name, (tokenizer, byte_counts) in exact.items():
        assert len(byte_counts.counts_V) == tokenizer.entry.vocab_size
        control = sorted(tokenizer.entry.special_ids)
        assert control, name
        assert not byte_counts.counts_V[control].any()


def characters(prepends: bool) -> tokenizers.Tokenizer:
    """As Llama 2 (with a space before each text) and Gemma (without) are published."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"theoxquick", "\u2581t", "he", "\u2581the", "漢"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = [normalizers.Replace(" ", "\u2581")]
    undo = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends:
        spaces.insert(0, normalizers.Prepend("\u2581"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(undo)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


TEXTS = [*SAMPLE, " the", "the the", "  two spaces", "漢字 🙂\n\t", "x"]


def check(tokenizer, prepends):
    counts, spaced = token_byte_counts(tokenizer)
    assert spaced.any() == prepends
    for text in TEXTS:
        (ids,) = tokenizer.encode([text])
        assert counts[ids].sum() - spaced[ids[0]] == len(text.encode())
    assert not counts[[0, 1, 2]].any()


@pytest.mark.parametrize("prepends", [False, True])
def test_vocabularies_of_characters_that_fall_back_to_bytes(prepends):
    check(loaded(characters(prepends)), prepends)


def test_sentence_piece(tmp_path):
    pytest.importorskip("sentencepiece", reason="needs pip install 'jaxpretrain[data]'")
    from tests.input_pipeline.tokenization.test_sentence_piece import train

    as_it_is = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    for number, adds in enumerate((True, False)):
        model = train(tmp_path / f"{number}.model", add_dummy_prefix=adds, **as_it_is)
        check(load_tokenizer(model), adds)
    plain = train(tmp_path / "plain.model", byte_fallback=False, vocab_size=60, **as_it_is)
    for model in (train(tmp_path / "nfkc.model"), plain):
        with pytest.raises(InexactByteCountError, match="byte by byte"):
            token_byte_counts(load_tokenizer(model))


def test_where_ids_do_not_tell_the_bytes():
    word_level = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    lower, spaced, split = byte_pairs(1), byte_pairs(1), byte_pairs(1)
    split.normalizer = normalizers.NFD()
    lower.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    file_json = json.loads(byte_pairs(1, count=0).to_str())
    vocabulary = file_json["model"]["vocab"].items()
    file_json["model"]["vocab"] = {token: i for token, i in vocabulary if len(token) == 1}
    del file_json["model"]["vocab"]["A"]
    file_json["model"]["merges"] = []
    few = tokenizers.Tokenizer.from_str(json.dumps(file_json))
    for tokenizer in (word_level, lower, spaced, split, few):
        with pytest.raises(InexactByteCountError, match="byte by byte"):
            token_byte_counts(loaded(tokenizer))
