"""Tokenises one unit of a corpus into part files: `encode_unit`, the work of one process.

    <folder>/000017.json            what the unit held: EncodedUnit, written last
    <folder>/000017-train.tokens    and so on, see part_files

A unit whose json is there is finished, whatever became of the process. Imports no jax.
"""

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.documents import Document, Skipped
from MaxText.input_pipeline.document_sources.shards import Shard
from MaxText.input_pipeline.preparation.cleaning import text_cleaner
from MaxText.input_pipeline.preparation.held_out import (
    TRAIN,
    VALIDATION,
    document_number,
    lowest_rank_of_training,
    ranks,
)
from MaxText.input_pipeline.preparation.part_files import Part, PartWriter
from MaxText.input_pipeline.preparation.survey import SurveyJob, SurveySettings, TextDigest
from MaxText.input_pipeline.preparation.survey import survey_unit as read_unit
from MaxText.input_pipeline.preparation.token_writer import narrowest_dtype
from MaxText.input_pipeline.sync import write_whole
from MaxText.input_pipeline.token_store.manifest import SCHEMA_VERSION
from MaxText.input_pipeline.tokenization.loading import TextTokenizer

# Text encoded at a time: enough for several threads, little enough to hold in memory (the
# tokenizers library needs some hundred bytes per token while it works).
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Recipe:
    """How text becomes ids: everything that decides about them besides the text.

    Attributes:
      tokenizer: makes the ids, with as many threads as it has.
      before, after: control ids around each document.
      seed: prepare_seed.
      validation_fraction: share of documents that are held out.
      fix_text: prepare_fix_text.
      minimum_tokens: documents of fewer ids, control ids not counted, are left out.
      is_text: whether the ids are the bytes of the text.
    """

    tokenizer: TextTokenizer
    before: tuple[int, ...]
    after: tuple[int, ...]
    seed: int
    validation_fraction: float
    fix_text: bool
    minimum_tokens: int
    is_text: bool = False

    @property
    def dtype(self) -> Literal["uint8", "uint16", "uint32"]:
        """Name of the type that ids are stored in."""
        return "uint8" if self.is_text else narrowest_dtype(self.tokenizer.entry.vocab_size)

    @property
    def stored_type(self) -> np.dtype:
        """Type of ids in part files."""
        return np.dtype(self.dtype).newbyteorder("<")

    def summary(self) -> str:
        """Everything that decides about part files besides the text, as JSON."""
        contents = {
            "schema_version": SCHEMA_VERSION,
            "tokenizer": self.tokenizer.entry.sha256,
            "vocab_size": self.tokenizer.entry.vocab_size,
            "before": self.before,
            "after": self.after,
            "seed": self.seed,
            "validation_fraction": self.validation_fraction,
            "fix_text": self.fix_text,
            "minimum_tokens": self.minimum_tokens,
            "dtype": self.dtype,
        }
        return json.dumps(contents, indent=1, sort_keys=True) + "\n"

    def with_threads(self, num_threads: int) -> "Recipe":
        """The same, with so many threads in each process."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.num_threads = num_threads
        return dataclasses.replace(self, tokenizer=tokenizer)


@dataclass(frozen=True)
class Encoding:
    """How and where all units of a corpus are encoded.

    Attributes:
      recipe: see Recipe.
      folder: of the parts.
    """

    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class EncodingJob:
    """A unit to encode.

    Attributes:
      number: of the unit in the corpus.
      unit: what to read.
      split: all its documents belong to; "" where a hash of their numbers decides.
      exceptions: (document number, whether it is held out) where the hash does not decide.
      expected_sha256: digest that its text must have; "" where it was not read before.
    """

    number: int
    unit: Shard
    split: str = ""
    exceptions: tuple[tuple[int, bool], ...] = ()
    expected_sha256: str = ""

    def splits(self, encoding: Encoding) -> list[str]:
        """Splits that its documents may belong to."""
        if self.split:
            return [self.split]
        return [TRAIN, VALIDATION] if encoding.recipe.validation_fraction > 0 else [TRAIN]


class EncodedUnit(pydantic.BaseModel):
    """What a unit held and became.

    Attributes:
      sha256: see TextDigest; of the text as it was read.
      num_bytes: UTF-8 bytes of that text.
      skipped: reason -> documents left out.
      bad: what is wrong with bad rows and files among them.
      first, last: smallest and largest (rank, document number) of the documents that are not
        left out; None without documents.
      exceptions: see EncodingJob.
      parts: split -> Part.
      processor_seconds: time that all cores together spent on it.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    sha256: str
    num_bytes: int
    skipped: dict[str, int]
    bad: tuple[str, ...] = ()
    first: tuple[int, int] | None
    last: tuple[int, int] | None
    exceptions: tuple[tuple[int, bool], ...]
    parts: dict[str, Part]
    processor_seconds: float


def finished_unit(encoding: Encoding, number: int) -> EncodedUnit | None:
    """What an earlier process made of a unit, None where it is not finished or damaged."""
    try:
        found = EncodedUnit.model_validate_json(_record(encoding, number).read_bytes())
    except (OSError, ValueError):
        return None
    parts = found.parts.values()
    whole = all(part.is_whole(encoding.folder, encoding.recipe.stored_type) for part in parts)
    return found if whole else None


def _record(encoding: Encoding, number: int) -> Path:
    return encoding.folder / f"{number:06d}.json"


def encode_unit(
    encoding: Encoding, job: EncodingJob, advance: Callable[[int], None]
) -> EncodedUnit:
    """Encodes a unit, or keeps what an earlier process made of the same text.

    Args:
      advance: takes bytes done, Shard.num_bytes in all.

    Raises:
      UserError: as Shard.documents, or the text is not what it was before.
    """
    # Text on disk may be larger or (compressed) smaller than the text in it: what is reported
    # while working stays below the whole, and the rest follows at the end.
    left = job.unit.num_bytes

    def advance_within_unit(num_bytes: int) -> None:
        nonlocal left
        num_bytes = min(num_bytes, left)
        left -= num_bytes
        advance(num_bytes)

    unit = finished_unit(encoding, job.number)
    if unit is None or not _is_of(unit, encoding, job, advance_within_unit):
        _record(encoding, job.number).unlink(missing_ok=True)
        unit = _encode(encoding, job, advance_within_unit)
        write_whole(_record(encoding, job.number), unit.model_dump_json())
    if job.expected_sha256 not in ("", unit.sha256):
        raise UserError(
            "Files of prepare_source changed while they were read. Run again when nothing writes "
            "to them."
        )
    advance(left)
    return unit


def _is_of(
    unit: EncodedUnit, encoding: Encoding, job: EncodingJob, advance: Callable[[int], None]
) -> bool:
    """Whether the unit is made of what the job asks for; reads the text, which is fast."""
    if unit.exceptions != job.exceptions or set(unit.parts) != set(job.splits(encoding)):
        return False
    survey = SurveyJob(job.number, job.unit)
    return read_unit(SurveySettings(encoding.recipe.seed), survey, advance).sha256 == unit.sha256


def _encode(encoding: Encoding, job: EncodingJob, advance: Callable[[int], None]) -> EncodedUnit:
    start = time.process_time()
    clean = text_cleaner(encoding.recipe.fix_text)
    threshold = lowest_rank_of_training(encoding.recipe.validation_fraction)
    exceptions = dict(job.exceptions)
    writers = {
        split: PartWriter(
            encoding.folder,
            f"{job.number:06d}-{split}",
            encoding.recipe.stored_type,
            encoding.recipe.before,
            encoding.recipe.after,
        )
        for split in job.splits(encoding)
    }
    digest = TextDigest()
    skipped = Skipped()
    num_bytes = index = 0
    first: tuple[int, int] | None = None
    last: tuple[int, int] | None = None
    try:
        for documents in _batches(job.unit.documents(skipped)):
            numbers = document_number(job.number, index) + np.arange(len(documents))
            index += len(documents)
            texts = [clean(document.text) for document in documents]
            ids = encoding.recipe.tokenizer.encode(texts)
            read_bytes = 0
            for document, text, ids_N, number, rank in zip(
                documents,
                texts,
                ids,
                numbers.tolist(),
                ranks(encoding.recipe.seed, numbers).tolist(),
                strict=True,
            ):
                encoded = document.text.encode()
                digest.add(encoded)
                read_bytes += len(encoded)
                if len(ids_N) < encoding.recipe.minimum_tokens or len(ids_N) == 0:
                    skipped[f"shorter than {max(encoding.recipe.minimum_tokens, 1)} tokens"] += 1
                    continue
                ranked = (rank, number)
                first = ranked if first is None else min(first, ranked)
                last = ranked if last is None else max(last, ranked)
                held_out = rank < threshold
                if exceptions:
                    held_out = exceptions.get(number, held_out)
                split = job.split or (VALIDATION if held_out else TRAIN)
                if encoding.recipe.fix_text:
                    encoded = text.encode()
                writers[split].add(ids_N, len(encoded), document.file, document.row)
            num_bytes += read_bytes
            advance(read_bytes)
        parts = {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.give_up()
        raise
    return EncodedUnit(
        sha256=digest.hexdigest(),
        num_bytes=num_bytes,
        skipped=dict(skipped),
        bad=tuple(skipped.bad),
        first=first,
        last=last,
        exceptions=job.exceptions,
        parts=parts,
        processor_seconds=time.process_time() - start,
    )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about _BATCH_CHARACTERS."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
