"""Rows and files that cannot be read are left out and counted, up to max_bad_records."""

import gzip
import json

import pytest

from MaxText.configuration.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.preparing import prepare

LIMIT = 4


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"some text of file {number} " * 30)
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 30)
    rows = ['{"text": "a sound row"}', '{"txt": "no"}', "{bad", '{"text": "another sound row"}']
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "z.txt.gz").write_bytes(b"no gzip")
    return folder


def prepared(source, limit, lines, **keys):
    chosen = {"tokenizer_type": "byte", "prepare_num_workers": 1} | keys
    preparation = Preparation(prepare_source=str(source), **chosen)
    target = source.parent / "data"
    return prepare(preparation, str(target), lines.append, max_bad_records=limit)


@pytest.mark.parametrize(
    "keys",
    [{}, {"tokenizer_type": "auto", "tokenizer_vocab_size": 270}, {"prepare_num_workers": 2}],
    ids=["bytes", "trained tokenizer", "two processes"],
)
def test_what_is_bad_is_left_out_and_named(source, keys):
    lines = []
    manifest = prepared(source, LIMIT, lines, **keys)
    assert manifest.source.skipped == {"malformed": 2, "unreadable": 2}
    assert sum(split.num_documents for split in manifest.splits.values()) == 6
    named = [line for line in lines if line.startswith("warning: left out: ")]
    for name in ("latin.txt is not UTF-8", "rows.jsonl:2", "rows.jsonl:3", "z.txt.gz"):
        assert any(name in line for line in named), named
    assert "left out: 2 malformed, 2 unreadable" in "\n".join(lines)


def test_one_more_than_the_limit_is_an_error_that_names_the_first(source):
    with pytest.raises(UserError, match=r"more than max_bad_records=3 .*latin\.txt"):
        prepared(source, LIMIT - 1, [])
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8"):
        prepared(source, 0, [])


def test_a_limit_that_is_raised_goes_on_with_what_is_finished(source):
    with pytest.raises(UserError):
        prepared(source, LIMIT - 1, [])
    assert prepared(source, LIMIT, []) is not None


@pytest.mark.parametrize("tokenizer", ["byte", "auto"])
def test_a_file_without_one_sound_row_is_a_mistake(tmp_path, tokenizer):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"content": "words"}) + "\n" for _ in range(3)))
    with pytest.raises(UserError, match=r"fields with text: content\. Set text_field"):
        prepared(source, 100, [], tokenizer_type=tokenizer)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("preparing")] == []


def test_nothing_but_unreadable_files_leaves_nothing_behind(tmp_path):
    source = tmp_path / "latin.txt"
    source.write_bytes("caf\xe9 ".encode("latin-1"))
    with pytest.raises(UserError, match=r"no document with text .*1 unreadable.* is not UTF-8"):
        prepared(source, 100, [])
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]


def test_a_file_that_breaks_off_is_an_error(tmp_path):
    source = tmp_path / "rows.jsonl.gz"
    rows = "".join(json.dumps({"text": f"row {i} " * 50}) + "\n" for i in range(9000))
    source.write_bytes(gzip.compress(rows.encode())[:-2000])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz"):
        prepared(source, 100, [])
