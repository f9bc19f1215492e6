"""The tokenizer of bytes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.loading import load_tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_are_the_bytes(text):
    tokenizer = load_tokenizer("bytes", num_threads=1)
    (ids,) = tokenizer.encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids.tolist()) == text


def test_entry_and_control_ids():
    tokenizer = load_tokenizer("byte")
    entry = tokenizer.entry
    assert (entry.vocab_size, entry.eos_id, entry.bos_id, entry.pad_id) == (259, 256, 257, 258)
    assert tokenizer.mask_id is None
    assert tokenizer.check_engine(["any"])
    assert max(tokenizer.encode(["<eos><bos><pad>"])[0]) < 256
    assert tokenizer.decode([257, 0xC3, 104, 105, 256, 999, -1]) == "<bos>\ufffdhi<eos>"
    assert tokenizer.encode(["\ud800"])[0].tolist() == list("\ufffd".encode())


def test_saved_and_loaded_and_pickled(tmp_path):
    tokenizer = load_tokenizer("", "byte")
    (written,) = tokenizer.save(tmp_path)
    assert written.read_text() == '{\n  "tokenizer_type": "byte"\n}\n'
    for again in (load_tokenizer(str(tmp_path)), pickle.loads(pickle.dumps(tokenizer))):
        assert again.entry == tokenizer.entry
        assert again.encode(["é"])[0].tolist() == [0xC3, 0xA9]


def test_a_path_with_type_byte_is_refused(tmp_path):
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(UserError, match="Set tokenizer_path=bytes"):
        load_tokenizer(str(tmp_path / "some.json"), "byte")
    with pytest.raises(UserError, match="no such file or folder"):
        load_tokenizer("gpt2", "byte")
    with pytest.raises(UserError, match=r"holds no tokenizer_config\.json with"):
        load_tokenizer(str(tmp_path), "byte")
