"""SentencePiece models."""

import io
import json
import sys

import pytest
import sentencepiece

from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.refusals import refused


def train(path, **options):
    contents = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog's 漢字"] * 20),
        model_writer=contents,
        **{"vocab_size": 300, "byte_fallback": True, "model_type": "bpe"} | options,
        minloglevel=2,
    )
    path.write_bytes(contents.getvalue())
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train(tmp_path_factory.mktemp("model") / "tokenizer.model", control_symbols="[MASK]")


TEXTS = [
    "the quick fox",
    "  two  spaces\n",
    "漢字 🙂 é\x00",
    "",
    "</s><s><unk>[MASK]<0x41>",
    "a" * 5000,
]


def test_ids_are_the_librarys(model):
    tokenizer = load_tokenizer(str(model))
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert tokenizer.engine == "sentencepiece"
    for text, ids in zip(TEXTS * 10, tokenizer.encode(TEXTS * 10), strict=True):
        assert ids.tolist() == library.encode(text)
        assert tokenizer.decode(ids.tolist()) == library.decode(library.encode(text))
    assert tokenizer.encode(["\ud800"])[0].tolist() == library.encode("\ufffd")
    assert tokenizer.check_engine(TEXTS)


def test_control_ids_and_byte_fallback(model):
    tokenizer = load_tokenizer(str(model))
    entry = tokenizer.entry
    assert (entry.bos_id, entry.eos_id, entry.pad_id, entry.mask_id) == (1, 2, None, 3)
    assert entry.vocab_size == 300
    assert not {0, 1, 2, 3} & set(tokenizer.encode(["a </s> <s> <unk> [MASK]"])[0].tolist())
    (ids,) = tokenizer.encode(["x 🙂 ü"])
    assert tokenizer.decode([1, *ids.tolist(), 2, 10_000, -1]) == "x 🙂 ü"


def test_control_ids_by_settings(tmp_path):
    train(tmp_path / "spiece.model", control_symbols="<stop>,<fill>", pad_id=-1)
    settings = {"eos_token": "<stop>", "pad_token": {"content": "<fill>"}, "bos_token": "<absent>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    entry = load_tokenizer(str(tmp_path)).entry
    assert (entry.eos_id, entry.pad_id, entry.bos_id) == (3, 4, None)
    # Text can spell a user-defined symbol.
    train(tmp_path / "spiece.model", user_defined_symbols="<stop>")
    refused(r"'<stop>'.* 3", load_tokenizer, str(tmp_path))


def test_damaged_or_missing(model, tmp_path, monkeypatch):
    (tmp_path / "bad.model").write_bytes(b"\x00garbage")
    refused(r"bad\.model", load_tokenizer, str(tmp_path / "bad.model"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(r"jaxpretrain\[data\]", load_tokenizer, str(model))
