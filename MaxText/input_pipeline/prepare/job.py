"""Builds a tokenized dataset in a staging folder, resumably.

    <staging>/request.json   tokenization settings
    <staging>/shards/        entries of finished shards, see token_shards
    <staging>/data_set/      the dataset, complete once it has a manifest

The folder outlives the process; the next process tokenizes the remaining shards.
"""

import functools
import json
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.text_streams import too_many_error
from MaxText.input_pipeline.prepare.process_pool import (
    map_in_processes,
    num_processes,
    show_progress,
)
from MaxText.input_pipeline.prepare.sampling import (
    TRAIN,
    VALIDATION,
    corpus_digest,
    held_out_threshold,
)
from MaxText.input_pipeline.prepare.token_shards import (
    ShardJob,
    ShardSplit,
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
from MaxText.pluralize import pluralize
from MaxText.storage.atomic import atomic_write_text, sync_file

Log = Callable[[str], None]

# Less text takes no longer than a process to start, which is up to a second.
_TOKENIZED_BYTES_PER_PROCESS = 16_000_000
READ_BYTES_PER_PROCESS = 256_000_000
"""Least text that is worth a process of its own where text is only read."""

_MAX_NAMED_ERRORS = 10


def processes_for(
    corpus: Corpus, most: int, bytes_per_process: int = _TOKENIZED_BYTES_PER_PROCESS
) -> int:
    """Returns the number of processes for a corpus size."""
    num_bytes = sum(shard.num_bytes for shard in corpus.shards)
    return min(most, max(num_bytes // bytes_per_process, 1))


@dataclass(frozen=True)
class TokenizationJob:
    """The dataset `<tokenization.staging>/data_set` to build from a corpus.

    Only one process may work on a staging folder at a time.
    """

    corpus: Corpus
    tokenization: Tokenization
    log: Log

    def run(self, options: dict[str, Any]) -> Manifest:
        """Builds the dataset, resuming earlier work.

        Returns its manifest with the `options`. Raises UserError if no document has text, a file
        cannot be read or changed while it was read, or a process was killed.
        """
        start, tokenization = time.monotonic(), self.tokenization
        self._open_staging()
        shards, kept = self._tokenize_all()
        if tokenization.keys.validation_fraction > 0 and not self.corpus.splits:
            self._fill_empty_split(shards)
        source = SourceEntry(
            description=self.corpus.description,
            sha256=corpus_digest([shard.sha256 for shard in shards]),
            num_files=self.corpus.num_files,
            skipped=self._skipped(shards),
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
            splits=self._finish_splits(shards),
            source=source,
            options=options,
        )
        target = tokenization.staging / "data_set"
        for path in tokenization.tokenizer.save(target):
            sync_file(path)
        atomic_write_text(target / MANIFEST_NAME, manifest.to_json())
        self._report(shards, kept, manifest, time.monotonic() - start)
        return manifest

    def _open_staging(self) -> None:
        """Creates the folder, deleting other results and partial files."""
        staging = self.tokenization.staging
        contents = {**self.tokenization.summary(), "corpus": self.corpus.identity()}
        summary = json.dumps(contents, indent=1, sort_keys=True) + "\n"
        request = staging / "request.json"
        if staging.exists():
            try:
                same = request.read_text(encoding="utf-8") == summary
            except (OSError, ValueError):
                same = False
            if not same:
                self.log(f"Deleting {staging}: an unfinished data set of other text or options")
                shutil.rmtree(staging)
        for name in ("shards", "data_set"):
            (staging / name).mkdir(parents=True, exist_ok=True)
            for leftover in (staging / name).rglob("*.writing"):
                leftover.unlink()
        if not request.exists():
            atomic_write_text(request, summary)

    def _tokenize_all(self) -> tuple[list[TokenizedShard], set[int]]:
        """Returns all shards, and the numbers of the already tokenized ones."""
        corpus, tokenization, log = self.corpus, self.tokenization, self.log
        if corpus.splits:
            names = ", ".join(corpus.splits)
            log(f"The source has splits of its own ({names}): validation_fraction is not used")
        threshold = held_out_threshold(tokenization.keys.validation_fraction)
        jobs = [ShardJob(number, shard, threshold) for number, shard in enumerate(corpus.shards)]
        kept = {job.number for job in jobs if finished_shard(tokenization, job.number)}
        if kept:
            log(f"Resuming: {len(kept):,} of {len(jobs):,} shards are already tokenized")
        if tokenization.keys.prepare.runner == "beam":
            _tokenize_with_beam(tokenization, jobs)
        else:
            processes = processes_for(corpus, num_processes(tokenization.keys))
            num_bytes = sum(shard.num_bytes for shard in corpus.shards)
            with show_progress("Encoding", num_bytes, log) as advance:
                for job, _ in map_in_processes(tokenize_shard, tokenization, jobs, processes):
                    advance(job.shard.num_bytes)
        found = [finished_shard(tokenization, job.number) for job in jobs]
        shards = [shard for shard in found if shard is not None]
        assert len(shards) == len(jobs), f"shards are missing in {tokenization.staging}"
        return shards, kept

    def _fill_empty_split(self, shards: list[TokenizedShard]) -> None:
        """Moves one document if the hash left a split empty.

        The document with the lowest hash is then held out, or the one with the highest is not. This
        is only known when all shards are done, and changes one of them.
        """
        train, validation = (
            sum(shard.splits[split].num_documents for shard in shards)
            for split in (TRAIN, VALIDATION)
        )
        if train + validation == 1:
            self.log("warning: only 1 document, so no validation split (needs at least 2)")
        numbers = range(len(shards))
        if train == 0 and validation > 0:
            number = max(numbers, key=lambda number: shards[number].highest)
            threshold = shards[number].highest
        elif validation == 0 and train > 1:
            number = min(numbers, key=lambda number: shards[number].lowest)
            threshold = shards[number].lowest + 1
        else:
            return
        job = ShardJob(number, self.corpus.shards[number], threshold)
        shards[number] = tokenize_shard(self.tokenization, job)

    def _skipped(self, shards: Sequence[TokenizedShard]) -> dict[str, int]:
        """Reports skipped rows and files, and returns counts by reason."""
        skipped = sum((Counter(shard.skipped) for shard in shards), Counter[str]())
        bad = [message for shard in shards for message in shard.bad]
        limit = max((shard.max_bad_records for shard in self.corpus.shards), default=0)
        if len(bad) > limit:
            raise too_many_error(limit, bad[0])
        for message in bad[:_MAX_NAMED_ERRORS]:
            self.log(f"warning: skipped: {message}")
        if (num_more := len(bad) - _MAX_NAMED_ERRORS) > 0:
            self.log(f"warning: skipped: {num_more} more rows and files like these")
        if not any(shard.num_tokens for shard in shards):
            # Useless for a retry.
            shutil.rmtree(self.tokenization.staging / "shards", ignore_errors=True)
            reasons = ", ".join(f"{count:,} {why}" for why, count in skipped.items()) or "no rows"
            raise UserError(
                f"prepare_source={self.corpus.description} has no document with text "
                f"({self.corpus.num_files:,} files: {reasons}).{f' {bad[0]}' if bad else ''}"
            )
        return dict(sorted(skipped.items()))

    def _finish_splits(self, shards: Sequence[TokenizedShard]) -> dict[str, Split]:
        target = self.tokenization.staging / "data_set"
        parts: dict[str, list[tuple[int, ShardSplit]]] = {}
        for number, shard in enumerate(shards):
            for split, part in shard.splits.items():
                if part.num_documents:
                    parts.setdefault(split, []).append((number, part))
        for folder in target.iterdir():
            if folder.is_dir() and folder.name not in parts:
                shutil.rmtree(folder)
        entries = {
            split: write_documents(self.tokenization, split, parts[split])
            for split in sorted(parts)
        }
        sync_file(target)
        return entries

    def _report(
        self, shards: Sequence[TokenizedShard], kept: set[int], manifest: Manifest, seconds: float
    ) -> None:
        num_documents = sum(split.num_documents for split in manifest.splits.values())
        num_bytes = sum(shard.num_bytes for shard in shards)
        reasons = [f"{count:,} {reason}" for reason, count in manifest.source.skipped.items()]
        self.log(
            f"Read {pluralize(num_documents, 'document')}, {num_bytes / 1e6:,.1f} MB of text, from "
            f"{pluralize(manifest.source.num_files, 'file')}"
            + (f"; skipped: {', '.join(reasons)}" if reasons else "")
        )
        new = [shard for number, shard in enumerate(shards) if number not in kept]
        if new:
            unit = "bytes" if self.tokenization.is_text else "tokens"
            num_tokens = sum(shard.num_tokens for shard in new)
            speed = sum(shard.num_bytes for shard in new) / 1e6 / max(seconds, 1e-3)
            engine = self.tokenization.tokenizer.engine
            self.log(
                f"Encoded {num_tokens:,} {unit} in {seconds:,.1f} s: {speed:,.1f} MB/s ({engine})"
            )


def _tokenize_with_beam(tokenization: Tokenization, jobs: Sequence[ShardJob]) -> None:
    """Tokenizes all shards on Apache Beam.

    Workers need the corpus and the staging folder under the same paths as here.
    """
    try:
        import apache_beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options.pipeline_options import (  # pyright: ignore[reportMissingImports]
            PipelineOptions,
        )
    except ImportError as error:
        raise UserError(
            "prepare.runner=beam needs the package apache-beam, which is not installed. Run: pip "
            "install 'MaxText[beam]', or set prepare.runner=local."
        ) from error
    options = PipelineOptions(shlex.split(tokenization.keys.prepare.beam_options))
    try:
        with apache_beam.Pipeline(options=options) as pipeline:
            # Without a reshuffle, Beam would fuse everything into one bundle.
            _ = (
                pipeline
                | "Shards" >> apache_beam.Create(list(jobs))
                | apache_beam.Reshuffle()
                | "Tokenize" >> apache_beam.Map(functools.partial(tokenize_shard, tokenization))
            )
    except Exception as error:  # runners raise errors of their own about those of workers
        raise UserError(f"prepare.runner=beam: {error}") from error
