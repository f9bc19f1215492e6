"""The text that a tokenizer is trained on, and the digest of a corpus."""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources.corpus import Corpus, TextDocument
from MaxText.input_pipeline.prepare import sampling
from MaxText.input_pipeline.prepare.sampling import (
    HELD_OUT,
    ReadJob,
    corpus_digest,
    hashes,
    held_out_threshold,
    join_samples,
    read_shard,
    sampling_jobs,
)

KEYS = PreparationConfig(prepare_seed=3)


@dataclasses.dataclass(frozen=True)
class Texts:
    """A shard of given texts."""

    texts: tuple[str, ...]
    split: str = ""

    @property
    def num_bytes(self):
        return sum(len(text.encode()) for text in self.texts)

    def documents(self, skipped):
        for row, text in enumerate(self.texts):
            yield TextDocument(text, "texts", row)


def corpus_of(shards):
    return Corpus(description="texts", num_files=1, shards=shards)


def sample_of(corpus, validation_fraction=0.0):
    texts = [read_shard(KEYS, job) for job in sampling_jobs(corpus, KEYS.prepare_seed)]
    sample = join_samples(texts, KEYS.prepare_seed, validation_fraction)
    assert join_samples(texts[::-1], KEYS.prepare_seed, validation_fraction) == sample
    return sample


def test_a_tokenizer_learns_from_all_parts_of_the_text_but_from_no_held_out_document(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLE_BYTES", 8000)
    shards = tuple(
        Texts(tuple(f"{shard} {row} ".ljust(100, "x") for row in range(100))) for shard in range(4)
    )
    rows: list[list[int]] = [[], [], [], []]
    for text in sample_of(corpus_of(shards), validation_fraction=0.3):
        shard, row, _ = text.split()
        rows[int(shard)].append(int(row))
    for shard, sampled_rows in enumerate(rows):
        assert 8 <= len(sampled_rows) <= 20  # of 2,000 bytes, 70 %
        assert sampled_rows == sorted(sampled_rows)
        assert max(sampled_rows) > 60, "not only from the beginning"
        numbers = np.array(sampled_rows) + (shard << 40)
        assert (hashes(KEYS.prepare_seed, HELD_OUT, numbers) >= held_out_threshold(0.3)).all()


def test_at_most_so_many_shards_are_read_of_the_training_split(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLED_SHARDS", 2)
    shards = tuple(Texts(("text",), split) for split in ("train", "validation") * 3)
    jobs = sampling_jobs(corpus_of(shards), seed=0)
    assert len(jobs) == 2
    assert {shards[job.number].split for job in jobs} == {"train"}


def test_a_long_document_is_cut_between_two_characters(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLE_BYTES", 25)
    assert sample_of(corpus_of((Texts(("ä" * 100,)),))) == ("ä" * 12,)


def test_a_digest_knows_texts_and_where_they_end():
    def digest(*texts):
        shard: Any = Texts(texts)
        return read_shard(KEYS, ReadJob(0, shard)).sha256

    text = "äb".encode()
    assert digest("äb") == hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", "c", "d")}) == 4
    assert corpus_digest([digest("ab")]) == digest("ab")
    assert corpus_digest([digest("a"), digest("b")]) != corpus_digest([digest("b"), digest("a")])
