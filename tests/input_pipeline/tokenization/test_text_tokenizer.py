"""Training and loading tokenizers, their control ids, and tiktoken against tokenizers."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization import text_tokenizer
from MaxText.input_pipeline.tokenization.byte_pair_encoding import fast_encoder
from MaxText.input_pipeline.tokenization.text_tokenizer import load_tokenizer, train_tokenizer

SAMPLE = [
    "def encode(self, text: str) -> list[int]:\n    return [ord(c) for c in text]\n" * 3,
    "The quick brown fox doesn't jump; it's 3.14159 o'clock, they'll say we've won.\n\n\n",
    "Grüße aus Zürich — 漢字とかな, русский, עברית 🙂🙃 \u00a0\u3000 \t\t x",
]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(SAMPLE * 5, 600, "a test")


def save(tokenizer, folder, settings=None):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def word_tokenizer(*control, special=True):
    """Whole words only; `control` are added tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special) for token in control])
    return tokenizer


def random_texts(seed, count=200):
    """Texts that mix words, spaces, digits, rare and unassigned characters."""
    rng = np.random.default_rng(seed)
    common = [*"  etaoin0123456789.,'\n\t-", "'ll", "<|endoftext|>", "  ", " the", "漢", "🙂"]
    texts = []
    for _ in range(count):
        rare = [chr(c) for c in rng.integers(32, 0x110000, 30) if not 0xD800 <= c < 0xE000]
        texts.append("".join(rng.choice([*common, *rare, *common], rng.integers(1, 200))))
    return texts


def test_training_is_deterministic_and_bounded(trained):
    assert train_tokenizer(SAMPLE * 5, 600, "a test").file_text == trained.file_text
    assert 257 < trained.entry.vocab_size <= 600
    assert trained.entry.eos_id == trained.entry.bos_id == 0
    assert trained.entry.pad_id is None
    assert train_tokenizer(SAMPLE, 257, "bytes").entry.vocab_size == 257


@pytest.mark.parametrize("seed", range(3))
def test_tiktoken_gives_the_same_ids(trained, seed):
    assert trained.engine == "tiktoken"
    texts = random_texts(seed) + SAMPLE
    for fast, exact in zip(trained.encode(texts), trained.encode_by_definition(texts), strict=True):
        np.testing.assert_array_equal(fast, exact)


def test_tiktoken_cuts_words_alike_around_every_character(trained):
    # Every assigned plane in strides that meet all blocks of 64 characters.
    points = [*range(0x3000), *range(0x3000, 0x110000, 61)]
    points = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    texts = ["".join(f"a{c}1{c} {c}b " for c in points[i : i + 500]) for i in range(0, 30000, 500)]
    for fast, exact in zip(trained.encode(texts), trained.encode_by_definition(texts), strict=True):
        np.testing.assert_array_equal(fast, exact)


@pytest.mark.parametrize("text", [" " * 300_000 + "x", "a" * 100_000, "\n" * 200_000 + "y"])
def test_extreme_texts(trained, text):
    (fast,), (exact,) = trained.encode([text]), trained.encode_by_definition([text])
    np.testing.assert_array_equal(fast, exact)


def test_tiktoken_is_only_used_where_it_is_the_same(trained):
    def changed(change):
        whole = json.loads(trained.file_text)
        change(whole)
        return fast_encoder(tokenizers.Tokenizer.from_str(json.dumps(whole)))

    assert changed(lambda whole: None) is not None
    assert changed(lambda whole: whole["model"].update(ignore_merges=True)) is None
    assert changed(lambda whole: whole["pre_tokenizer"].update(add_prefix_space=True)) is None
    assert changed(lambda whole: whole["pre_tokenizer"].update(use_regex=False)) is None
    assert changed(lambda whole: whole["model"]["merges"].reverse()) is None
    assert changed(lambda whole: whole.update(normalizer={"type": "NFC"})) is None
    assert fast_encoder(word_tokenizer("</s>")) is None


def test_loaded_from_folder_file_or_hub(trained, tmp_path, monkeypatch):
    tokenizer = tokenizers.Tokenizer.from_str(trained.file_text)
    folder = save(tokenizer, tmp_path / "t")
    by_folder = load_tokenizer(str(folder))
    by_file = load_tokenizer(str(folder / "tokenizer.json"))
    assert by_folder.entry == by_file.entry
    assert by_folder.entry.eos_id == 0
    assert by_folder.engine == "tiktoken"
    np.testing.assert_array_equal(by_folder.encode(SAMPLE[:1])[0], trained.encode(SAMPLE[:1])[0])

    class Hub:
        from_str = tokenizers.Tokenizer.from_str

        @staticmethod
        def from_pretrained(name):
            if name == "some/model":
                return tokenizer
            raise ConnectionError("no route to host")

    monkeypatch.setattr(text_tokenizer.tokenizers, "Tokenizer", Hub)
    assert load_tokenizer("some/model").entry.origin == "hub some/model"
    with pytest.raises(UserError, match=r"hub did not give it \(ConnectionError\)"):
        load_tokenizer("another/model")


def test_control_ids_by_name_or_by_settings(tmp_path):
    tokenizer = word_tokenizer("<s>", "</s>", "<pad>", "<|im_end|>")
    entry = load_tokenizer(str(save(tokenizer, tmp_path / "names"))).entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id) == (3, 4, 5)
    assert entry.vocab_size == 7
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "pad_token": "</s>"}
    entry = load_tokenizer(str(save(tokenizer, tmp_path / "settings", settings))).entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id) == (3, 6, 4)
    entry = load_tokenizer(str(save(word_tokenizer(), tmp_path / "none"))).entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id) == (None, None, None)


def test_control_tokens_in_text_stay_text(tmp_path):
    tokenizer = load_tokenizer(str(save(word_tokenizer("</s>"), tmp_path / "t")))
    (ids,) = tokenizer.encode(["a </s> b"])
    assert ids.tolist() == [0, 2, 1]
    with pytest.raises(UserError, match="would get the control id 3"):
        load_tokenizer(str(save(word_tokenizer("</s>", special=False), tmp_path / "forged")))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    tokenizer = word_tokenizer("</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.normalizer = normalizers.Lowercase()
    loaded = load_tokenizer(str(save(tokenizer, tmp_path / "t")))
    assert [ids.tolist() for ids in loaded.encode(["A B a b", "a"])] == [[0, 1, 0, 1], [0]]


def test_unusable_paths_are_named(tmp_path):
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="not a Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    for missing in ("absent.json", "./absent/folder", "/absent/a/b"):
        with pytest.raises(UserError, match="no such file or folder"):
            load_tokenizer(missing)
