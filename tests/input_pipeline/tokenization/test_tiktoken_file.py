"""tiktoken files."""

import base64
import json

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from tiktoken_ext import openai_public

from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.input_pipeline.tokenization.tiktoken_file import LLAMA3_WORDS
from tests.input_pipeline.tokenization.small_tokenizers import SAMPLE, texts
from tests.refusals import refused

BYTES = [bytes([byte]) for byte in range(256)]


def pairs():
    """The bytes, and tokens of two and three of them in an order of their own."""
    everyday = [*b" \n\t'absxte01.,<|>", 0xC3, 0xA9]
    two = [bytes([a, b]) for a in everyday for b in everyday]
    return [*BYTES, *sorted(two, key=lambda token: token[::-1]), b"the", b" th", b"'ll"]


def write(path, tokens=None, **config):
    lines = [b"%s %d" % (base64.b64encode(t), i) for i, t in enumerate(tokens or pairs())]
    path.write_bytes(b"\n".join(lines) + b"\n")
    if config:
        (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """name -> (our tokenizer, tiktoken's own of that name with the same ranks)."""
    ranks = {token: i for i, token in enumerate(pairs())}
    folder = tmp_path_factory.mktemp("published")
    tokenizers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        patch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: ranks)
        for name in ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
            stated = openai_public.ENCODING_CONSTRUCTORS[name]()
            stated.pop("explicit_n_vocab", None)
            tokenizer = load_tokenizer(str(write(folder / f"{name}.tiktoken")))
            tokenizers[name] = tokenizer, tiktoken.Encoding(**stated)
    return tokenizers


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(text=texts())
def test_ids_are_those_of_tiktoken(published, text):
    for tokenizer, library in published.values():
        (ids,) = tokenizer.encode([text])
        assert ids.tolist() == library.encode_ordinary(text)
        assert tokenizer.decode(ids.tolist()) == text


def test_llama_3(tmp_path):
    tokens = [*BYTES, *(bytes([a, b, c]) for a in range(2) for b in range(250) for c in range(256))]
    tokenizer = load_tokenizer(str(write(tmp_path / "tokenizer.model", tokens[:128_000])))
    assert tokenizer.engine == "tiktoken"
    entry = tokenizer.entry
    assert (entry.vocab_size, entry.bos_id, entry.eos_id) == (128_256, 128_000, 128_001)
    library = tiktoken.Encoding(
        "x",
        pat_str=LLAMA3_WORDS,
        mergeable_ranks={b: i for i, b in enumerate(BYTES)},
        special_tokens={},
    )
    for text in SAMPLE:
        assert tokenizer.encode([text])[0].tolist() == library.encode_ordinary(text)


def test_words_and_control_tokens_by_settings(tmp_path):
    special = {"<|endoftext|>": 2000, "[MASK]": 2005, "<stop>": 2001}
    path = write(
        tmp_path / "own.tiktoken",
        word_pattern="cl100k_base",
        special_tokens=special,
        eos_token="<stop>",
    )
    tokenizer = load_tokenizer(str(path))
    entry = tokenizer.entry
    assert (entry.vocab_size, entry.eos_id, entry.bos_id, entry.pad_id) == (2006, 2001, 2000, None)
    assert tokenizer.entry.mask_id == 2005
    (ids,) = tokenizer.encode(["a<|endoftext|>[MASK]<stop>"])
    assert max(ids) < 2000
    # Ids in the gap and beyond the vocabulary have no text.
    assert tokenizer.decode([97, 2000, 1999, 5000, -1, 98]) == "a<|endoftext|>b"
    other = write(tmp_path / "own.tiktoken", word_pattern=r"\S|\s", special_tokens=special)
    assert load_tokenizer(str(other)).entry.sha256 != entry.sha256
    assert load_tokenizer(str(other)).encode(["ab"])[0].tolist() == [97, 98]


def test_long_run_of_white_space(tmp_path):
    tokenizer = load_tokenizer(str(write(tmp_path / "gpt2.tiktoken")))
    longer, short = " \n" * 150_000 + "the 's", " \n" * 20 + "the 's"
    (ids,), (few,) = tokenizer.encode([longer]), tokenizer.encode([short])
    assert tokenizer.decode(ids.tolist()) == longer
    assert ids[-3:].tolist() == few[-3:].tolist()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"YQ== 0\nYQ==\n", "base64"),
        (b"YQ== 0\n!!== 1\n", "base64"),
        (b"YQ== 0\nYQ== 1\n", "twice"),
        (b"YQ== 0\nYg== 0\n", "twice"),
    ],
)
def test_damaged_files(tmp_path, contents, message):
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(contents)
    refused(rf"gpt2\.tiktoken.*{message}", load_tokenizer, str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "word_pattern"),
        ({"word_pattern": "("}, "word_pattern"),
        ({"word_pattern": "gpt2", "special_tokens": {"<s>": 97}}, r"special_tokens.*\(97\)"),
        ({"word_pattern": "gpt2", "special_tokens": {"<s>": -1}}, "special_tokens.<s>.* 0"),
        ({"word_pattern": "gpt2", "special_tokens": ["<s>"]}, "special_tokens.* dictionary"),
    ],
)
def test_impossible_settings(tmp_path, config, message):
    refused(message, load_tokenizer, str(write(tmp_path / "own.tiktoken", **config)))
