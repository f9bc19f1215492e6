"""Apache Beam does the same work."""

import sys

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.preparing import prepare

from .small_corpus import byte_options, contents, cut_small, quiet, write_texts


@pytest.mark.filterwarnings("ignore")  # Beam's own, which change with each of its versions.
@pytest.mark.parametrize("beam_options", ["--runner=DirectRunner", "--direct_num_workers=2"])
def test_beam_gives_the_same_bytes(tmp_path, monkeypatch, beam_options):
    pytest.importorskip("apache_beam", reason="prepare_runner=beam needs it")
    cut_small(monkeypatch, 1500)
    write_texts(tmp_path / "text")
    for runner in ("local", "beam"):
        keys = byte_options(tmp_path / "text", prepare_runner=runner, beam_options=beam_options)
        prepare(keys, str(tmp_path / runner), quiet)
    assert contents(tmp_path / "local") == contents(tmp_path / "beam")


@pytest.mark.filterwarnings("ignore")
def test_mistakes_in_the_text_are_named(tmp_path):
    pytest.importorskip("apache_beam", reason="prepare_runner=beam needs it")
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}\n' + '{"text": "' + "x" * 600_000 + '"}\n' + '{"text": 3}\n'
    )
    keys = byte_options(tmp_path / "a.jsonl", prepare_runner="beam")
    with pytest.raises(UserError, match=r"a\.jsonl:3"):
        prepare(keys, str(tmp_path / "d"), quiet)


def test_beam_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    write_texts(tmp_path / "text", count=2)
    keys = byte_options(tmp_path / "text", prepare_runner="beam")
    with pytest.raises(UserError, match=r"pip install 'MaxText\[beam\]'"):
        prepare(keys, str(tmp_path / "d"), quiet)
