"""Which document of a corpus goes into which file of an export of its text.

A first pass counts documents and bytes per unit; from the counts follow all files, so that an
export that was stopped goes on where it was. Imports no jax.
"""

import bisect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pydantic

from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.documents import Skipped
from MaxText.input_pipeline.document_sources.shards import Shard
from MaxText.input_pipeline.preparation.cleaning import text_cleaner
from MaxText.input_pipeline.preparation.held_out import (
    TRAIN,
    VALIDATION,
    HeldOut,
    document_number,
    lowest_rank_of_training,
    ranks,
)
from MaxText.input_pipeline.preparation.survey import TextDigest

# Text of a file where the number of files is not given.
_SHARD_BYTES = 256_000_000


class Ranked(pydantic.BaseModel):
    """A document with the smallest or largest rank.

    Attributes:
      rank: see held_out.ranks.
      number: see held_out.document_number.
      num_bytes: of its text.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    rank: int
    number: int
    num_bytes: int


class UnitCounts(pydantic.BaseModel):
    """What a unit holds.

    Attributes:
      num_documents: documents with text.
      num_bytes: of their text as UTF-8.
      held_out_bytes: of those whose rank is low enough for the validation split.
      first, last: documents with the smallest and the largest rank, None without documents.
      skipped: reason -> documents or files left out.
      sha256: see TextDigest; of the texts as they are written.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    num_documents: int
    num_bytes: int
    held_out_bytes: int
    first: Ranked | None
    last: Ranked | None
    skipped: dict[str, int]
    sha256: str


def unit_texts(unit: Shard, fix_text: bool, skipped: Counter[str]) -> Iterator[bytes]:
    """The texts of a unit as UTF-8, repaired if asked for; none is empty.

    Raises:
      UserError: as Shard.documents.
    """
    clean = text_cleaner(fix_text)
    for document in unit.documents(skipped):
        text = clean(document.text)
        if text and not text.isspace():
            yield text.encode()
        else:
            skipped["empty"] += 1


def count_unit(
    unit: Shard, number: int, *, seed: int, validation_fraction: float, fix_text: bool
) -> UnitCounts:
    """Reads a unit and counts.

    Args:
      number: of the unit in the corpus.

    Raises:
      UserError: as Shard.documents.
    """
    skipped = Skipped()
    digest = TextDigest()
    sizes = []
    for text in unit_texts(unit, fix_text, skipped):
        digest.add(text)
        sizes.append(len(text))
    sizes_D = np.array(sizes, np.int64)
    numbers_D = document_number(number, 0) + np.arange(sizes_D.size)
    ranks_D = ranks(seed, numbers_D)
    lowest = lowest_rank_of_training(validation_fraction)

    def ranked(index: int) -> Ranked:
        return Ranked(
            rank=int(ranks_D[index]), number=int(numbers_D[index]), num_bytes=int(sizes_D[index])
        )

    return UnitCounts(
        num_documents=sizes_D.size,
        num_bytes=int(sizes_D.sum()),
        held_out_bytes=int(sizes_D[ranks_D < lowest].sum()) if lowest else 0,
        first=ranked(int(ranks_D.argmin())) if sizes_D.size else None,
        last=ranked(int(ranks_D.argmax())) if sizes_D.size else None,
        skipped=dict(skipped),
        sha256=digest.hexdigest(),
    )


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export.

    Attributes:
      held_out: numbers of the documents of the validation split; None where the source has splits.
      bytes_before: for each split the bytes of its text before each unit, then all of it.
      num_shards: files of each split that has text.
    """

    held_out: HeldOut | None
    bytes_before: dict[str, list[int]]
    num_shards: dict[str, int]

    def shard_of(self, split: str, num_bytes_before: int) -> int:
        """The file for a document that begins after so many bytes of its split."""
        return num_bytes_before * self.num_shards[split] // self.bytes_before[split][-1]

    def first_unit(self, num_finished: dict[str, int]) -> int:
        """The first unit with a document for a file that is not finished, or how many there are.

        Args:
          num_finished: for each split how many of its files, from the first on, are finished.
        """
        units = []
        for split, before in self.bytes_before.items():
            finished = num_finished.get(split, 0)
            # The first byte of the first file that is not finished.
            byte = -(-finished * before[-1] // self.num_shards[split])
            units.append(bisect.bisect_right(before, byte) - 1)
        return min(units, default=0)


def plan_export(
    corpus: Corpus,
    counts: Sequence[UnitCounts],
    *,
    seed: int,
    validation_fraction: float,
    num_shards: int,
) -> ExportPlan:
    """Divides documents into splits, and each split into files of about as much text.

    Args:
      corpus: whose splits are kept if it has any.
      counts: of its units.
      seed, validation_fraction: which documents are held out if it has none.
      num_shards: files in all, divided by the bytes of the splits, each of which has one at
        least; 0 is one per 256 MB.
    """
    held_out = None
    if corpus.splits:
        splits = list(dict.fromkeys(corpus.splits))
        sizes = {
            split: [
                each.num_bytes if of_unit == split else 0
                for each, of_unit in zip(counts, corpus.splits, strict=True)
            ]
            for split in splits
        }
    else:
        sizes, held_out = _hold_out(counts, seed, validation_fraction)
    before = {
        split: np.cumsum([0, *of_units]).tolist()
        for split, of_units in sizes.items()
        if sum(of_units)
    }
    return ExportPlan(held_out, before, _divide(num_shards, {s: b[-1] for s, b in before.items()}))


def _hold_out(
    counts: Sequence[UnitCounts], seed: int, validation_fraction: float
) -> tuple[dict[str, list[int]], HeldOut]:
    """Bytes of each split in each unit, and which documents are held out."""
    validation = [each.held_out_bytes for each in counts]
    firsts = [(each.first, unit) for unit, each in enumerate(counts) if each.first]
    lasts = [(each.last, unit) for unit, each in enumerate(counts) if each.last]
    first, unit_of_first = min(firsts, key=lambda pair: (pair[0].rank, pair[0].number))
    last, unit_of_last = max(lasts, key=lambda pair: (pair[0].rank, pair[0].number))
    held_out = HeldOut(seed, validation_fraction, first.number, last.number)
    # By their ranks alone all documents or none might be held out.
    lowest = lowest_rank_of_training(validation_fraction)
    if (first.number in held_out) != (first.rank < lowest):
        validation[unit_of_first] += (
            first.num_bytes if first.number in held_out else (-first.num_bytes)
        )
    if last.number != first.number and last.rank < lowest:
        validation[unit_of_last] -= last.num_bytes
    train = [each.num_bytes - size for each, size in zip(counts, validation, strict=True)]
    return {TRAIN: train, VALIDATION: validation}, held_out


def _divide(num_shards: int, sizes: dict[str, int]) -> dict[str, int]:
    """Files of each split: by its bytes, one at least, `num_shards` in all where that can be."""
    if num_shards == 0:
        return {split: -(-size // _SHARD_BYTES) for split, size in sizes.items()}
    total = sum(sizes.values())
    shards = {split: max(1, num_shards * size // total) for split, size in sizes.items()}
    # What rounding down left goes to the splits that lost most by it.
    by_loss = sorted(sizes, key=lambda split: shards[split] - num_shards * sizes[split] / total)
    for split in by_loss[: max(0, num_shards - sum(shards.values()))]:
        shards[split] += 1
    return shards


def describe_units(corpus: Corpus) -> str:
    """What the units of a corpus are, to notice that a later one is another."""
    return json.dumps([[unit.num_bytes for unit in corpus.shards], list(corpus.splits)])
