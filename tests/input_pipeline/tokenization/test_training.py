"""Training a byte-level BPE."""

import json

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.loading import load_tokenizer, train_tokenizer
from tests.input_pipeline.tokenization.small_tokenizers import SAMPLE, assert_same_ids


def test_deterministic_and_bounded():
    tokenizer = train_tokenizer(SAMPLE * 5, 600, "a test")
    assert train_tokenizer(SAMPLE * 5, 600, "a test").file_text == tokenizer.file_text
    assert 257 < tokenizer.entry.vocab_size <= 600
    assert tokenizer.entry.origin == "a test"
    assert tokenizer.entry.eos_id == tokenizer.entry.bos_id == 0
    assert tokenizer.entry.pad_id is None
    assert_same_ids(tokenizer, SAMPLE)
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode(SAMPLE)] == SAMPLE


def test_the_smallest_has_the_bytes_only():
    tokenizer = train_tokenizer(SAMPLE, 257, "bytes")
    assert tokenizer.entry.vocab_size == 257
    assert len(tokenizer.encode(["漢a"])[0]) == 4
    assert train_tokenizer([], 300, "nothing").entry.vocab_size == 257


def test_special_tokens_have_the_first_ids(tmp_path):
    special = ("<end>", "<|padding|>", "[MASK]", "<unused>")
    tokenizer = train_tokenizer(SAMPLE, 300, "a test", special)
    entry = tokenizer.entry
    assert (entry.eos_id, entry.bos_id, entry.pad_id, tokenizer.mask_id) == (0, 0, 1, 2)
    text = "x" + "".join(special)
    (ids,) = tokenizer.encode([text])
    assert min(ids) >= 4
    assert tokenizer.decode([0, *ids.tolist(), 3]) == f"<end>{text}<unused>"
    written = tokenizer.save(tmp_path)
    assert [path.name for path in written] == ["tokenizer.json", "tokenizer_config.json"]
    assert written[0].read_bytes() == tokenizer.file_text.encode()
    assert json.loads(written[1].read_text()) == {"bos_token": "<end>", "eos_token": "<end>"}
    again = load_tokenizer(str(tmp_path))
    assert again.entry == entry.model_copy(update={"origin": "file tokenizer.json"})
    assert again.encode([text])[0].tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ((), "names no token"),
        (("<a>", ""), "or an empty one"),
        (("<a>", "<b>", "<a>"), "names a token twice"),
        (tuple(f"<{i}>" for i in range(45)), "Set it to 301 or more"),
        (("a",), "would get the control id"),
    ],
)
def test_special_tokens_that_cannot_be(special, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer(SAMPLE, 300, "a test", special)
