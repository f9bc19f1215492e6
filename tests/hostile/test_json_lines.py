"""Lines of JSON, damaged at random: what can still be told of them, or a message that names the
place. Never a traceback, never a hang, never a text that cannot be written again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from MaxText.config.training_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.evaluation import tasks
from MaxText.inference.text_files import read_prompts
from MaxText.monitoring.json_lines import JsonlFile, read_rows, stream_rows
from tests.hostile.files import damaged
from tests.input_pipeline.document_sources.written_corpora import read_texts

DAMAGES = 120
TEXTS = [f'some words of text {number}, äöü 漢字 🙂 \\ " \u2028 end' for number in range(12)]
CONTENT = "".join(
    json.dumps({"step": i, "text": text, "prompt": text, "page": text}, ensure_ascii=bool(i % 2))
    + "\n"
    for i, text in enumerate(TEXTS)
).encode()

# What is put in somewhere.
_PIECES = (
    b"\0",
    b"\0" * 4096,
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n",
    b"\n\n",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"]",
    b"}",
    b'"',
    b"\\",
    b"\\ud800",
    b"\\u",
    b"9" * 5000,
    b"-" + b"9" * 400,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"null",
    b"[1, 2]\n",
    b"3\n",
    b'"x"\n',
    b"a" * 200_000,
    b'{"text": 3}\n',
    b'{"text": ["x", 3]}\n',
    b'{"text": "\\udc00\\ud800"}\n',
    b'{"text": 1e999, "prompt": -9e999, "page": 9' + b"9" * 5000 + b"}\n",
    b"{}\n",
)

READERS: dict[str, Callable[[Path], list[str]]] = {
    "prepare_source": lambda path: read_texts(path, shard_bytes=400),
    "prompt_file": lambda path: [
        prompt.text for prompt in read_prompts(DecodingConfig(prompt_file=str(path)))
    ],
    "task_files.lambada": lambda path: [a + b for a, b in tasks.read_passages(str(path))],
    "task_files.wikitext": lambda path: tasks.read_pages(str(path)),
}


@pytest.mark.parametrize("name", READERS)
def test_texts(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(CONTENT)
    assert READERS[name](path) == TEXTS
    refusals = []
    for content, at in damaged(name, CONTENT, DAMAGES, _PIECES):
        path.write_bytes(content)
        try:
            texts = READERS[name](path)
        except UserError as error:
            refusals.append(str(error))
            continue
        assert "".join(texts).encode()
        whole = content[:at].count(b"\n")
        assert texts[:whole] == TEXTS[:whole]
    assert all(path.name in message for message in refusals)
    assert DAMAGES // 10 < len(refusals) < DAMAGES


def test_the_records_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for content, at in damaged("records", CONTENT, DAMAGES, _PIECES):
        path.write_bytes(content)
        rows = read_rows(path)
        whole = content[:at].count(b"\n")
        assert [row.get("text") for row in rows[:whole]] == TEXTS[:whole]
        assert [*stream_rows(epath.Path(path))] == rows
        lines = JsonlFile(path, lambda row: True)
        lines.append({"step": 12})
        lines.close()
        # As a string, for NaN is not equal to itself.
        assert repr(read_rows(path)) == repr([*rows, {"step": 12}])
