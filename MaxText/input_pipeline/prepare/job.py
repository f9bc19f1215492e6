"""Builds a tokenized dataset in a staging folder, resumably.

    <staging>/build_spec.json  tokenization settings
    <staging>/shards/          ledger of finished shards, see token_shards
    <staging>/data_set/        the dataset, complete once it has a manifest

The folder outlives the process; the next process tokenizes the remaining shards.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from MaxText.errors import UserError
from MaxText.formatting import pluralize
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.text_streams import too_many_error
from MaxText.input_pipeline.prepare.runners import (
    tokenize_locally,
    tokenize_with_beam,
    tokenize_with_datatrove,
)
from MaxText.input_pipeline.prepare.sampling import corpus_digest, held_out_threshold
from MaxText.input_pipeline.prepare.token_shards import (
    ShardJob,
    ShardSplit,
    Tokenization,
    TokenizedShard,
    tokenize_again,
    write_documents,
)
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    SourceEntry,
    Split,
    TokenizerEntry,
)
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

        Args:
          options: Options of the preparation, for the manifest.

        Returns:
          The manifest.

        Raises:
          UserError: No document has text, a file cannot be read or changed while it was read, or a
            process was killed.
        """
        start_time = time.monotonic()
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
            tokenizer=self._tokenizer_entry(),
            dtype=tokenization.dtype,
            format="bin",
            chunk_length=1,
            splits=self._finish_splits(shards),
            source=source,
            options=options,
        )
        dataset_folder = tokenization.staging / "data_set"
        (dataset_folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        tokenizer_files = tokenization.tokenizer.save(dataset_folder)
        for path in (*tokenizer_files, dataset_folder / MANIFEST_NAME, dataset_folder):
            sync_file(path)
        self._report(shards, num_kept, source.skipped, time.monotonic() - start_time)
        return manifest

    def _tokenizer_entry(self) -> TokenizerEntry:
        """Returns the tokenizer for the manifest; a separator replaces its eos."""
        entry = self.tokenization.tokenizer.entry
        if not self.tokenization.ids_after:
            return entry
        return entry.model_copy(update={"eos_id": self.tokenization.ids_after[0]})

    def _open_staging(self) -> None:
        """Creates the folder, deleting results of another request."""
        staging = self.tokenization.staging
        spec_path = staging / "build_spec.json"
        spec = {"layout": 3, **self.tokenization.summary(), "corpus": self.corpus.identity()}
        spec_text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
        has_results = spec_path.exists() and (staging / "data_set").exists()
        if has_results and spec_path.read_text(encoding="utf-8") == spec_text:
            return
        if staging.exists():
            self.log(f"Deleting {staging}: an unfinished data set of other text or options")
            shutil.rmtree(staging)
        for name in ("shards", "data_set"):
            (staging / name).mkdir(parents=True)
        atomic_write_text(spec_path, spec_text)

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
        runner = tokenization.keys.prepare.runner
        if runner == "beam":
            results = tokenize_with_beam(tokenization, jobs)
        elif runner == "datatrove":
            results = tokenize_with_datatrove(tokenization, jobs)
        else:
            results = tokenize_locally(tokenization, jobs, corpus, log)
        return [TokenizedShard.model_validate(shard) for shard in results], num_kept

    def _ensure_nonempty_splits(self, shards: list[TokenizedShard]) -> None:
        """Holds out the document with the lowest hash if no other is."""
        shard_number = min(range(len(shards)), key=lambda number: shards[number].lowest)
        shard = shards[shard_number]
        num_documents = sum(shard.num_documents for shard in shards)
        if shard.lowest >= shard.threshold and num_documents > 1:
            job = ShardJob(shard_number, self.corpus.shards[shard_number], shard.lowest + 1)
            shards[shard_number] = tokenize_again(self.tokenization, job, shard)

    def _skipped(self, shards: Sequence[TokenizedShard]) -> dict[str, int]:
        """Logs skipped rows and files, and returns counts by reason.

        Raises UserError if more documents are unreadable than bad_records.maximum allows, or if no
        document has text.
        """
        skipped = sum((Counter(shard.skipped) for shard in shards), Counter[str]())
        bad_messages = [message for shard in shards for message in shard.bad]
        num_estimated = _estimate_unreadable(shards)
        num_bad = sum(shard.num_bad for shard in shards) + num_estimated
        if num_estimated:
            skipped["unreadable"] += num_estimated
        limit = max((shard.max_bad_records for shard in self.corpus.shards), default=0)
        if num_bad > limit:
            self._delete_shards()
            raise too_many_error(limit, num_bad, bad_messages[0])
        for message in bad_messages[:_MAX_NAMED_ERRORS]:
            self.log(f"warning: skipped: {message}")
        num_more = len(bad_messages) - _MAX_NAMED_ERRORS
        if num_more > 0:
            self.log(f"warning: skipped: {num_more} more rows and files like these")
        if not any(shard.num_documents for shard in shards):
            self._delete_shards()
            reasons = _format_counts(skipped) or "no rows"
            problem = (
                f"prepare_source={self.corpus.description} has no document with text "
                f"({self.corpus.num_files:,} files: {reasons})."
            )
            raise UserError(" ".join([problem, *bad_messages[:1]]))
        return dict(sorted(skipped.items()))

    def _delete_shards(self) -> None:
        """Deletes what would be useless for a retry, which needs other text or options."""
        shutil.rmtree(self.tokenization.staging / "shards", ignore_errors=True)

    def _finish_splits(self, shards: Sequence[TokenizedShard]) -> dict[str, Split]:
        """Writes the document files of all splits; returns their manifest entries."""
        shards_by_split: dict[str, list[tuple[int, ShardSplit]]] = {}
        for shard_number, shard in enumerate(shards):
            for split, shard_split in shard.splits.items():
                shards_by_split.setdefault(split, []).append((shard_number, shard_split))
        return {
            split: write_documents(self.tokenization, split, shards_by_split[split])
            for split in sorted(shards_by_split)
        }

    def _report(
        self,
        shards: Sequence[TokenizedShard],
        num_kept: int,
        skipped: dict[str, int],
        seconds: float,
    ) -> None:
        """Logs the size of the corpus, and the speed if no shard was already tokenized."""
        num_documents = sum(shard.num_documents for shard in shards)
        num_bytes = sum(shard.num_bytes for shard in shards) / 1e6
        line = (
            f"Read {pluralize(num_documents, 'document')}, {num_bytes:,.1f} MB of text, from "
            f"{pluralize(self.corpus.num_files, 'file')}"
        )
        if skipped:
            line += f"; skipped: {_format_counts(skipped)}"
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


def _format_counts(skipped: dict[str, int]) -> str:
    """Returns `12 empty, 1 malformed`."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
