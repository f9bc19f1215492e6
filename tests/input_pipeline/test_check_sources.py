"""What is wrong with local data is said before devices are looked for."""

import pytest

from MaxText.configuration.loading import load
from MaxText.errors import UserError
from MaxText.input_pipeline import sources
from tests.input_pipeline.small_data import numbered_documents, write_data_set
from tests.programs import run as start


@pytest.fixture
def folder(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 40)})
    return tmp_path / "d"


def check(path, *arguments):
    sources.check_sources(load([f"dataset_path={path}", *arguments]).config)


def test_sound_data_pass(folder):
    check(folder, "vocab_size=50000")
    check(folder, "vocab_size=10", "dataset_type=synthetic")
    check("gs://bucket/data", "vocab_size=10")  # a bucket is not asked


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged"),
        (lambda folder: next(folder.rglob("*.array_record")).unlink(), "missing"),
    ],
)
def test_damaged_data_are_named(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message):
        check(folder, "vocab_size=50000")


def test_a_vocabulary_that_is_too_small_and_a_split_that_is_not_there(folder):
    with pytest.raises(UserError, match="vocab_size=10 is too small"):
        check(folder, "vocab_size=10")
    with pytest.raises(UserError, match="validation"):
        check(folder, "vocab_size=50000", "eval_interval=5")


def test_storage_that_fails_for_a_moment_is_left_to_the_loader(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sources, "open_token_data", fails)
    check(folder, "vocab_size=50000")


def test_it_comes_before_the_devices(tmp_path, users_environment):
    arguments = ["dataset_path=nowhere", "run_name=a", "hardware=tpu"]
    result = start("train.py", arguments, tmp_path, users_environment)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: dataset_path=nowhere: no such file")


@pytest.mark.parametrize(
    ("vocab_size", "warned"), [(50_000, False), (60_000, False), (90_000, True)]
)
def test_ids_that_no_token_has_are_told(folder, vocab_size, warned):
    lines = []
    data = load([f"dataset_path={folder}"]).config.data
    sources.open_sources(
        data,
        load([]).config.preparation,
        sources.train_entries(data),
        "train",
        length=16,
        vocab_size=vocab_size,
        num_samples=None,
        for_training=True,
        show=lines.append,
    )
    assert any("of the embedding is never used" in line for line in lines) == warned
