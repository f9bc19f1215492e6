"""Loading tokenizers of Hugging Face, and what is said about unusable paths."""

import json
import os
import pickle

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.loading import load_tokenizer, train_tokenizer
from tests.input_pipeline.tokenization.small_tokenizers import SAMPLE, assert_same_ids, write


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(SAMPLE * 5, 600, "a test")


def word_tokenizer(*control, special=True):
    """Whole words only; `control` are added tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=special) for token in control])
    return tokenizer


def test_loaded_from_folder_file_or_hub(trained, tmp_path, monkeypatch):
    trained.save(tmp_path)
    by_folder = load_tokenizer(str(tmp_path))
    by_file = load_tokenizer(str(tmp_path / "tokenizer.json"), "huggingface")
    assert by_folder.entry == by_file.entry
    assert by_folder.entry.origin == "file tokenizer.json"
    assert by_folder.entry.sha256 == trained.entry.sha256
    assert by_folder.engine == "tiktoken"
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
    with pytest.raises(UserError, match=r"hub did not give it \(ConnectionError\)"):
        load_tokenizer("another/model")


def test_loaded_from_vocabulary_and_merges(trained, tmp_path):
    """GPT-2's own two files: the same ids as its tokenizer.json."""
    tokenizer = tokenizers.Tokenizer.from_str(trained.file_text)
    tokenizer.model.save(str(tmp_path))
    by_files = load_tokenizer(str(tmp_path))
    assert by_files.entry.vocab_size == trained.entry.vocab_size
    assert by_files.entry.eos_id == by_files.entry.bos_id == 0
    assert_same_ids(by_files, SAMPLE)
    text = SAMPLE[0] + "<|endoftext|>" + SAMPLE[2]
    assert by_files.encode([text])[0].tolist() == trained.encode([text])[0].tolist()
    target = tmp_path / "saved"
    target.mkdir()
    by_files.save(target)
    assert load_tokenizer(str(target)).entry.sha256 == by_files.entry.sha256

    size = trained.entry.vocab_size
    added = {"<pad>": size + 1, "<|im_end|>": size}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    entry = load_tokenizer(str(tmp_path)).entry
    assert (entry.eos_id, entry.pad_id, entry.vocab_size) == (size, size + 1, size + 2)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 5}))
    with pytest.raises(UserError, match=f"gives '<pad>' the id {size + 5}"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(UserError, match="are not a byte-level BPE"):
        load_tokenizer(str(tmp_path))


def test_control_ids_by_name_or_by_settings(tmp_path):
    tokenizer = word_tokenizer("<s>", "</s>", "<pad>", "<|im_end|>", "<mask>", "<hide>")
    loaded = load_tokenizer(str(write(tokenizer, tmp_path / "names")))
    entry = loaded.entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id, loaded.mask_id) == (3, 4, 5, 7)
    assert entry.vocab_size == 9
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": None,
        "pad_token": "</s>",
        "mask_token": "<hide>",
        "other": 1,
    }
    loaded = load_tokenizer(str(write(tokenizer, tmp_path / "settings", settings)))
    entry = loaded.entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id, loaded.mask_id) == (3, 6, 4, 8)
    entry = load_tokenizer(str(write(word_tokenizer(), tmp_path / "none"))).entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id) == (None, None, None)


def test_saved_with_its_control_tokens(tmp_path):
    tokenizer = word_tokenizer("</s>", "<|im_end|>")
    settings = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<absent>", "other": 1}
    loaded = load_tokenizer(str(write(tokenizer, tmp_path / "t", settings)))
    target = tmp_path / "saved"
    target.mkdir()
    written = loaded.save(target)
    assert written[0].read_bytes() == (tmp_path / "t" / "tokenizer.json").read_bytes()
    assert json.loads(written[1].read_text()) == {
        "eos_token": "<|im_end|>",
        "pad_token": "<absent>",
    }
    again = load_tokenizer(str(target))
    assert again.entry == loaded.entry
    assert (again.entry.eos_id, again.entry.pad_id) == (4, None)


def test_control_tokens_in_text_stay_text(tmp_path):
    tokenizer = load_tokenizer(str(write(word_tokenizer("</s>"), tmp_path / "t")))
    assert tokenizer.engine == "tokenizers"
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert copy.encode(["a </s> b"])[0].tolist() == [0, 2, 1]
        assert copy.decode([0, 3]) == "a </s>"
    forged = write(word_tokenizer("</s>", special=False), tmp_path / "forged")
    with pytest.raises(UserError, match=r"would get the control id 3.*\"special\": true"):
        load_tokenizer(str(forged))


def test_a_control_token_that_is_a_word_alone_is_found_out(tmp_path):
    """In the middle of a text it would be other ids, at the start its own."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({"\u2581a": 0, "stop": 1, "[UNK]": 2}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    folder = write(tokenizer, tmp_path / "t", {"eos_token": "stop"})
    with pytest.raises(UserError, match="would get the control id 1"):
        load_tokenizer(str(folder))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    tokenizer = word_tokenizer("</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.normalizer = normalizers.Lowercase()
    loaded = load_tokenizer(str(write(tokenizer, tmp_path / "t")))
    assert [ids.tolist() for ids in loaded.encode(["A B a b", "a"])] == [[0, 1, 0, 1], [0]]


def test_damaged_files_are_named(tmp_path):
    for name, contents, message in (
        ("bad.json", b'{"model": 3}', "not a Hugging Face tokenizer"),
        ("cut.json", b'{"version": "1.0", "trunc', "not a Hugging Face tokenizer"),
        ("empty.json", b"", r"empty\.json is empty"),
        ("latin.json", b'{"caf\xe9": 1}', "at offset 5 is no UTF-8"),
    ):
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(tmp_path / name))
    no_words = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(UserError, match="empty vocabulary"):
        load_tokenizer(str(write(no_words, tmp_path / "none")))
    for contents, message in (("{", "is not JSON"), ("[1]", "holds a list")):
        folder = write(word_tokenizer(), tmp_path / message)
        (folder / "tokenizer_config.json").write_text(contents)
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("auto", r"tokenizer\.json, vocab\.json with merges\.txt, \.model or \.tiktoken file"),
        ("huggingface", r"tokenizer\.json, or vocab"),
        ("sentencepiece", r"SentencePiece \.model file"),
        ("tiktoken", r"\.tiktoken file"),
    ],
)
def test_folders_without_a_tokenizer(tmp_path, kind, wanted):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=f"the folder holds no {wanted}"):
        load_tokenizer(str(tmp_path), kind)


def test_a_folder_with_several_files_of_a_kind(tmp_path):
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"\x0a\x0e model")
    with pytest.raises(UserError, match=r"several tokenizers \(a.model, b.model\)"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer\.model is empty"):
        load_tokenizer(tmp_path)


def test_a_json_file_of_any_name(tmp_path):
    word_tokenizer("</s>").save(str(tmp_path / "words"))
    assert load_tokenizer(tmp_path / "words").entry.eos_id == 3
    with pytest.raises(UserError, match="line 1"):
        load_tokenizer(tmp_path / "words", "tiktoken")


def test_unusable_paths_are_named(tmp_path):
    for missing in ("absent.json", "./absent/folder", "/absent/a/b", "absent.tiktoken", ""):
        message = "no such file or folder.* or prepare the text with prepare_data.py, which trains"
        with pytest.raises(UserError, match=message):
            load_tokenizer(missing)
    with pytest.raises(UserError, match="tokenizer_type=wordpiece is unknown"):
        load_tokenizer("bytes", "wordpiece")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    folder = write(word_tokenizer(), tmp_path / "t")
    (folder / "tokenizer.json").chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        load_tokenizer(str(folder))


def test_a_regular_expression_of_exponential_time_is_one_message(tmp_path):
    plain = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    plain.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"cannot encode a text of 41 characters.*exponential time"):
        tokenizer.encode(["a" * 40 + "b"])
