"""Held-out documents, digests and the sample that a tokenizer is trained on."""

import dataclasses
import hashlib

import numpy as np
import pytest

from MaxText.input_pipeline.preparation.corpus import Corpus, Document
from MaxText.input_pipeline.preparation.held_out import (
    HeldOut,
    document_number,
    lowest_rank_of_training,
    ranks,
    unit_of,
)
from MaxText.input_pipeline.preparation.survey import (
    SurveyJob,
    SurveySettings,
    corpus_digest,
    join_samples,
    sampling_jobs,
    survey_unit,
)


@dataclasses.dataclass(frozen=True)
class Texts:
    """A unit of given texts."""

    texts: tuple[str, ...]

    @property
    def num_bytes(self):
        return sum(len(text.encode()) for text in self.texts)

    def documents(self, skipped):
        del skipped
        for row, text in enumerate(self.texts):
            yield Document(text, "texts", row)


def survey_all(corpus, jobs, seed=0, fix_text=False):
    done = []
    surveys = [survey_unit(SurveySettings(seed, fix_text), job, done.append) for job in jobs]
    assert sum(done) == sum(corpus.units[job.number].num_bytes for job in jobs)
    return surveys


def splitmix(seed, number):
    """The published generator, in plain integers; held-out documents must stay the same."""
    bits = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + number) & bits
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & bits
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & bits
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & bits
        value ^= value >> 31
    return value


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_ranks_are_those_of_the_published_generator(seed):
    numbers = [0, 1, 2, 1000, document_number(5, 7)]
    assert ranks(seed, np.array(numbers)).tolist() == [splitmix(seed, n) for n in numbers]


def test_share_of_held_out_documents():
    numbers = np.arange(100_000)
    for fraction in (0.01, 0.3):
        held_out = ranks(3, numbers) < lowest_rank_of_training(fraction)
        assert held_out.mean() == pytest.approx(fraction, abs=0.005)
        one_by_one = HeldOut(3, fraction)
        assert [n in one_by_one for n in range(200)] == held_out[:200].tolist()


def test_neither_part_is_empty():
    assert 4 in HeldOut(0, 1e-9, first=4, last=2)
    assert 2 not in HeldOut(0, 0.999999, first=4, last=2)
    assert 4 not in HeldOut(0, 0.5, first=4, last=4)
    assert 4 not in HeldOut(0, 0, first=4, last=2)


def test_numbers_know_their_unit():
    assert document_number(0, 9) == 9
    assert unit_of(document_number(3, 2**40 - 1)) == 3
    assert document_number(3, 2**40 - 1) < document_number(4, 0)


def test_digest_knows_texts_and_where_they_end():
    def digest(*texts):
        corpus = Corpus("texts", 1, (Texts(texts),))
        return survey_all(corpus, [SurveyJob(0, corpus.units[0])])[0].sha256

    text = "äb".encode()
    assert digest("äb") == hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", "c", "d")}) == 4
    assert corpus_digest([digest("ab")]) == digest("ab")
    assert corpus_digest([digest("a"), digest("b")]) != corpus_digest([digest("b"), digest("a")])


def test_sample_is_spread_without_held_out_documents():
    units = tuple(
        Texts(tuple(f"unit {unit} text {row} ".ljust(100, "x") for row in range(100)))
        for unit in range(4)
    )
    corpus = Corpus("texts", 1, units)
    jobs = sampling_jobs(corpus, 0, sample_bytes=8000)
    assert [job.sample_bytes for job in jobs] == [2000] * 4
    surveys = survey_all(corpus, jobs)
    sample = join_samples(surveys, 0, 0.3, 8000)
    threshold = lowest_rank_of_training(0.3)
    for unit in range(4):
        of_unit = [text for text in sample if text.startswith(f"unit {unit} ")]
        assert 8 <= len(of_unit) <= 20
        rows = np.array([int(text.split()[3]) for text in of_unit])
        numbers = document_number(unit, 0) + rows
        assert (ranks(0, numbers) >= threshold).all()
        assert rows.tolist() == sorted(rows)
        assert rows.max() > 60, "not only from the beginning"
    assert join_samples(surveys[::-1], 0, 0.3, 8000) == sample
    few = sampling_jobs(corpus, 0, sample_bytes=8000, most_units=2)
    assert [job.sample_bytes for job in few] == [4000, 4000]
    assert few[0].number < few[1].number


def test_sample_of_one_long_document_is_cut():
    corpus = Corpus("texts", 1, (Texts(("ä" * 100, "b")),))
    jobs = sampling_jobs(corpus, 0, sample_bytes=25)
    sample = join_samples(survey_all(corpus, jobs), 0, 0.0, 25)
    assert sample in [("ä" * 12,), ("b",), ("ä" * 12, "b")]


def test_sample_is_repaired_like_the_text_will_be():
    pytest.importorskip("ftfy", reason="prepare_fix_text needs it")
    broken = "schÃ¶n"
    corpus = Corpus("texts", 1, (Texts((broken,)),))
    jobs = sampling_jobs(corpus, 0)
    surveys = survey_all(corpus, jobs, fix_text=True)
    assert join_samples(surveys, 0, 0.0) == ("schön",)
    assert surveys[0].sha256 == survey_all(corpus, jobs)[0].sha256


def test_an_empty_corpus_has_no_sample():
    corpus = Corpus("texts", 1, (Texts(()),))
    surveys = survey_all(corpus, sampling_jobs(corpus, 0))
    assert join_samples(surveys, 0, 0.5) == ()
    assert surveys[0].num_documents == 0
