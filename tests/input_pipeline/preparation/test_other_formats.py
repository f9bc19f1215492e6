"""Records for other programs are made through a data set, which nothing is left of."""

import json

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.preparation import record_export
from MaxText.input_pipeline.preparation.preparing import prepare

from .small_corpus import byte_options, contents, quiet


@pytest.fixture
def text(tmp_path):
    rows = [{"text": f"row {row}"} for row in range(5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(text, **keys):
    return byte_options(text, validation_fraction=0, prepare_output_format="tfrecord", **keys)


def test_token_records(text, tmp_path):
    manifest = prepare(asked(text), str(tmp_path / "d"), quiet)
    assert manifest is not None
    (path,) = (tmp_path / "d").glob("*.tfrecords")
    ids = [tf_example.decode(record)["text"] for record in tfrecord.read_records(str(path))]
    assert [bytes(list(each[:-1])).decode() for each in ids] == [f"row {row}" for row in range(5)]
    assert [each[-1] for each in ids] == [256] * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "rows.jsonl"]


def test_records_are_kept_and_others_refused(text, tmp_path):
    prepare(asked(text), str(tmp_path / "d"), quiet)
    before = contents(tmp_path / "d")
    lines = []
    prepare(asked(text), str(tmp_path / "d"), lines.append)
    assert lines[-1].startswith("Kept")
    with pytest.raises(UserError, match="prepare_record was 'documents' and is 'chunks'"):
        prepare(asked(text, prepare_record="chunks"), str(tmp_path / "d"), quiet)
    with pytest.raises(UserError, match="exists and is no data set of the kind"):
        prepare(byte_options(text), str(tmp_path / "d"), quiet)
    assert contents(tmp_path / "d") == before


def test_what_a_stopped_export_wrote_is_used_for_the_same_records_only(text, tmp_path, monkeypatch):
    export = record_export.export_records

    def write_then_stop(*arguments):
        export(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(record_export, "export_records", write_then_stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(asked(text, prepare_num_shards=2), str(tmp_path / "d"), quiet)
    assert not (tmp_path / "d").exists()
    written = tmp_path / ".d.preparing" / "records"
    assert len(list(written.glob("*.tfrecords"))) == 2
    lines = []
    prepare(asked(text, prepare_num_shards=3), str(tmp_path / "d"), lines.append)
    assert len(list((tmp_path / "d").glob("*.tfrecords"))) == 3
    assert lines[0] == "Going on: 1 of 1 parts were finished before"


def test_text_records_know_no_tokenizer(text, tmp_path):
    keys = byte_options(text, prepare_output_format="text_tfrecord", validation_fraction=0)
    assert prepare(keys, str(tmp_path / "d"), quiet) is None
    (path,) = (tmp_path / "d").glob("*.tfrecord")
    texts = [tf_example.decode(record)["text"] for record in tfrecord.read_records(str(path))]
    assert texts == [[f"row {row}".encode()] for row in range(5)]
