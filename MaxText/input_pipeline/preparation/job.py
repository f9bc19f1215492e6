"""Builds a tokenized dataset in a staging folder, resumably.

    <staging>/request.json   tokenization settings
    <staging>/shards/        entries of finished shards, see token_shards
    <staging>/data_set/      the dataset, complete once it has a manifest

The folder outlives the process; the next process tokenizes the remaining shards.
"""

import functools
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.text_streams import too_many_error
from MaxText.input_pipeline.preparation.process_pool import map_in_processes, show_progress
from MaxText.input_pipeline.preparation.sampling import TRAIN, VALIDATION, corpus_digest, shard_of
from MaxText.input_pipeline.preparation.token_shards import (
    ShardJob,
    Tokenization,
    TokenizedShard,
    finished_shard,
    tokenize_shard,
    write_documents,
)
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    SourceEntry,
    Split,
)
from MaxText.storage.atomic import atomic_write_text, sync_file

Show = Callable[[str], None]

# Below this, threads of one process are faster: a process takes up to a second to start.
_TOKENIZED_BYTES_PER_PROCESS = 32_000_000
READ_BYTES_PER_PROCESS = 256_000_000
"""Least text that is worth a process of its own where text is only read."""

_MAX_NAMED_ERRORS = 10
_ERROR_SUFFIX = ".refused"  # file with the error of a shard on Beam


@dataclass(frozen=True)
class Workers:
    """Local processes, or options of the Apache Beam runner that tokenizes instead."""

    num_processes: int
    beam_options: str | None = None

    def for_corpus(
        self, corpus: Corpus, bytes_per_process: int = _TOKENIZED_BYTES_PER_PROCESS
    ) -> tuple[int, int]:
        """Returns the processes, and threads of each, that suit the size of a corpus."""
        num_bytes = sum(shard.num_bytes for shard in corpus.shards)
        useful = max(min(num_bytes // bytes_per_process, len(corpus.shards)), 1)
        num_processes = min(self.num_processes, useful)
        return num_processes, max(self.num_processes // num_processes, 1)


def build_data_set(
    corpus: Corpus,
    tokenization: Tokenization,
    options: dict[str, Any],
    digests: Mapping[int, str],
    workers: Workers,
    show: Show,
) -> Manifest:
    """Builds `<tokenization.staging>/data_set`, resuming earlier work.

    Only one process may work on a staging folder at a time. `digests` has the text digests of
    shards that were read before. Raises UserError if no document has text, a file cannot be read or
    changed while it was read, or a process was killed.
    """
    start = time.monotonic()
    staging = tokenization.staging
    _open_staging(tokenization, show)
    shards, kept = _tokenize_all(corpus, tokenization, digests, workers, show)
    if tokenization.validation_fraction > 0 and not corpus.splits:
        _fill_empty_split(corpus, tokenization, shards, show)
    skipped = sum((Counter(shard.skipped) for shard in shards), Counter[str]())
    bad = _report_bad(corpus, shards, show)
    if not any(shard.num_tokens for shard in shards):
        shutil.rmtree(staging / "shards", ignore_errors=True)  # useless for a retry
        reasons = ", ".join(f"{count:,} {why}" for why, count in skipped.items()) or "no rows"
        raise UserError(
            f"prepare_source={corpus.description} has no document with text "
            f"({corpus.num_files:,} files: {reasons}).{f' {bad[0]}' if bad else ''}"
        )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        # A separator replaces eos.
        tokenizer=tokenization.tokenizer.entry.model_copy(
            update={"eos_id": tokenization.after[0]} if tokenization.after else {}
        ),
        dtype=tokenization.dtype,
        format="bin",
        chunk_length=1,
        splits=_finish_splits(tokenization, shards, show),
        source=SourceEntry(
            description=corpus.description,
            sha256=corpus_digest([shard.sha256 for shard in shards]),
            num_files=corpus.num_files,
            skipped=dict(sorted(skipped.items())),
        ),
        options=options,
    )
    target = staging / "data_set"
    for path in tokenization.tokenizer.save(target):
        sync_file(path)
    atomic_write_text(target / MANIFEST_NAME, manifest.to_json())
    seconds = time.monotonic() - start
    _report(tokenization, shards, kept, manifest, seconds, show)
    return manifest


def _open_staging(tokenization: Tokenization, show: Show) -> None:
    """Creates the folder, deleting results of other requests and partial files."""
    staging = tokenization.staging
    request = staging / "request.json"
    if staging.exists():
        try:
            same = request.read_text(encoding="utf-8") == tokenization.summary()
        except (OSError, ValueError):
            same = False
        if not same:
            show(f"Deleting {staging}: an unfinished data set of another tokenizer or options")
            shutil.rmtree(staging)
    for name in ("shards", "data_set"):
        (staging / name).mkdir(parents=True, exist_ok=True)
        for leftover in (staging / name).rglob("*.writing"):
            leftover.unlink()
    if not request.exists():
        atomic_write_text(request, tokenization.summary())


def _tokenize_all(
    corpus: Corpus,
    tokenization: Tokenization,
    digests: Mapping[int, str],
    workers: Workers,
    show: Show,
) -> tuple[list[TokenizedShard], set[int]]:
    """Returns all shards, and the numbers of those that an earlier process had tokenized."""
    splits = corpus.splits or [""] * len(corpus.shards)
    if corpus.splits:
        names = ", ".join(dict.fromkeys(splits))
        show(f"The source has splits of its own ({names}): validation_fraction is not used")
    jobs = [
        ShardJob(number, shard, split, expected_sha256=digests.get(number, ""))
        for number, (shard, split) in enumerate(zip(corpus.shards, splits, strict=True))
    ]
    before = {number: finished_shard(tokenization, number) for number in range(len(jobs))}
    num_finished = sum(shard is not None for shard in before.values())
    if num_finished:
        show(f"Resuming: {num_finished:,} of {len(jobs):,} shards are already tokenized")
    if workers.beam_options is not None:
        _tokenize_with_beam(tokenization.with_threads(1), jobs, workers.beam_options)
    else:
        num_processes, num_threads = workers.for_corpus(corpus)
        shared = tokenization.with_threads(num_threads)
        num_bytes = sum(shard.num_bytes for shard in corpus.shards)
        with show_progress("Encoding", num_bytes, show) as advance:
            for _ in map_in_processes(tokenize_shard, shared, jobs, num_processes, advance):
                pass
    shards = []
    for number in range(len(jobs)):
        shard = finished_shard(tokenization, number)
        assert shard is not None, f"shard {number} is not in {tokenization.staging}"
        shards.append(shard)
    # A shard whose text changed was tokenized again.
    return shards, {number for number, shard in before.items() if shards[number] == shard}


def _tokenize_with_beam(
    tokenization: Tokenization, jobs: Sequence[ShardJob], beam_options: str
) -> None:
    """Tokenizes all shards on Apache Beam, given its command-line options.

    Workers need the corpus and the staging folder under the same paths as here.
    """
    try:
        import apache_beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options.pipeline_options import (  # pyright: ignore[reportMissingImports]
            PipelineOptions,
        )
    except ImportError as error:
        raise UserError(
            "prepare_runner=beam needs the package apache-beam, which is not installed. Run: pip "
            "install 'MaxText[beam]', or set prepare_runner=local."
        ) from error
    folder = tokenization.staging / "shards"
    for leftover in folder.glob(f"*{_ERROR_SUFFIX}"):
        leftover.unlink()
    options = PipelineOptions(shlex.split(beam_options))
    with apache_beam.Pipeline(options=options) as pipeline:
        # Without a reshuffle, Beam would fuse everything into one bundle.
        _ = (
            pipeline
            | "Shards" >> apache_beam.Create(list(jobs))
            | apache_beam.Reshuffle()
            | "Tokenize" >> apache_beam.Map(functools.partial(_tokenize_on_beam, tokenization))
        )
    refused = sorted(folder.glob(f"*{_ERROR_SUFFIX}"))
    if refused:
        raise UserError(refused[0].read_text(encoding="utf-8"))


def _tokenize_on_beam(tokenization: Tokenization, job: ShardJob) -> int:
    """Tokenizes a shard. UserErrors go to a file, because Beam would wrap and retry them."""
    try:
        tokenize_shard(tokenization, job, lambda done: None)
    except UserError as error:
        path = tokenization.staging / "shards" / f"{job.number:06d}{_ERROR_SUFFIX}"
        atomic_write_text(path, str(error))
    return job.number


def _fill_empty_split(
    corpus: Corpus, tokenization: Tokenization, shards: list[TokenizedShard], show: Show
) -> None:
    """Moves one document if the hash left a split empty.

    The document with the lowest hash is then held out, or the one with the highest is not. This is
    only known when all shards are done, and changes one of them.
    """
    train, validation = (
        sum(shard.splits[split].num_documents for shard in shards) for split in (TRAIN, VALIDATION)
    )
    if train + validation == 1:
        show("warning: only 1 document, so no validation split (needs at least 2)")
    if train == 0 and validation > 0:
        moved = (max(shard.highest for shard in shards if shard.highest)[1], False)
    elif validation == 0 and train > 1:
        moved = (min(shard.lowest for shard in shards if shard.lowest)[1], True)
    else:
        return
    number = shard_of(moved[0])
    job = ShardJob(
        number, corpus.shards[number], moved=moved, expected_sha256=shards[number].sha256
    )
    shards[number] = tokenize_shard(tokenization, job, lambda done: None)


def _finish_splits(
    tokenization: Tokenization, shards: Sequence[TokenizedShard], show: Show
) -> dict[str, Split]:
    target = tokenization.staging / "data_set"
    num_bytes = sum(path.stat().st_size for path in target.rglob("tokens-*"))
    entries = {}
    with show_progress("Checksums", num_bytes, show) as advance:
        for split in sorted({split for shard in shards for split in shard.splits}):
            parts = [
                (number, shard.splits[split])
                for number, shard in enumerate(shards)
                if split in shard.splits and shard.splits[split].num_documents
            ]
            if parts:
                entries[split] = write_documents(tokenization, split, parts, advance)
                sync_file(target / split)
    for folder in target.iterdir():
        if folder.is_dir() and folder.name not in entries:
            shutil.rmtree(folder)
    sync_file(target)
    return entries


def _report_bad(corpus: Corpus, shards: Sequence[TokenizedShard], show: Show) -> list[str]:
    """Reports malformed rows and unreadable files, enforcing the limit over all shards."""
    bad = [message for shard in shards for message in shard.bad]
    limit = max((shard.max_bad_records for shard in corpus.shards), default=0)
    if len(bad) > limit:
        raise too_many_error(limit, bad[0])
    for message in bad[:_MAX_NAMED_ERRORS]:
        show(f"warning: skipped: {message}")
    if len(bad) > _MAX_NAMED_ERRORS:
        show(f"warning: skipped: {len(bad) - _MAX_NAMED_ERRORS} more rows and files like these")
    return bad


def _report(
    tokenization: Tokenization,
    shards: Sequence[TokenizedShard],
    kept: set[int],
    manifest: Manifest,
    seconds: float,
    show: Show,
) -> None:
    num_documents = sum(split.num_documents for split in manifest.splits.values())
    num_bytes = sum(shard.num_bytes for shard in shards)
    source = manifest.source
    line = (
        f"Read {counted(num_documents, 'document')}, {num_bytes / 1e6:,.1f} MB of text, "
        f"from {counted(source.num_files, 'file')}"
    )
    if source.skipped:
        line += "; skipped: "
        line += ", ".join(f"{count:,} {reason}" for reason, count in source.skipped.items())
    show(line)
    unit = "bytes" if tokenization.is_text else "tokens"
    if kept:
        num_tokens = sum(shards[number].num_tokens for number in kept)
        parts = f"{len(kept):,} of {len(shards):,} shards"
        show(f"Kept {num_tokens:,} {unit} in {parts}, tokenized before")
    new = [shard for number, shard in enumerate(shards) if number not in kept]
    if new:
        num_tokens = sum(shard.num_tokens for shard in new)
        speed = sum(shard.num_bytes for shard in new) / 1e6 / max(seconds, 1e-3)
        cpu_speed = num_tokens / max(sum(shard.cpu_seconds for shard in new), 1e-3)
        show(
            f"Encoded {num_tokens:,} {unit} in {seconds:,.1f} s: {speed:,.1f} MB/s, "
            f"{cpu_speed:,.0f} {unit} per CPU second ({tokenization.tokenizer.engine})"
        )
