"""Tokenizers with exponential expressions, impossible ids or damage: one message, soon."""

import base64
import contextlib
import json
import random
import sys
import time

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization import tiktoken_file
from MaxText.input_pipeline.tokenization.interface import MAX_VOCAB_SIZE
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.input_pipeline.prepare.small_corpus import made, options
from tests.input_pipeline.tokenization.small_tokenizers import gpt2, split_by, write
from tests.refusals import refused

EXPONENTIAL = "(a+)+$"
LONG = "a" * 30_000 + "!"
BYTES = [f"{base64.b64encode(bytes([number])).decode()} {number}" for number in range(256)]


@pytest.mark.parametrize("kind", ["words", "normalizer"])
def test_exponential_expressions_of_hugging_face(tmp_path, capfd, kind):
    tokenizer = gpt2()
    if kind == "words":
        tokenizer.pre_tokenizer = split_by(EXPONENTIAL)
    else:
        tokenizer.normalizer = normalizers.Replace(Regex(EXPONENTIAL), "b")
    folder = write(tokenizer, tmp_path / "t")
    loaded = load_tokenizer(folder)
    start = time.monotonic()
    refused("exponential time", loaded.encode_reference, [LONG])
    encode, _ = loaded.control_token_codec()
    refused("exponential time", encode, LONG)
    (tmp_path / "text.txt").write_text(LONG)
    keys = options(tmp_path / "text.txt", tokenizer_path=str(folder))
    # Which compares both engines.
    refused("exponential time", made, keys, tmp_path / "d")
    assert time.monotonic() - start < 60
    # Not the stack trace of the library, and what others print afterwards.
    assert capfd.readouterr().err == ""
    assert loaded.encode(["b c"])[0].size
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def tiktoken_folder(folder, lines, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "v.tiktoken").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"word_pattern": "gpt2"} | settings))
    return folder


def test_exponential_expressions_of_tiktoken(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken_file, "SECONDS_PER_TEXT", 1)
    # What follows keeps the engine from searching without backtracking.
    pattern = r"(?:a|aa|aaa)+(?=b)|[\s\S]"
    tokenizer = load_tokenizer(tiktoken_folder(tmp_path, BYTES, word_pattern=pattern))
    start = time.monotonic()
    refused("exponential time", tokenizer.encode, [LONG])
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (["YWE= -5"], {}, "rank -5"),
        (["YWE= 2147483646"], {}, "has the id 2,147,483,646"),
        (["YWE= 99999999999999999999"], {}, "has the id 99,999"),
        ([], {"special_tokens": {"<a>": 2**31 - 2}}, "has the id 2,147,483,646"),
        ([], {"special_tokens": {"<a>": -1}}, "greater than or equal to 0"),
        ([], {"word_pattern": "(("}, "not a regular expression"),
        # Text that no word matches would be lost.
        ([], {"word_pattern": r"\w+"}, "matches only .* characters"),
    ],
)
def test_tiktoken_files_that_are_refused(tmp_path, lines, settings, message):
    refused(message, load_tokenizer, tiktoken_folder(tmp_path, BYTES + lines, **settings))


def test_a_tiktoken_file_without_some_bytes(tmp_path):
    refused("no token for 251 bytes", load_tokenizer, tiktoken_folder(tmp_path, BYTES[:5]))


@pytest.mark.parametrize("number", [MAX_VOCAB_SIZE, 2**31 - 2, 2**32 - 1])
@pytest.mark.parametrize("place", ["vocab", "added_tokens", "vocab.json"])
def test_huge_ids_of_hugging_face(tmp_path, number, place):
    contents = json.loads(gpt2().to_str())
    if place == "added_tokens":
        contents["added_tokens"][0]["id"] = number
    else:
        contents["model"]["vocab"]["zzz"] = number
    if place == "vocab.json":
        (tmp_path / place).write_text(json.dumps(contents["model"]["vocab"]))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    else:
        (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    start = time.monotonic()
    refused(f"has the id {number:,}", load_tokenizer, tmp_path)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "x", None, 10**30])
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "added_tokens.json"])
def test_ids_that_are_none(tmp_path, number, name):
    contents = json.loads(gpt2().to_str())
    contents["model"]["vocab"]["zzz"] = number
    vocabulary = {"a": 0, "b": 1} | ({"zzz": number} if name == "vocab.json" else {})
    if name == "tokenizer.json":
        (tmp_path / name).write_text(json.dumps(contents))
    else:
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        (tmp_path / "added_tokens.json").write_text(json.dumps({"zzz": number}))
    refused(name.split(".")[0], load_tokenizer, tmp_path)


def test_flipped_bits(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(gpt2().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    content = tokenizer.to_str().encode()
    # Mostly of what is not the vocabulary.
    places = [*range(2000), *range(len(content) - 2000, len(content))]
    draw = random.Random(0)
    for _ in range(25):
        damaged = bytearray(content)
        damaged[draw.choice(places)] ^= 1 << draw.randrange(8)
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        with contextlib.suppress(UserError):
            load_tokenizer(tmp_path).encode(["some text <|endoftext|>"])
