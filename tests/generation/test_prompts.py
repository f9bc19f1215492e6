"""Prompts from the command line, a text file and JSON lines."""

import pytest

from MaxText.configuration.loading import configure
from MaxText.errors import UserError
from MaxText.generation.prompts import read_prompts


def read(**keys):
    return read_prompts(configure(**keys).decoding)


def test_one_prompt():
    (prompt,) = read(prompt="I like")
    assert (prompt.text, prompt.fields) == ("I like", {})


def test_lines_of_a_text_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\n\n  two \u2028 same line\n".encode())
    assert [p.text for p in read(prompt_file=str(path))] == ["one", "  two \u2028 same line"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n")
    assert [p.text for p in read(prompt_file=str(path))] == ["one"]


def test_half_a_character_becomes_the_replacement(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "\\ud83d x"}\n')
    assert [p.text for p in read(prompt_file=str(path))] == ["\ufffd x"]


def test_json_lines_keep_their_fields(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\nb", "id": 7}\n')
    (prompt,) = read(prompt_file=str(path))
    assert prompt.text == "a\nb"
    assert prompt.fields["id"] == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "no line with text"),
        ("a.jsonl", '{"prompt": "a", "tokens": []}', "has the field 'tokens'"),
        ("a.jsonl", '{"prompt": 1}', 'line 1 has no text in the field "prompt"'),
        ("a.jsonl", '{"prompt": "a"}\n[', "line 2 is not JSON"),
        ("missing/a.txt", None, "cannot be read: No such file"),
    ],
)
def test_unusable_files(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read(prompt_file=str(tmp_path / name))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="no UTF-8"):
        read(prompt_file=str(tmp_path / "a.txt"))
