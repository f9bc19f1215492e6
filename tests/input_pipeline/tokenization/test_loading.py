"""Tokenizers of every kind: loaded, saved, trained, and what is refused."""

import json
import pickle

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from MaxText.input_pipeline.tokenization.hugging_face import train_tokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.input_pipeline.tokenization import test_tiktoken_file
from tests.input_pipeline.tokenization.small_tokenizers import SAMPLE, assert_same_ids, write
from tests.input_pipeline.tokenization.test_sentence_piece import train
from tests.refusals import refused


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(SAMPLE * 5, 600, "a test")


def word_tokenizer(*control, special=True):
    """Whole words only; `control` are added tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special) for token in control])
    return tokenizer


def control_ids(tokenizer):
    entry = tokenizer.entry
    return entry.bos_id, entry.eos_id, entry.pad_id, entry.mask_id


SETTINGS = "tokenizer_config.json"
HUGGING_FACE = ["tokenizer.json", SETTINGS]
WORD_SETTINGS = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<absent>", "other": 1}


def _words(folder):
    return load_tokenizer(write(word_tokenizer("</s>", "<|im_end|>"), folder / "t", WORD_SETTINGS))


def _tiktoken(folder):
    path, special = folder / "o200k_base.tiktoken", {"<|endoftext|>": 2000}
    return load_tokenizer(test_tiktoken_file.write(path, special_tokens=special))


@pytest.mark.parametrize(
    ("make", "files"),
    [
        (lambda _: load_tokenizer("", "byte"), [SETTINGS]),
        (lambda _: train_tokenizer(SAMPLE, 300, "x", ("<a>", "[MASK]")), HUGGING_FACE),
        (_words, HUGGING_FACE),
        (_tiktoken, ["tokenizer.tiktoken", SETTINGS]),
        (lambda folder: load_tokenizer(train(folder / "a.model")), ["tokenizer.model"]),
    ],
    ids=["bytes", "trained", "words", "tiktoken", "sentencepiece"],
)
def test_saved_loaded_and_pickled(tmp_path, make, files):
    tokenizer = make(tmp_path)
    (tmp_path / "saved").mkdir()
    assert [path.name for path in tokenizer.save(tmp_path / "saved")] == files
    loaded, copy = load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))
    assert copy.entry == tokenizer.entry
    assert loaded.entry == tokenizer.entry.model_copy(update={"origin": loaded.entry.origin})
    for other in (loaded, copy):
        assert control_ids(other) == control_ids(tokenizer)
        for ids, expected in zip(other.encode(SAMPLE), tokenizer.encode(SAMPLE), strict=True):
            assert ids.tolist() == expected.tolist()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer(text):
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids.tolist()) == text


def test_byte_tokenizer_control_ids(tmp_path):
    tokenizer = load_tokenizer("byte")
    assert tokenizer.entry.vocab_size == 259
    assert control_ids(tokenizer) == (257, 256, 258, None)
    assert tokenizer.check_engine(["any"])
    assert max(tokenizer.encode(["<eos><bos><pad>"])[0]) < 256
    assert tokenizer.decode([257, 0xC3, 104, 105, 256, 999, -1]) == "<bos>\ufffdhi<eos>"
    assert tokenizer.encode(["\ud800"])[0].tolist() == list("\ufffd".encode())
    for path in ("gpt2", str(tmp_path)):
        refused("tokenizer_", load_tokenizer, path, "byte")


def test_trained_tokenizer(trained):
    assert train_tokenizer(SAMPLE * 5, 600, "a test").file_text == trained.file_text
    assert 257 < trained.entry.vocab_size <= 600
    assert trained.entry.origin == "a test"
    assert control_ids(trained) == (0, 0, None, None)
    assert_same_ids(trained, SAMPLE)
    assert [trained.decode(ids.tolist()) for ids in trained.encode(SAMPLE)] == SAMPLE
    smallest = train_tokenizer(SAMPLE, 257, "bytes")
    assert smallest.entry.vocab_size == 257
    assert len(smallest.encode(["漢a"])[0]) == 4
    assert train_tokenizer([], 300, "nothing").entry.vocab_size == 257


def test_trained_special_tokens():
    special = ("<end>", "<|padding|>", "[MASK]", "<unused>")
    tokenizer = train_tokenizer(SAMPLE, 300, "a test", special)
    assert control_ids(tokenizer) == (0, 0, 1, 2)
    text = "x" + "".join(special)
    (ids,) = tokenizer.encode([text])
    assert min(ids) >= 4
    assert tokenizer.decode([0, *ids.tolist(), 3]) == f"<end>{text}<unused>"
    for wrong, message in (
        ((), "no token"),
        (("<a>", ""), "empty"),
        (("<a>", "<b>", "<a>"), "twice"),
        (tuple(f"<{i}>" for i in range(45)), "301"),
        (("a",), "'a'"),
    ):
        refused(message, train_tokenizer, SAMPLE, 300, "a test", wrong)


def test_loaded_from_folder_file_or_hub(trained, tmp_path, monkeypatch):
    trained.save(tmp_path)
    by_folder = load_tokenizer(str(tmp_path))
    by_file = load_tokenizer(str(tmp_path / "tokenizer.json"), "huggingface")
    assert by_folder.entry == by_file.entry
    assert by_folder.entry.origin == "file tokenizer.json"
    assert by_folder.entry.sha256 == trained.entry.sha256
    assert by_folder.engine == "fastokens"
    np.testing.assert_array_equal(by_folder.encode(SAMPLE[:1])[0], trained.encode(SAMPLE[:1])[0])

    def snapshot_download(name, allow_patterns):
        assert "tokenizer.json" in allow_patterns
        assert not any("*" in pattern for pattern in allow_patterns)
        if name == "some/model":
            return str(tmp_path)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    by_hub = load_tokenizer("some/model")
    assert by_hub.entry == by_file.entry.model_copy(update={"origin": "hub some/model"})
    refused(r"another/model.*ConnectionError", load_tokenizer, "another/model")


def test_loaded_from_vocabulary_and_merges(trained, tmp_path):
    """GPT-2's own two files: the same ids as its tokenizer.json."""
    tokenizers.Tokenizer.from_str(trained.file_text).model.save(str(tmp_path))
    by_files = load_tokenizer(str(tmp_path))
    assert by_files.entry.vocab_size == trained.entry.vocab_size
    assert control_ids(by_files) == control_ids(trained)
    assert_same_ids(by_files, SAMPLE)
    text = SAMPLE[0] + "<|endoftext|>" + SAMPLE[2]
    assert by_files.encode([text])[0].tolist() == trained.encode([text])[0].tolist()

    size = trained.entry.vocab_size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1, "<|im_end|>": size}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    entry = load_tokenizer(str(tmp_path)).entry
    assert (entry.eos_id, entry.pad_id, entry.vocab_size) == (size, size + 1, size + 2)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 5}))
    refused(rf"added_tokens\.json.*'<pad>'.* {size + 5}", load_tokenizer, str(tmp_path))
    (tmp_path / "vocab.json").write_text("[]")
    refused(r"vocab\.json", load_tokenizer, str(tmp_path))


def test_control_ids_by_name_or_by_settings(tmp_path):
    tokenizer = word_tokenizer("<s>", "</s>", "<pad>", "<|im_end|>", "<mask>", "<hide>")
    by_name = load_tokenizer(str(write(tokenizer, tmp_path / "names")))
    assert control_ids(by_name) == (3, 4, 5, 7)
    assert by_name.entry.vocab_size == 9
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": None,
        "pad_token": "</s>",
        "mask_token": "<hide>",
        "other": 1,
    }
    by_settings = load_tokenizer(str(write(tokenizer, tmp_path / "settings", settings)))
    assert control_ids(by_settings) == (3, 6, 4, 8)
    without = load_tokenizer(str(write(word_tokenizer(), tmp_path / "none")))
    assert control_ids(without) == (None, None, None, None)


def test_control_tokens_in_text_stay_text(tmp_path):
    tokenizer = load_tokenizer(str(write(word_tokenizer("</s>"), tmp_path / "t")))
    assert tokenizer.engine == "tokenizers"
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert copy.encode(["a </s> b"])[0].tolist() == [0, 2, 1]
        assert copy.decode([0, 3]) == "a </s>"
    forged = write(word_tokenizer("</s>", special=False), tmp_path / "forged")
    refused("control id 3", load_tokenizer, str(forged))
    # In the middle of a text this one would be other ids, at the start its own.
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"\u2581a": 0, "stop": 1, "?": 2}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    stop = write(tokenizer, tmp_path / "stop", {"eos_token": "stop"})
    refused("control id 1", load_tokenizer, str(stop))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    tokenizer = word_tokenizer("</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.normalizer = normalizers.Lowercase()
    loaded = load_tokenizer(str(write(tokenizer, tmp_path / "t")))
    assert [ids.tolist() for ids in loaded.encode(["A B a b", "a"])] == [[0, 1, 0, 1], [0]]


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"tokenizer.json": b'{"version": "1.0", "trunc'}, "auto", r"tokenizer\.json"),
        ({"tokenizer.json": b""}, "auto", r"tokenizer\.json is empty"),
        ({"tokenizer.json": b'{"caf\xe9": 1}'}, "auto", r"tokenizer\.json .*UTF-8 at offset 5"),
        ({"tokenizer_config.json": b"{", "tokenizer.json": None}, "auto", "config.* not JSON"),
        ({"tokenizer_config.json": b"[1]", "tokenizer.json": None}, "auto", "config.* a list"),
        ({"notes.txt": b"x"}, "auto", r"tokenizer.json, merges.txt, .*\.tiktoken, tokenizer.model"),
        ({"notes.txt": b"x"}, "tiktoken", r"\.tiktoken"),
        ({"a.model": b"\x0a\x0e", "tokenizer.model": b""}, "auto", r"tokenizer\.model is empty"),
    ],
)
def test_unusable_folders(tmp_path, files, kind, message):
    for name, content in files.items():
        content = word_tokenizer().to_str().encode() if content is None else content
        (tmp_path / name).write_bytes(content)
    refused(message, load_tokenizer, str(tmp_path), kind)


def test_missing_paths(tmp_path, monkeypatch, told):
    monkeypatch.chdir(tmp_path)
    for path in ("absent.json", "./absent/folder", "/absent/a/b", "a.tiktoken", ""):
        caught = refused(f"tokenizer_path={path}: no such file", load_tokenizer, path)
    told(caught)
