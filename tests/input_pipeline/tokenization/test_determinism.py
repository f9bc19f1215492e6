"""Tokenizers saved with dropout or sampling encode without; their copies too."""

import io
import json

import pytest
import sentencepiece
import tokenizers

from MaxText.conversion import tokenizer_copy
from MaxText.input_pipeline.tokenization.determinism import without_dropout
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.input_pipeline.prepare.small_corpus import made, options, write_texts
from tests.input_pipeline.tokenization.small_tokenizers import STRUCTURES

TEXT = "the quick brown fox doesn't jump over xxxaaa 1234567 " * 20


@pytest.fixture(params=sorted(STRUCTURES))
def folders(request, tmp_path):
    """Folders of a tokenizer without dropout, and with it."""
    exact = STRUCTURES[request.param]()
    contents = json.loads(exact.to_str())
    contents["model"]["vocab"]["dropout"] = len(contents["model"]["vocab"]) + 50
    for name, dropout in (("exact", None), ("random", 0.3)):
        contents["model"]["dropout"] = dropout
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(contents))
    return tmp_path / "exact", tmp_path / "random"


def test_dropout_is_not_used(folders):
    exact, random = (load_tokenizer(folder) for folder in folders)
    library = tokenizers.Tokenizer.from_file(str(folders[1] / "tokenizer.json"))
    assert len({tuple(library.encode(TEXT).ids) for _ in range(4)}) > 1
    expected = exact.encode([TEXT])[0].tolist()
    for _ in range(4):
        assert random.encode([TEXT])[0].tolist() == expected
        assert random.encode_reference([TEXT])[0].tolist() == expected
    assert random.engine == exact.engine
    assert not exact.notes
    assert "dropout" in random.notes[0]
    # The token of that name stays.
    assert json.loads(random.file_text)["model"]["vocab"]["dropout"]


def test_copies_have_no_dropout(folders, tmp_path):
    exact, random = folders
    expected = load_tokenizer(exact).encode([TEXT])[0].tolist()
    load_tokenizer(random).save(tmp_path)
    tokenizer_copy.export_tokenizer(random, tmp_path / "export")
    tokenizer_copy.copy_files(random, tmp_path / "copy")
    tokenizer_copy.keep_tokenizer(random, tmp_path / "run")
    tokenizer_copy.keep_tokenizer(random / "tokenizer.json", tmp_path / "other")
    for folder in (".", "export", "copy", "run/tokenizer", "other/tokenizer"):
        library = tokenizers.Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        for _ in range(4):
            assert library.encode(TEXT, add_special_tokens=False).ids == expected
    # A file without dropout is copied byte by byte.
    tokenizer_copy.copy_files(exact, tmp_path / "same")
    same = (tmp_path / "same" / "tokenizer.json").read_bytes()
    assert same == (exact / "tokenizer.json").read_bytes()


def test_the_harness_encodes_without_dropout(folders):
    exact, random = (load_tokenizer(folder) for folder in folders)
    encode, _ = random.control_token_codec()
    expected = exact.encode([TEXT])[0].tolist()
    assert [encode(TEXT) for _ in range(4)] == [expected] * 4


def test_preparation_with_dropout_is_reproducible(tmp_path):
    write_texts(tmp_path / "text")
    contents = json.loads(STRUCTURES["gpt2"]().to_str())
    contents["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    keys = options(tmp_path / "text", tokenizer_path=str(tmp_path / "tokenizer.json"))
    keys = keys.model_copy(update={"add_eos": False})
    lines = []
    first, second = (made(keys, tmp_path / name, lines.append) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint
    assert sum("BPE dropout" in line for line in lines) == 2
    assert made(keys, tmp_path / "a", lines.append) == first
    assert any(line.startswith("Kept") for line in lines)


def test_dropout_at_any_depth():
    nested = {"type": "Sequence", "models": [{"dropout": 0.1, "vocab": {"dropout": 7}}]}
    contents = {"model": nested, "dropout": 1, "post_processor": {"special_tokens": {"dropout": 1}}}
    changed = without_dropout(contents)
    assert changed["model"]["models"] == [{"dropout": None, "vocab": {"dropout": 7}}]
    assert changed["dropout"] is None
    assert changed["post_processor"] is contents["post_processor"]
    assert contents["dropout"] == 1
    unigram = {"model": {"type": "Unigram", "alpha": 0.1, "nbest_size": 8, "vocab": [["a", -1.0]]}}
    model = without_dropout(unigram)["model"]
    assert model["alpha"] is None
    assert model["nbest_size"] is None
    assert model["vocab"] is unigram["model"]["vocab"]
    for exact in (changed, {"model": {"dropout": 0.0}}, {"dropout": "word"}, [], 3):
        assert without_dropout(exact) is exact


def test_sentence_piece_does_not_sample(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 50),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    sampling = {"enable_sampling": True, "nbest_size": -1, "alpha": 0.1, "add_bos": False}
    settings = {"sp_model_kwargs": sampling, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert len({tuple(tokenizer.encode(["the quick fox"])[0]) for _ in range(20)}) == 1
    tokenizer_copy.copy_files(tmp_path, tmp_path / "copy")
    tokenizer_copy.keep_tokenizer(tmp_path, tmp_path / "run")
    for folder in ("copy", "run/tokenizer"):
        copied = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert copied == {"sp_model_kwargs": {"add_bos": False}, "eos_token": "</s>"}
