"""Builds a tokenized dataset in a staging folder, resumably.

    <staging>/build_spec.json  tokenization settings
    <staging>/shards/          ledger of finished shards, see token_shards
    <staging>/data_set/        the dataset, complete once it has a manifest

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
from MaxText.input_pipeline.prepare.process_pool import run_jobs, run_once
from MaxText.input_pipeline.prepare.sampling import corpus_digest, held_out_threshold
from MaxText.input_pipeline.prepare.token_shards import (
    ShardJob,
    ShardSplit,
    Tokenization,
    TokenizedShard,
    tokenize_again,
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

_MAX_NAMED_ERRORS = 10


@dataclass(frozen=True)
class TokenizationJob:
    """The dataset `<tokenization.staging>/data_set` to build from a corpus.

    Only one process may work on a staging folder at a time.
    """

    corpus: Corpus
    tokenization: Tokenization
    log: Callable[[str], None]

    def run(self, options: dict[str, Any]) -> Manifest:
        """Builds the dataset, resuming earlier work.

        Returns its manifest with the `options`. Raises UserError if no document has text, a file
        cannot be read or changed while it was read, or a process was killed.
        """
        start = time.monotonic()
        tokenization = self.tokenization
        self._open_staging()
        shards, num_kept = self._tokenize_all()
        if tokenization.keys.validation_fraction > 0 and not self.corpus.splits:
            self._ensure_nonempty_splits(shards)
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
        (target / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        for path in (*tokenization.tokenizer.save(target), target / MANIFEST_NAME, target):
            sync_file(path)
        self._report(shards, num_kept, source.skipped, time.monotonic() - start)
        return manifest

    def _open_staging(self) -> None:
        """Creates the folder, deleting results of another request."""
        staging = self.tokenization.staging
        request = staging / "build_spec.json"
        if (earlier := staging / "request.json").exists():  # the name of earlier versions
            earlier.rename(request)
        contents = {"layout": 3, **self.tokenization.summary(), "corpus": self.corpus.identity()}
        summary = json.dumps(contents, indent=1, sort_keys=True) + "\n"
        has_results = request.exists() and (staging / "data_set").exists()
        if has_results and request.read_text(encoding="utf-8") == summary:
            return
        if staging.exists():
            self.log(f"Deleting {staging}: an unfinished data set of other text or options")
            shutil.rmtree(staging)
        for name in ("shards", "data_set"):
            (staging / name).mkdir(parents=True)
        atomic_write_text(request, summary)

    def _tokenize_all(self) -> tuple[list[TokenizedShard], int]:
        """Returns all shards, and the number of already tokenized ones."""
        corpus = self.corpus
        tokenization = self.tokenization
        log = self.log
        if corpus.splits:
            names = ", ".join(corpus.splits)
            log(f"The source has splits of its own ({names}): validation_fraction is not used")
        threshold = held_out_threshold(tokenization.keys.validation_fraction)
        jobs = [ShardJob(number, shard, threshold) for number, shard in enumerate(corpus.shards)]
        num_kept = sum(1 for _ in tokenization.ledger.glob("*.json"))
        if tokenization.keys.prepare.runner == "beam":
            found = _tokenize_with_beam(tokenization, jobs)
        else:
            sizes = [shard.num_bytes for shard in corpus.shards]
            most = tokenization.keys.prepare_num_workers
            ledger = tokenization.ledger
            found = run_jobs(
                "Encoding", tokenize_shard, tokenization, jobs, sizes, most, log, ledger
            )
        return [TokenizedShard.model_validate(shard) for shard in found], num_kept

    def _ensure_nonempty_splits(self, shards: list[TokenizedShard]) -> None:
        """Holds out the document with the lowest hash if no other is."""
        number = min(range(len(shards)), key=lambda number: shards[number].lowest)
        shard = shards[number]
        if shard.lowest >= shard.threshold and sum(each.num_documents for each in shards) > 1:
            job = ShardJob(number, self.corpus.shards[number], shard.lowest + 1)
            shards[number] = tokenize_again(self.tokenization, job, shard)

    def _skipped(self, shards: Sequence[TokenizedShard]) -> dict[str, int]:
        """Reports skipped rows and files, and returns counts by reason."""
        skipped = sum((Counter(shard.skipped) for shard in shards), Counter[str]())
        bad = [message for shard in shards for message in shard.bad]
        num_estimated = _estimate_unreadable(shards)
        num_bad = sum(shard.num_bad for shard in shards) + num_estimated
        if num_estimated:
            skipped["unreadable"] += num_estimated
        limit = max((shard.max_bad_records for shard in self.corpus.shards), default=0)
        if num_bad > limit:
            self._delete_shards()
            raise too_many_error(limit, num_bad, bad[0])
        for message in bad[:_MAX_NAMED_ERRORS]:
            self.log(f"warning: skipped: {message}")
        if (num_more := len(bad) - _MAX_NAMED_ERRORS) > 0:
            self.log(f"warning: skipped: {num_more} more rows and files like these")
        if not any(shard.num_documents for shard in shards):
            self._delete_shards()
            reasons = _shown(skipped) or "no rows"
            raise UserError(
                f"prepare_source={self.corpus.description} has no document with text "
                f"({self.corpus.num_files:,} files: {reasons}).{f' {bad[0]}' if bad else ''}"
            )
        return dict(sorted(skipped.items()))

    def _delete_shards(self) -> None:
        """Deletes what would be useless for a retry, which needs other text or options."""
        shutil.rmtree(self.tokenization.staging / "shards", ignore_errors=True)

    def _finish_splits(self, shards: Sequence[TokenizedShard]) -> dict[str, Split]:
        parts: dict[str, list[tuple[int, ShardSplit]]] = {}
        for number, shard in enumerate(shards):
            for split, part in shard.splits.items():
                parts.setdefault(split, []).append((number, part))
        return {
            split: write_documents(self.tokenization, split, parts[split])
            for split in sorted(parts)
        }

    def _report(
        self,
        shards: Sequence[TokenizedShard],
        num_kept: int,
        skipped: dict[str, int],
        seconds: float,
    ) -> None:
        num_documents = sum(shard.num_documents for shard in shards)
        num_bytes = sum(shard.num_bytes for shard in shards) / 1e6
        line = (
            f"Read {pluralize(num_documents, 'document')}, {num_bytes:,.1f} MB of text, from "
            f"{pluralize(self.corpus.num_files, 'file')}"
        )
        if skipped:
            line += f"; skipped: {_shown(skipped)}"
        if not num_kept:
            engine = self.tokenization.tokenizer.engine
            line += f"; encoded at {num_bytes / max(seconds, 1e-3):,.1f} MB/s ({engine})"
        self.log(line)


def _estimate_unreadable(shards: Sequence[TokenizedShard]) -> int:
    """Returns how many more documents the unreadable files hold than one each.

    Estimated from the size on disk of a document in the other files, as the number is unknown.
    """
    num_documents = sum(shard.num_documents for shard in shards)
    if not num_documents:
        return 0
    document_bytes = max(sum(shard.readable_bytes for shard in shards) / num_documents, 1.0)
    sizes = [size for shard in shards for size in shard.unreadable_bytes]
    return sum(max(round(size / document_bytes), 1) - 1 for size in sizes)


def _shown(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _tokenize_with_beam(
    tokenization: Tokenization, jobs: Sequence[ShardJob]
) -> list[dict[str, Any]]:
    """Tokenizes all shards on Beam; its workers need the same paths."""
    try:
        import apache_beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options.pipeline_options import (  # pyright: ignore[reportMissingImports]
            PipelineOptions,
        )
    except ImportError as error:
        raise UserError(
            "prepare.runner=beam needs the package apache-beam, which is not installed. Run: pip "
            "install 'jaxpretrain[beam]', or set prepare.runner=local."
        ) from error
    options = PipelineOptions(shlex.split(tokenization.keys.prepare.beam_options))
    run = functools.partial(run_once, tokenize_shard, tokenization.ledger, tokenization)
    try:
        with apache_beam.Pipeline(options=options) as pipeline:
            # Without a reshuffle, Beam would fuse everything into one bundle.
            _ = (
                pipeline
                | "Shards" >> apache_beam.Create([*enumerate(jobs)])
                | apache_beam.Reshuffle()
                | "Tokenize" >> apache_beam.Map(run)
            )
    except Exception as error:  # runners raise errors of their own about those of workers
        raise UserError(f"prepare.runner=beam: {error}") from error
    return [run(numbered_job) for numbered_job in enumerate(jobs)]
