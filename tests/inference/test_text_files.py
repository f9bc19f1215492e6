"""Prompts from the command line, a text file and JSON lines."""

import pytest

from MaxText.config.loading import load_config
from MaxText.errors import UserError
from MaxText.inference.text_files import read_prompts


def read(**keys):
    return read_prompts(load_config(**keys).decoding)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("lines.txt", "one\r\n\n  two \u2028 same line\n", ["one", "  two \u2028 same line"]),
        ("byte order mark.txt", "\ufeffone\n", ["one"]),
        ("half a character.jsonl", '{"prompt": "\\ud83d x"}\n', ["\ufffd x"]),
        ("rows.jsonl", '{"prompt": "a\\nb", "id": 7}\n', ["a\nb"]),
    ],
)
def test_prompts_of_files(tmp_path, name, content, texts):
    path = tmp_path / name
    path.write_bytes(content.encode())
    prompts = read(prompt_file=str(path))
    assert [prompt.text for prompt in prompts] == texts
    assert prompts[0].extra_fields.get("id") == (7 if name == "rows.jsonl" else None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "is empty"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"prompt": 1}', 'a.jsonl:1 has no text in field "prompt"'),
        ("a.jsonl", b'{"prompt": "a"}\n[', "a.jsonl:2 is not JSON"),
        ("missing/a.txt", None, "cannot be read: No such file"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(prompt_file=str(tmp_path / name))
