"""Writes the text of a corpus as records, one per document: `export_text`.

    <folder>/
      export.json                          what was asked for, counts, and the finished files
      train_data_00000.array_record        tf.train.Example {"text": bytes}; or .tfrecord
      validation_data_00000.array_record

Files appear under their names when they are complete and on disk. An export that was stopped at
any moment goes on with the same command, and gives the same bytes. Imports no jax.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import pydantic

from MaxText.configuration.data_sections import Preparation
from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.input_pipeline.cores import num_cores
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.shards import Shard
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.preparation import building_lock, work_processes
from MaxText.input_pipeline.preparation.array_record_writer import ArrayRecordWriter
from MaxText.input_pipeline.preparation.building import BYTES_READ_WORTH_A_PROCESS, Workers
from MaxText.input_pipeline.preparation.export_plan import (
    ExportPlan,
    UnitCounts,
    count_unit,
    describe_units,
    plan_export,
    unit_texts,
)
from MaxText.input_pipeline.preparation.held_out import (
    TRAIN,
    VALIDATION,
    document_number,
    lowest_rank_of_training,
    ranks,
)
from MaxText.input_pipeline.preparation.progress import show_progress
from MaxText.input_pipeline.preparation.survey import TextDigest
from MaxText.input_pipeline.preparation.unwritable import cannot_write
from MaxText.input_pipeline.sync import (
    WRITING_SUFFIX,
    publish,
    sync_file,
    write_whole,
    writing_name,
)

LEDGER_NAME = "export.json"
TEXT_FEATURE = "text"

_ENDINGS = MappingProxyType({"text_tfrecord": "tfrecord", "text_array_record": "array_record"})

# The keys whose change makes another export.
_KEYS = (
    "prepare_output_format",
    "text_field",
    "validation_fraction",
    "prepare_seed",
    "prepare_fix_text",
    "prepare_num_shards",
    "prepare_name",
)


class FinishedFile(pydantic.BaseModel):
    """A file that is complete.

    Attributes:
      file: its name.
      split: part of the data that it belongs to.
      num_documents: records in it.
      num_text_bytes: UTF-8 bytes of text in them.
      num_bytes: size of the file.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    file: str
    split: str
    num_documents: int
    num_text_bytes: int
    num_bytes: int


class Ledger(pydantic.BaseModel):
    """The contents of export.json.

    Attributes:
      schema_version: layout of this file.
      keys: preparation keys that the export was made with.
      units_sha256: of the sizes of the units of the corpus.
      units: what each of them holds.
      files: the finished ones, in the order in which they were finished.
      complete: whether these are all.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: Literal[2] = 2
    keys: dict[str, Any]
    units_sha256: str
    units: list[UnitCounts] = []
    files: list[FinishedFile] = []
    complete: bool = False


def export_text(
    corpus: Corpus, preparation: Preparation, folder: Path, show: Callable[[str], None]
) -> Ledger:
    """Writes all documents of a corpus, or what an earlier call that was stopped has left.

    Splits that the source has are kept; of any other a part is held out, as in a data set of
    tokens. Documents keep their order.

    Args:
      corpus: what to write.
      preparation: prepare_output_format is text_tfrecord or text_array_record.
      folder: local folder to write to, made if it is missing.
      show: takes lines about what was done.

    Returns:
      What the export holds.

    Raises:
      UserError: text cannot be read, the folder holds something else or cannot be written to, or
        the text changed meanwhile.
    """
    assert preparation.prepare_output_format in _ENDINGS, preparation.prepare_output_format
    name = preparation.prepare_name
    if name and Path(name).name != name:
        raise UserError(
            f"prepare_name={name} is no plain name: it begins the names of files in dataset_path. "
            "Leave out its folders."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with building_lock.hold(folder.with_name(f".{folder.name}.lock"), show):
            return _Export(corpus, preparation, folder, show).run()
    except OSError as error:
        raise cannot_write(folder, error) from error


class _Writer(Protocol):
    def write(self, record: bytes) -> None: ...

    def close(self) -> None: ...


class _Export:
    """One call of export_text."""

    def __init__(
        self, corpus: Corpus, preparation: Preparation, folder: Path, show: Callable[[str], None]
    ):
        self._corpus = corpus
        self._preparation = preparation
        self._folder = folder
        self._show = show
        self._skipped: Counter[str] = Counter()
        values = preparation.model_dump(mode="json")
        sizes = hashlib.sha256(describe_units(corpus).encode()).hexdigest()
        self._ledger = Ledger(keys={key: values[key] for key in _KEYS}, units_sha256=sizes)

    def run(self) -> Ledger:
        found = self._ledger_of_earlier_call()
        # All text is read again even where files are finished: it may have been edited without a
        # change of its size.
        self._ledger.units = self._count_units()
        if found is not None:
            self._take_up(found)
        if self._ledger.complete:
            self._show(f"Kept {self._folder}: it already holds this text with these options")
            return self._ledger
        self._save()
        plan = self._plan()
        for leftover in self._folder.glob(f"*{WRITING_SUFFIX}"):
            leftover.unlink()
        self._write(plan)
        self._ledger.complete = True
        self._save()
        self._report()
        return self._ledger

    def _ledger_of_earlier_call(self) -> Ledger | None:
        """What an earlier call of the same request left.

        Raises:
          UserError: the folder holds something else.
        """
        path = self._folder / LEDGER_NAME
        if not path.exists():
            others = [p.name for p in self._folder.iterdir() if p.suffix != WRITING_SUFFIX]
            if others:
                raise UserError(
                    f"{self._folder} exists and holds no {LEDGER_NAME}, but {sorted(others)[0]}. "
                    "Choose another folder, or delete it."
                )
            return None
        try:
            found = Ledger.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise UserError(
                f"{path} is damaged, or of another version ({str(error).splitlines()[0]}). Delete "
                f"{self._folder} and run the same command again."
            ) from error
        differences = [
            f"{key} was {found.keys.get(key)!r} and is {value!r}"
            for key, value in self._ledger.keys.items()
            if found.keys.get(key) != value
        ]
        if found.units_sha256 != self._ledger.units_sha256:
            differences.append("its text had files of other sizes")
        if differences:
            raise self._holds_another("; ".join(differences))
        return found

    def _holds_another(self, difference: str) -> UserError:
        return UserError(
            f"{self._folder} holds another export: {difference}. Choose another folder, or delete "
            "it."
        )

    def _take_up(self, found: Ledger) -> None:
        """Goes on from the ledger of an earlier call.

        Raises:
          UserError: it is of other text.
        """
        if found.units != self._ledger.units:
            raise self._holds_another(f"its text was other ({self._corpus.description})")
        whole = [file for file in found.files if self._is_whole(file)]
        found.complete &= len(whole) == len(found.files)
        found.files = whole
        self._ledger = found

    def _is_whole(self, file: FinishedFile) -> bool:
        path = self._folder / file.file
        return path.is_file() and path.stat().st_size == file.num_bytes

    def _save(self) -> None:
        write_whole(self._folder / LEDGER_NAME, self._ledger.model_dump_json(indent=1) + "\n")

    def _count_units(self) -> list[UnitCounts]:
        """What each unit holds, counted by several processes where there is much text."""
        units = self._corpus.shards
        workers = Workers(self._preparation.prepare_num_workers or num_cores())
        num_processes, _ = workers.for_corpus(self._corpus, BYTES_READ_WORTH_A_PROCESS)
        jobs = list(enumerate(units))
        with show_progress("Reading", sum(u.num_bytes for u in units), self._show) as progress:
            counted = dict(
                work_processes.run(_count_unit, self._preparation, jobs, num_processes, progress)
            )
        return [counted[number] for number in range(len(units))]

    def _plan(self) -> ExportPlan:
        if not sum(unit.num_documents for unit in self._ledger.units):
            (self._folder / LEDGER_NAME).unlink()
            raise UserError(
                f"prepare_source={self._corpus.description} has no document with text "
                f"({self._corpus.num_files} files: {self._left_out() or 'no rows'})."
            )
        return plan_export(
            self._corpus,
            self._ledger.units,
            seed=self._preparation.prepare_seed,
            validation_fraction=self._preparation.validation_fraction,
            num_shards=self._preparation.prepare_num_shards,
        )

    def _write(self, plan: ExportPlan) -> None:
        """Writes the files that are not finished, reading from the first unit that they need."""
        outputs = {split: _SplitOutput(self, split, plan) for split in plan.num_shards}
        first = plan.first_unit({split: out.num_finished for split, out in outputs.items()})
        units = self._corpus.shards
        left = sum(unit.num_bytes for unit in units[first:])
        try:
            with show_progress("Writing", left, self._show) as progress:
                for number in range(first, len(units)):
                    for split, output in outputs.items():
                        output.num_bytes_before = plan.bytes_before[split][number]
                    self._write_unit(number, plan, outputs)
                    progress(units[number].num_bytes)
            for output in outputs.values():
                output.finish()
        finally:
            for output in outputs.values():
                output.give_up()

    def _write_unit(
        self, number: int, plan: ExportPlan, outputs: "dict[str, _SplitOutput]"
    ) -> None:
        counts = self._ledger.units[number]
        splits = self._splits_of_documents(number, plan)
        digest = TextDigest()
        texts = unit_texts(
            self._corpus.shards[number], self._preparation.prepare_fix_text, self._skipped
        )
        for index, text in enumerate(texts):
            digest.add(text)
            if index == counts.num_documents:
                break
            outputs[splits[index]].add(text)
        if digest.hexdigest() != counts.sha256:
            raise UserError(
                f"The files of prepare_source={self._corpus.description} changed while they were "
                f"read. Delete {self._folder} and run again when nothing writes to them."
            )

    def _splits_of_documents(self, number: int, plan: ExportPlan) -> list[str]:
        num_documents = self._ledger.units[number].num_documents
        if plan.held_out is None:
            return [self._corpus.splits[number]] * num_documents
        first = document_number(number, 0)
        ranks_D = ranks(plan.held_out.seed, first + np.arange(num_documents))
        held_out_D = ranks_D < lowest_rank_of_training(plan.held_out.fraction)
        for special in (plan.held_out.first, plan.held_out.last):
            if special is not None and first <= special < first + num_documents:
                held_out_D[special - first] = special in plan.held_out
        return [VALIDATION if held_out else TRAIN for held_out in held_out_D.tolist()]

    def file_name(self, split: str, shard: int) -> str:
        """Name of a file; names of a split sort by number."""
        name = self._preparation.prepare_name
        ending = _ENDINGS[self._preparation.prepare_output_format]
        return f"{name + '_' if name else ''}{split}_data_{shard:05d}.{ending}"

    def open_writer(self, path: Path) -> _Writer:
        """A writer of records in the format that is asked for."""
        if self._preparation.prepare_output_format == "text_tfrecord":
            return TFRecordWriter(path)
        return ArrayRecordWriter(path)

    def path(self, name: str) -> Path:
        """Where a file of this name goes."""
        return self._folder / name

    def num_finished(self, split: str) -> int:
        """How many files of a split, from the first on, are finished."""
        names = {file.file for file in self._ledger.files}
        count = 0
        while self.file_name(split, count) in names:
            count += 1
        return count

    def add_finished(self, file: FinishedFile) -> None:
        """Notes a file that is complete and on disk."""
        self._ledger.files = [old for old in self._ledger.files if old.file != file.file]
        self._ledger.files.append(file)
        self._save()

    def _left_out(self) -> str:
        skipped: Counter[str] = Counter()
        for unit in self._ledger.units:
            skipped.update(unit.skipped)
        return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())

    def _report(self) -> None:
        for split in dict.fromkeys(file.split for file in self._ledger.files):
            files = [file for file in self._ledger.files if file.split == split]
            self._show(
                f"  {split}: {counted(sum(file.num_documents for file in files), 'document')}, "
                f"{sum(file.num_text_bytes for file in files) / 1e6:,.1f} MB of text in "
                f"{counted(len(files), 'file')}"
            )
        if left_out := self._left_out():
            self._show(f"  left out: {left_out}")
        self._show(f"Wrote {self._folder}")


def _count_unit(
    preparation: Preparation, job: tuple[int, Shard], advance: Callable[[int], None]
) -> tuple[int, UnitCounts]:
    """`count_unit` as work_processes calls it: number and counts."""
    number, unit = job
    counts = count_unit(
        unit,
        number,
        seed=preparation.prepare_seed,
        validation_fraction=preparation.validation_fraction,
        fix_text=preparation.prepare_fix_text,
    )
    advance(unit.num_bytes)
    return number, counts


class _SplitOutput:
    """The files of one split, written one after the other.

    Attributes:
      num_finished: files that were there before.
      num_bytes_before: text of the split before the next document.
    """

    def __init__(self, export: _Export, split: str, plan: ExportPlan):
        self._export = export
        self._split = split
        self._plan = plan
        self.num_finished = export.num_finished(split)
        self.num_bytes_before = 0
        self._shard = self.num_finished
        self._writer: _Writer | None = None
        self._writing: Path | None = None
        self._num_documents = self._num_text_bytes = 0

    def add(self, text: bytes) -> None:
        """Writes the next document, unless its file was there before."""
        shard = self._plan.shard_of(self._split, self.num_bytes_before)
        self.num_bytes_before += len(text)
        if shard < self.num_finished:
            return
        while self._shard < shard:
            self._finish_file()
        self._open()
        assert self._writer is not None
        self._writer.write(tf_example.encode({TEXT_FEATURE: text}))
        self._num_documents += 1
        self._num_text_bytes += len(text)

    def finish(self) -> None:
        """Completes the last file."""
        while self._shard < self._plan.num_shards[self._split]:
            self._finish_file()

    def _open(self) -> None:
        if self._writer is None:
            self._writing = writing_name(self._export.path(self._file_name()))
            self._writer = self._export.open_writer(self._writing)

    def _file_name(self) -> str:
        return self._export.file_name(self._split, self._shard)

    def _finish_file(self) -> None:
        # A file that a long document leaves without any is written too: numbers have no gaps.
        self._open()
        assert self._writer is not None
        assert self._writing is not None
        self._writer.close()
        path = self._export.path(self._file_name())
        num_bytes = self._writing.stat().st_size
        publish(self._writing, path)
        self._writer = self._writing = None
        sync_file(path.parent)
        self._export.add_finished(
            FinishedFile(
                file=path.name,
                split=self._split,
                num_documents=self._num_documents,
                num_text_bytes=self._num_text_bytes,
                num_bytes=num_bytes,
            )
        )
        self._shard += 1
        self._num_documents = self._num_text_bytes = 0

    def give_up(self) -> None:
        """Removes the file that is being written, if there is one."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        if self._writing is not None:
            self._writing.unlink(missing_ok=True)
