"""Builds a prepared data set out of a corpus and a tokenizer: `build_data_set`.

    <building>/request.json   what is being built
    <building>/parts/         finished units, see unit_encoding
    <building>/data_set/      the data set, complete once it has a manifest

The building folder outlives the process: the next one that builds the same goes on with the units
that are left. Imports no jax.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.documents import too_many_error
from MaxText.input_pipeline.preparation import work_processes
from MaxText.input_pipeline.preparation.held_out import TRAIN, VALIDATION, unit_of
from MaxText.input_pipeline.preparation.progress import show_progress
from MaxText.input_pipeline.preparation.survey import corpus_digest
from MaxText.input_pipeline.preparation.token_writer import (
    CHUNK_LENGTH,
    FileFormat,
    SplitPlan,
    TokenFile,
    split_entry,
    tokens_digest,
    write_document_files,
    write_token_file,
)
from MaxText.input_pipeline.preparation.unit_encoding import (
    EncodedUnit,
    Encoding,
    EncodingJob,
    Recipe,
    encode_unit,
    finished_unit,
)
from MaxText.input_pipeline.sync import sync_file, write_whole
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    SourceEntry,
    Split,
    TokenizerEntry,
)

Show = Callable[[str], None]

# A process takes up to a second to start (half of it for imports). Below so many bytes of text for
# each, threads of this one are faster.
_BYTES_ENCODED_WORTH_A_PROCESS = 32_000_000
# Bad rows and files that are named.
_MOST_NAMED = 10
BYTES_READ_WORTH_A_PROCESS = 256_000_000
"""Of text that is only read, or written as ids."""


@dataclass(frozen=True)
class Request:
    """What to build.

    Attributes:
      corpus: the text.
      recipe: how it becomes ids.
      file_format: array_record or bin.
      options: for the manifest.
      expected_sha256: unit number -> digest of its text, of units that were read before.
    """

    corpus: Corpus
    recipe: Recipe
    file_format: FileFormat
    options: dict[str, Any]
    expected_sha256: Mapping[int, str]

    def encoding(self, folder: Path, num_threads: int) -> Encoding:
        """How its units are encoded into `folder`, by processes with so many threads each."""
        return Encoding(self.recipe.with_threads(num_threads), folder)


@dataclass(frozen=True)
class Workers:
    """Who works.

    Attributes:
      num_processes: of this machine.
      beam_options: of Apache Beam's runner, which encodes the units then; None leaves all to the
        processes of this machine.
    """

    num_processes: int
    beam_options: str | None = None

    def for_corpus(
        self, corpus: Corpus, bytes_worth_a_process: int = _BYTES_ENCODED_WORTH_A_PROCESS
    ) -> tuple[int, int]:
        """Processes and threads of each that suit the size of a corpus."""
        num_bytes = sum(unit.num_bytes for unit in corpus.shards)
        worth = max(min(num_bytes // bytes_worth_a_process, len(corpus.shards)), 1)
        num_processes = min(self.num_processes, worth)
        return num_processes, max(self.num_processes // num_processes, 1)


def build_data_set(building: Path, request: Request, workers: Workers, show: Show) -> Manifest:
    """Builds `<building>/data_set`, going on with what is there of the same request.

    Only one process may work on `building` at a time.

    Raises:
      UserError: no document with text, a file cannot be read or changed meanwhile, or a process
        was killed.
    """
    start = time.monotonic()
    parts = building / "parts"
    _open_building(building, request, show)
    units, kept = _encode_units(parts, request, workers, show)
    units = _fill_empty_split(parts, request, units, show)
    _check_bad(request, units, show)
    if not any(part.num_documents for unit in units for part in unit.parts.values()):
        skipped = _skipped(units)
        left_out = ", ".join(f"{count:,} {why}" for why, count in skipped.items()) or "no rows"
        shutil.rmtree(parts, ignore_errors=True)  # nothing that another try could use
        first_bad = next((f" {bad}" for unit in units for bad in unit.bad), "")
        raise UserError(
            f"prepare_source={request.corpus.description} has no document with text "
            f"({request.corpus.num_files:,} files: {left_out}).{first_bad}"
        )
    target = building / "data_set"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    splits = _assemble(target, parts, request, workers, units, show)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=_tokenizer_entry(request),
        dtype=request.recipe.dtype,
        format=request.file_format,
        chunk_length=CHUNK_LENGTH if request.file_format == "array_record" else 1,
        splits=splits,
        source=SourceEntry(
            description=request.corpus.description,
            sha256=corpus_digest([unit.sha256 for unit in units]),
            num_files=request.corpus.num_files,
            skipped=dict(sorted(_skipped(units).items())),
        ),
        options=request.options,
    )
    for path in request.recipe.tokenizer.save(target):
        sync_file(path)
    write_whole(target / MANIFEST_NAME, manifest.to_json())
    _report(request, units, kept, manifest, time.monotonic() - start, show)
    return manifest


def _open_building(building: Path, request: Request, show: Show) -> None:
    """Makes the folder, without what belongs to another request or was being written."""
    path = building / "request.json"
    if building.exists():
        try:
            same = path.read_text(encoding="utf-8") == request.recipe.summary()
        except (OSError, ValueError):
            same = False
        if not same:
            show(f"Deleting {building}: an unfinished data set of another tokenizer or options")
            shutil.rmtree(building)
    (building / "parts").mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_whole(path, request.recipe.summary())
    for leftover in (building / "parts").glob("*.writing"):
        leftover.unlink()


def _encode_units(
    parts: Path, request: Request, workers: Workers, show: Show
) -> tuple[list[EncodedUnit], set[int]]:
    """All units of the corpus, encoded, and the numbers of those that another process encoded."""
    num_processes, num_threads = workers.for_corpus(request.corpus)
    encoding = request.encoding(parts, num_threads)
    corpus = request.corpus
    splits = corpus.splits or [""] * len(corpus.shards)
    if corpus.splits:
        names = ", ".join(dict.fromkeys(splits))
        show(f"The source has splits of its own ({names}): validation_fraction is not used")
    jobs = [
        EncodingJob(
            number, unit, split=split, expected_sha256=request.expected_sha256.get(number, "")
        )
        for number, (unit, split) in enumerate(zip(corpus.shards, splits, strict=True))
    ]
    finished = {job.number: unit for job in jobs if (unit := finished_unit(encoding, job.number))}
    if finished:
        show(f"Going on: {len(finished):,} of {len(jobs):,} parts were finished before")
    num_bytes = sum(unit.num_bytes for unit in corpus.shards)
    if workers.beam_options is not None:
        from MaxText.input_pipeline.preparation.beam_runner import encode_with_beam

        encode_with_beam(request.encoding(parts, 1), jobs, workers.beam_options)
    else:
        with show_progress("Encoding", num_bytes, show) as advance:
            for _ in work_processes.run(encode_unit, encoding, jobs, num_processes, advance):
                pass
    units = _finished(encoding, jobs)
    # A unit whose text changed since was encoded again.
    return units, {number for number, unit in finished.items() if units[number] == unit}


def _finished(encoding: Encoding, jobs: Sequence[EncodingJob]) -> list[EncodedUnit]:
    units = []
    for job in jobs:
        unit = finished_unit(encoding, job.number)
        assert unit is not None, f"unit {job.number} is not in {encoding.folder}"
        units.append(unit)
    return units


def _fill_empty_split(
    parts: Path, request: Request, units: list[EncodedUnit], show: Show
) -> list[EncodedUnit]:
    """Moves one document where the hash put all into one split: neither may be empty.

    That of two documents or more the one with the lowest rank is held out and the one with the
    highest is not makes a difference only then, so nothing needs to be known about the corpus
    before it is encoded.
    """
    if request.recipe.validation_fraction == 0 or request.corpus.splits:
        return units
    num_documents = {
        split: sum(unit.parts[split].num_documents for unit in units)
        for split in (TRAIN, VALIDATION)
    }
    if sum(num_documents.values()) == 1:
        show("There is 1 document, so none is held out: evaluation needs two or more")
    moved: dict[int, bool] = {}
    if num_documents[TRAIN] == 0 and num_documents[VALIDATION] > 0:
        moved[max(unit.last for unit in units if unit.last)[1]] = False
    if num_documents[VALIDATION] == 0 and num_documents[TRAIN] > 1:
        moved[min(unit.first for unit in units if unit.first)[1]] = True
    encoding = request.encoding(parts, 1)
    for document, held_out in moved.items():
        number = unit_of(document)
        job = EncodingJob(
            number,
            request.corpus.shards[number],
            exceptions=((document, held_out),),
            expected_sha256=units[number].sha256,
        )
        units[number] = encode_unit(encoding, job, lambda done: None)
    return units


def _assemble(
    target: Path,
    parts: Path,
    request: Request,
    workers: Workers,
    units: Sequence[EncodedUnit],
    show: Show,
) -> dict[str, Split]:
    """Writes the files of all splits; what a killed process had written of them is redone, which
    takes a hundredth of the time that encoding takes."""
    plans = {}
    for split in sorted({split for unit in units for split in unit.parts}):
        of_split = tuple(unit.parts[split] for unit in units if split in unit.parts)
        plan = SplitPlan(
            parts_folder=parts,
            parts=tuple(part for part in of_split if part.num_documents),
            folder=target / split,
            vocab_size=request.recipe.tokenizer.entry.vocab_size,
            dtype=request.recipe.stored_type,
            file_format=request.file_format,
        )
        if plan.num_documents:
            plan.folder.mkdir()
            plans[split] = plan
    # Longest first: digests go through a whole split.
    jobs = [_Piece(split, kind) for split in plans for kind in ("tokens digest", "documents")]
    for split, plan in plans.items():
        jobs += [_Piece(split, "file", index) for index in range(plan.num_files)]
    num_bytes = sum(plan.num_tokens * plan.dtype.itemsize for plan in plans.values())
    num_processes, _ = workers.for_corpus(request.corpus, BYTES_READ_WORTH_A_PROCESS)
    results: dict[_Piece, Any] = {}
    with show_progress("Writing", num_bytes, show) as advance:
        for piece, result in work_processes.run(_write, plans, jobs, num_processes, advance):
            results[piece] = result
    for plan in plans.values():
        sync_file(plan.folder)
    sync_file(target)
    return {
        split: split_entry(
            plan,
            [results[_Piece(split, "file", index)] for index in range(plan.num_files)],
            results[_Piece(split, "tokens digest")],
            results[_Piece(split, "documents")],
        )
        for split, plan in plans.items()
    }


@dataclass(frozen=True)
class _Piece:
    """Work on a split: a file of tokens, the files about documents, or the digest of its ids."""

    split: str
    kind: str
    index: int = 0


def _write(
    plans: Mapping[str, SplitPlan], piece: _Piece, advance: Callable[[int], None]
) -> tuple[_Piece, TokenFile | str]:
    plan = plans[piece.split]
    if piece.kind == "tokens digest":
        return piece, tokens_digest(plan)
    if piece.kind == "documents":
        return piece, write_document_files(plan)
    file = write_token_file(plan, piece.index)
    advance((file.entry.num_tokens or 0) * plan.dtype.itemsize)
    return piece, file


def _tokenizer_entry(request: Request) -> TokenizerEntry:
    """With the separator as the id that ends documents, where that is what does."""
    entry = request.recipe.tokenizer.entry
    return (
        entry.model_copy(update={"eos_id": request.recipe.after[0]})
        if request.recipe.after
        else entry
    )


def _check_bad(request: Request, units: Sequence[EncodedUnit], show: Show) -> None:
    """Names the rows and files that were bad; those of all units together may be too many."""
    bad = [message for unit in units for message in unit.bad]
    limit = max((unit.max_bad_records for unit in request.corpus.shards), default=0)
    if len(bad) > limit:
        raise too_many_error(limit, bad[0])
    for message in bad[:_MOST_NAMED]:
        show(f"warning: left out: {message}")
    if len(bad) > _MOST_NAMED:
        show(f"warning: left out: {len(bad) - _MOST_NAMED} more rows and files like these")


def _skipped(units: Sequence[EncodedUnit]) -> Counter[str]:
    return sum((Counter(unit.skipped) for unit in units), Counter[str]())


def _report(
    request: Request,
    units: Sequence[EncodedUnit],
    kept: Collection[int],
    manifest: Manifest,
    seconds: float,
    show: Show,
) -> None:
    num_documents = sum(split.num_documents for split in manifest.splits.values())
    num_bytes = sum(unit.num_bytes for unit in units)
    files = request.corpus.num_files
    line = (
        f"Read {counted(num_documents, 'document')}, {num_bytes / 1e6:,.1f} MB of text, "
        f"from {counted(files, 'file')}"
    )
    skipped = manifest.source.skipped
    if skipped:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        line += f"; left out: {left_out}"
    show(line)
    unit_of_count = "bytes" if request.recipe.is_text else "tokens"
    if kept:
        num_tokens = _num_tokens([units[number] for number in kept])
        parts = f"{len(kept):,} of {len(units):,} parts"
        show(f"Kept {num_tokens:,} {unit_of_count} in {parts}, encoded before")
    new = [unit for number, unit in enumerate(units) if number not in kept]
    if new:
        num_tokens = _num_tokens(new)
        num_bytes = sum(unit.num_bytes for unit in new)
        processor_seconds = sum(unit.processor_seconds for unit in new)
        show(
            f"Encoded {num_tokens:,} {unit_of_count} in {seconds:,.1f} s: "
            f"{num_bytes / 1e6 / max(seconds, 1e-3):,.1f} MB/s, "
            f"{num_tokens / max(processor_seconds, 1e-3):,.0f} {unit_of_count} per CPU second "
            f"({request.recipe.tokenizer.engine})"
        )


def _num_tokens(units: Sequence[EncodedUnit]) -> int:
    return sum(part.num_tokens for unit in units for part in unit.parts.values())
