"""Turns text into a prepared data set: `prepare`.

The folder appears under its name only when it is complete: everything is written into a sibling
`.<name>.preparing-<host>-<pid>`, synced, and renamed at the end. Imports no jax.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from MaxText.configuration.training_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TOKENIZER_NAME,
    Manifest,
    SourceEntry,
    describe,
    local_folder,
    read_manifest,
)
from MaxText.input_pipeline.preparation.survey import CorpusDigest, Survey, survey
from MaxText.input_pipeline.preparation.text_sources import TextSource, open_source
from MaxText.input_pipeline.preparation.token_writer import (
    CHUNK_LENGTH,
    TokenWriter,
    narrowest_dtype,
)
from MaxText.input_pipeline.sync import sync_file
from MaxText.input_pipeline.tokenization.text_tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

TRAIN, VALIDATION = "train", "validation"

# Text encoded at a time: enough to keep all cores busy, little enough to hold in memory (the
# tokenizers library needs some hundred bytes per token while it works).
_BATCH_BYTES = 4_000_000

# Documents on which tiktoken's ids are compared with the tokenizers library's before it is used.
_COMPARED_BYTES = 500_000

# Keys whose change makes another data set. Sources and tokenizer are compared by content instead.
_OPTIONS = ("tokenizer_vocab_size", "add_bos", "add_eos", "validation_fraction", "prepare_seed")


def prepare(
    preparation: Preparation, dataset_path: str, show: Callable[[str], None] = print
) -> Manifest:
    """Makes the data set `dataset_path`, or keeps it when it is already what is asked for.

    Args:
      preparation: the keys about preparation.
      dataset_path: local folder to make.
      show: takes lines about what was done.

    Returns:
      The manifest of the data set.

    Raises:
      UserError: no readable text, an unusable tokenizer, or a folder in the way.
    """
    if not dataset_path:
        raise UserError("dataset_path is not set: give the folder to write the data set to.")
    folder = local_folder(dataset_path, "dataset_path")
    if _in_the_way(folder):
        raise UserError(
            f"dataset_path={dataset_path} exists and is no data set. Choose another folder, or "
            "delete it."
        )
    source = open_source(preparation.prepare_source, preparation.text_field)
    with _progress("Reading", None, show) as progress:
        found = survey(source, preparation.prepare_seed, preparation.validation_fraction, progress)
    show(_describe_source(source, found))
    tokenizer = load_tokenizer(preparation.tokenizer_path) if preparation.tokenizer_path else None
    if (folder / MANIFEST_NAME).exists():
        return _keep(preparation, dataset_path, found, tokenizer, show)
    if tokenizer is None:
        tokenizer = _train(preparation, found, show)
    _compare_engines(tokenizer, found, show)
    _check_control_ids(preparation, tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    building = folder.with_name(f".{folder.name}.preparing-{socket.gethostname()}-{os.getpid()}")
    building.mkdir()
    try:
        manifest = _build(preparation, source, found, tokenizer, building, show)
        try:
            building.rename(folder)
        except OSError:
            # Another process made it meanwhile.
            if not (folder / MANIFEST_NAME).exists():
                raise
            return _keep(preparation, dataset_path, found, tokenizer, show)
        sync_file(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    show(describe(manifest))
    show(f"Wrote {folder}")
    return manifest


def _in_the_way(folder: Path) -> bool:
    if not folder.exists() or (folder / MANIFEST_NAME).exists():
        return False
    return not folder.is_dir() or any(folder.iterdir())


def _describe_source(source: TextSource, found: Survey) -> str:
    line = (
        f"Read {source.description}: {found.num_documents:,} documents, "
        f"{found.num_bytes / 1e6:.1f} MB of text in {len(source.files):,} files"
    )
    if found.skipped:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in found.skipped.items())
        line += f"; left out: {left_out}"
    return line


def _keep(
    preparation: Preparation,
    dataset_path: str,
    found: Survey,
    tokenizer: TextTokenizer | None,
    show: Callable[[str], None],
) -> Manifest:
    """The manifest that is there, if it is of the same text, tokenizer and options."""
    manifest = read_manifest(dataset_path)
    asked = _options(preparation)
    differences = [
        f"{key} was {manifest.options.get(key)!r} and is {asked[key]!r}"
        for key in _OPTIONS
        if manifest.options.get(key) != asked[key]
        and not (key == "tokenizer_vocab_size" and preparation.tokenizer_path)
    ]
    if manifest.source.sha256 != found.sha256:
        differences.append(f"its text was other ({manifest.source.description})")
    was_trained = not manifest.options.get("tokenizer_path")
    if preparation.tokenizer_path:
        same = tokenizer is not None and tokenizer.entry.sha256 == manifest.tokenizer.sha256
    else:
        same = was_trained
    if not same:
        differences.append(f"its tokenizer was other ({manifest.tokenizer.origin})")
    if differences:
        raise UserError(
            f"dataset_path={dataset_path} holds another data set: {'; '.join(differences)}. Choose "
            "another folder, or delete it to prepare it again."
        )
    show(f"Kept {dataset_path}: it already holds this text with these options")
    return manifest


def _options(preparation: Preparation) -> dict:
    return preparation.model_dump(mode="json")


def _train(preparation: Preparation, found: Survey, show: Callable[[str], None]) -> TextTokenizer:
    start = time.monotonic()
    sample_bytes = sum(len(text.encode()) for text in found.sample)
    origin = (
        f"byte-level BPE trained on {sample_bytes / 1e6:.1f} of {found.num_bytes / 1e6:.1f} MB of "
        "this text"
    )
    tokenizer = train_tokenizer(found.sample, preparation.tokenizer_vocab_size, origin)
    show(
        f"Tokenizer: {tokenizer.entry.vocab_size} ids, {origin} in {time.monotonic() - start:.1f} s"
    )
    return tokenizer


def _compare_engines(tokenizer: TextTokenizer, found: Survey, show: Callable[[str], None]) -> None:
    """Falls back to the slower library should the faster one give any other id."""
    texts: list[str] = []
    for text in found.sample:
        if texts and sum(map(len, texts)) + len(text) > _COMPARED_BYTES:
            break
        texts.append(text[:_COMPARED_BYTES])
    pairs = zip(tokenizer.encode(texts), tokenizer.encode_by_definition(texts), strict=True)
    if not all(np.array_equal(fast, exact) for fast, exact in pairs):
        tokenizer.use_definition()
        show("tiktoken gives other ids on this text: encoding with tokenizers, which is slower")


def _check_control_ids(preparation: Preparation, tokenizer: TextTokenizer) -> None:
    entry = tokenizer.entry
    for key, wanted, control in (
        ("add_eos", preparation.add_eos, entry.eos_id),
        ("add_bos", preparation.add_bos, entry.bos_id),
    ):
        if wanted and control is None:
            which = key.removeprefix("add_")
            raise UserError(
                f"{key}=true, and the tokenizer ({entry.origin}) names no {which} token. Put a "
                f'tokenizer_config.json with "{which}_token" beside its {TOKENIZER_NAME}, or set '
                f"{key}=false."
            )


def _remove_leftovers(folder: Path) -> None:
    """Deletes what earlier preparations on this machine left when they were killed."""
    prefix = f".{folder.name}.preparing-{socket.gethostname()}-"
    for leftover in list(folder.parent.iterdir()):
        process = leftover.name.removeprefix(prefix)
        if leftover.name.startswith(prefix) and process.isdigit() and not _alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _build(
    preparation: Preparation,
    source: TextSource,
    found: Survey,
    tokenizer: TextTokenizer,
    building: Path,
    show: Callable[[str], None],
) -> Manifest:
    """Writes all files of the data set into `building`, the manifest last."""
    entry = tokenizer.entry
    names = [TRAIN]
    if preparation.validation_fraction > 0 and found.num_documents > 1:
        names.append(VALIDATION)
    elif preparation.validation_fraction > 0:
        show("There is 1 document, so none is held out: evaluation needs two or more")
    writers = {name: TokenWriter(building / name, entry.vocab_size) for name in names}
    before = np.array([entry.bos_id] if preparation.add_bos else [], np.uint32)
    after = np.array([entry.eos_id] if preparation.add_eos else [], np.uint32)
    start = time.monotonic()
    index = 0
    digest = CorpusDigest()
    try:
        with _progress("Encoding", found.num_bytes, show) as progress:
            for texts in _batches(source):
                for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
                    encoded = text.encode()
                    digest.add(encoded)
                    split = VALIDATION if index in found.held_out else TRAIN
                    writers[split].add(np.concatenate([before, ids, after]), len(encoded))
                    index += 1
                    progress(len(encoded))
        splits = {name: writer.finish() for name, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.close()
        raise
    if digest.hexdigest() != found.sha256:
        raise UserError(
            f"The files of prepare_source={preparation.prepare_source} changed while they were "
            "read. Run again when they are no longer being written."
        )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=entry,
        dtype=narrowest_dtype(entry.vocab_size),
        chunk_length=CHUNK_LENGTH,
        splits=splits,
        source=SourceEntry(
            description=source.description,
            sha256=found.sha256,
            num_files=len(source.files),
            skipped=found.skipped,
        ),
        options=_options(preparation),
    )
    for name, contents in (
        (TOKENIZER_NAME, tokenizer.file_text),
        (MANIFEST_NAME, manifest.to_json()),
    ):
        (building / name).write_text(contents, encoding="utf-8")
        sync_file(building / name)
    sync_file(building)
    num_tokens = sum(split.num_tokens for split in splits.values())
    seconds = time.monotonic() - start
    show(f"Encoded {num_tokens:,} tokens in {seconds:.1f} s ({tokenizer.engine})")
    return manifest


def _batches(source: TextSource) -> Iterator[list[str]]:
    """Documents in groups of about _BATCH_BYTES characters."""
    batch: list[str] = []
    size = 0
    for text in source.documents():
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _progress(
    title: str, num_bytes: int | None, show: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done since its last call.

    Draws a bar when stderr is a terminal, else shows a line at each quarter of what takes longer
    than a few seconds.
    """
    if sys.stderr.isatty():
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=num_bytes)
            yield lambda done: bar.advance(task, done)
        return
    start = time.monotonic()
    done = quarters = 0

    def advance(more: int) -> None:
        nonlocal done, quarters
        done += more
        if num_bytes and done * 4 // num_bytes > quarters and time.monotonic() - start > 3:
            quarters = done * 4 // num_bytes
            show(f"{title}: {done / 1e6:.1f} of {num_bytes / 1e6:.1f} MB")

    yield advance
