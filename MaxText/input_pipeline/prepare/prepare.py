"""Prepares text as a tokenized dataset, or as records for other programs.

Everything is written to the hidden `.<name>.preparing` next to the folder, synced, and renamed when
complete. A killed preparation resumes there when the same command runs again. Datasets in buckets
are prepared locally, then uploaded, the manifest last.

Raw text of a run is tokenized at first use into a prepared dataset, `<cache_dir>/text/<hash>/`. The
hash covers everything that affects the ids, so a changed file gets a new folder.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from MaxText.config.data_sections import DataConfig, PreparationConfig
from MaxText.errors import UserError
from MaxText.input_pipeline import local_cache
from MaxText.input_pipeline.document_sources.corpus import Corpus, open_corpus, split_into_shards
from MaxText.input_pipeline.document_sources.source_files import resolve_files
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.prepare import sampling
from MaxText.input_pipeline.prepare.job import TokenizationJob
from MaxText.input_pipeline.prepare.process_pool import run_jobs
from MaxText.input_pipeline.prepare.record_export import (
    FILE_LISTS,
    export_records,
    make_export,
    record_options,
)
from MaxText.input_pipeline.prepare.token_shards import Tokenization
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, Manifest, read_manifest
from MaxText.input_pipeline.tokenization.hugging_face import train_tokenizer
from MaxText.input_pipeline.tokenization.interface import Tokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage import atomic, file_access
from MaxText.storage.file_access import absolute, file_infos, is_url, local_path

# In record exports: the manifest of the source dataset.
_RECORDS_MANIFEST_NAME = "records_manifest.json"

_FORMAT = "prepare_output_format"
# Sources and tokenizers are compared by content.
_COMPARED_BY_CONTENT = {"prepare_source", "text_field", "tokenizer_path", "tokenizer_type"}
_OPTIONS_OF_IDS = {"add_bos", "add_eos", "prepare_minimum_tokens", "prepare_separator_id"}
_OPTIONS_OF_TRAINED_TOKENIZERS = {"tokenizer_vocab_size", "tokenizer_special_tokens"}
# Of fsspec; the first ones upload single files at best, and to few servers.
_READ_ONLY_PROTOCOLS = {"http", "https", "data", "github", "git", "libarchive", "tar", "zip"}
# Fields that affect neither the dataset nor its manifest, and `records`, stored by dotted key.
_NOT_IN_MANIFEST = {"prepare_num_workers", "prepare", "records"}

# Keys that affect the ids of raw text in a run; others keep their defaults.
_KEYS_OF_TEXT = ("tokenizer_path", "tokenizer_type", "text_field", "add_bos", "add_eos")


@dataclasses.dataclass(frozen=True)
class _Request:
    """Text to prepare and its keys; `log` takes progress lines."""

    preparation: PreparationConfig
    corpus: Corpus
    log: Callable[[str], None]
    digest_path: Path | None = None  # cache file for the digest of the text

    @property
    def is_records(self) -> bool:
        """Whether the output is records for other programs."""
        return self.preparation.prepare_output_format in FILE_LISTS

    @property
    def manifest_name(self) -> str:
        """Name of the file marking a folder as complete."""
        return _RECORDS_MANIFEST_NAME if self.is_records else MANIFEST_NAME

    def is_complete(self, folder: str | Path) -> bool:
        """Returns whether a folder has the manifest."""
        return bool(file_access.path_type(f"{folder}/{self.manifest_name}"))

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the text."""
        has_tokenizer = self.preparation.tokenizer_path or self.preparation.tokenizer_type == "byte"
        return not has_tokenizer and not self.preparation.exports_text


def prepare(
    preparation: PreparationConfig,
    dataset_path: str,
    log: Callable[[str], None] = print,
    *,
    cache_dir: Path | None = None,
    max_bad_records: int = 0,
) -> Manifest:
    """Prepares the dataset `dataset_path`, unless it matches already.

    Waits if another process is preparing it.

    Args:
      preparation: The text, the tokenizer and the output format.
      dataset_path: Folder or URL to write to.
      log: Takes lines for the terminal.
      cache_dir: Folder in which bucket datasets are staged and text digests cached. None: the
        default staging folder, and no digests.
      max_bad_records: How many malformed or unreadable documents to skip.

    Returns:
      The manifest of the dataset, or of the one that records were exported from.

    Raises:
      UserError: No readable text, an unusable tokenizer, or other contents in the folder.
    """
    if not dataset_path:
        raise UserError("dataset_path is not set: give the folder to write the data set to.")
    _check_writable_protocol(dataset_path)
    source = preparation.prepare_source
    field = preparation.text_field
    corpus = open_corpus(source, field, max_bad_records=max_bad_records)
    for note in corpus.notes:
        log(note)
    request = _Request(preparation, corpus, log, _digest_path(corpus, cache_dir))
    if is_url(dataset_path):
        staging = cache_dir or DataConfig().local_cache_dir
        return _prepare_and_upload(request, dataset_path.rstrip("/"), staging)
    # A link stays a link: the data set is written to the folder that it leads to.
    folder = Path(local_path(dataset_path))
    return _prepare_folder(request, folder.resolve() if folder.is_symlink() else folder)


def _check_writable_protocol(dataset_path: str) -> None:
    """Raises UserError for a URL that can only be read, before anything is tokenized."""
    if not is_url(dataset_path):
        return
    protocol = dataset_path.split("://")[0].lower()
    if protocol in _READ_ONLY_PROTOCOLS:
        raise UserError(
            f"dataset_path={dataset_path}: {protocol}:// can only be read, and a data set is to be "
            "written there. Name a local folder or one in a bucket (gs://)."
        )
    file_access.file_system(dataset_path)  # a protocol that is unknown, or needs a package


def _digest_path(corpus: Corpus, cache_dir: Path | None) -> Path | None:
    """Returns a name for the text's files as they are now.

    None if a file system has no modification times or version tags, or without cache_dir.
    """
    identity = corpus.identity() if cache_dir else {"files": []}
    if cache_dir is None or not all(file.tag for file in identity["files"]):
        return None
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache_dir / "text_digests" / name[:32]


def _prepare_folder(request: _Request, folder: Path) -> Manifest:
    """Prepares a local dataset, or returns the manifest of one that matches."""
    check = functools.partial(_check_existing, request, folder, location=str(folder))
    if request.is_complete(folder):
        return check()  # without the lock, as the folder may be read-only
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"dataset_path={folder} exists and is not a data set of the requested kind. "
            "Choose another folder, or delete it."
        )
    manifest = _prepare_if_needed(request, folder, check)
    _cache_text_sha256(request, manifest.source.sha256)
    return manifest


def _prepare_if_needed(request: _Request, folder: Path, check: Callable[[], Manifest]) -> Manifest:
    """Prepares a dataset, or waits until `check` finds another process's."""
    staging = _staging(folder)
    log = request.log
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic.lock(folder.with_name(f".{folder.name}.lock"), log):
            if request.is_complete(folder):
                return check()
            try:
                manifest = _tokenize(request, staging)
                _finish(request, staging, folder)
            except BaseException:
                if any((staging / "shards").glob("*.json")):
                    log(f"Finished shards are kept in {staging}. Run the same command to resume.")
                else:
                    shutil.rmtree(staging, ignore_errors=True)
                raise
    except OSError as error:
        # Readers report errors of the text themselves, so this one is about the folder.
        raise write_error(folder, error) from error
    log(f"Wrote {folder}")
    return manifest


def _staging(folder: Path) -> Path:
    """Returns the folder in which a dataset is prepared."""
    return folder.with_name(f".{folder.name}.preparing")


def _tokenize(request: _Request, staging: Path) -> Manifest:
    """Builds the tokenized dataset in the staging folder; returns its manifest."""
    preparation = request.preparation
    if request.is_records:
        make_export(staging, preparation, staging)  # only its checks, before the work
    tokenizer = _open_tokenizer(request)
    if preparation.exports_text:
        tokenization = Tokenization(staging, tokenizer, preparation)
    else:
        ids_before, ids_after = _control_ids(preparation, tokenizer)
        tokenization = Tokenization(
            staging, tokenizer, preparation, ids_before=ids_before, ids_after=ids_after
        )
    job = TokenizationJob(request.corpus, tokenization, request.log)
    return job.run(_options(preparation))


def _finish(request: _Request, staging: Path, folder: Path) -> None:
    """Exports records if requested, and renames the result to its final name."""
    complete = staging / "data_set"
    if request.is_records:
        options = json.dumps(_options(request.preparation)).encode()
        records = staging / f"records-{hashlib.sha256(options).hexdigest()[:16]}"
        export_records(complete, request.preparation, records, request.log)
        manifest = (complete / MANIFEST_NAME).read_bytes()
        atomic.atomic_write_bytes(records / _RECORDS_MANIFEST_NAME, manifest)
        complete = records
    complete.rename(folder)
    atomic.sync_file(folder.parent)
    (staging / "build_spec.json").unlink()  # half of the folder must not be resumed
    shutil.rmtree(staging, ignore_errors=True)


def write_error(location: object, error: OSError) -> UserError:
    """Returns the error, with a remedy, for an unwritable folder."""
    if isinstance(error, BrokenPipeError):
        raise error  # stdout, for example piped to `head`
    return UserError(
        f"{error.filename or location} cannot be written ({error.strerror or error}). Fix that or "
        "choose another dataset_path, and run the same command to resume: finished shards are kept."
    )


def _open_tokenizer(request: _Request) -> Tokenizer:
    """Trains or loads the tokenizer, and checks its fast engine on the text."""
    if request.trains_tokenizer:
        sample = _sample_text(request)
        tokenizer = _train_tokenizer(request, sample)
    else:
        tokenizer = _load_tokenizer(request)
        sample = _all_texts(request.corpus)
    for note in tokenizer.notes:
        request.log(note)
    fast_engine = tokenizer.engine
    if not tokenizer.check_engine(sample):
        request.log(
            f"{fast_engine} gives different ids on this text: using {tokenizer.engine}, which is "
            "slower"
        )
    return tokenizer


def _all_texts(corpus: Corpus) -> Iterator[str]:
    """Yields the text of every document; the engine's check reads the first ones."""
    for shard in corpus.shards:
        for document in shard.documents(Skipped()):
            yield document.text


def _sample_text(request: _Request) -> tuple[str, ...]:
    """Returns the text to train a tokenizer on, without held-out documents."""
    seed = request.preparation.prepare_seed
    validation_fraction = request.preparation.validation_fraction
    if request.corpus.splits:
        validation_fraction = 0.0
    texts = _read_shards(request, sampling.sampling_jobs(request.corpus, seed))
    return sampling.join_samples(texts, seed, validation_fraction)


def _train_tokenizer(request: _Request, sample: Sequence[str]) -> Tokenizer:
    """Trains a byte-level BPE on a sample of the text."""
    start_time = time.monotonic()
    sample_bytes = sum(len(text.encode()) for text in sample)
    origin = f"byte-level BPE trained on {sample_bytes / 1e6:.1f} MB of this text"
    tokenizer = train_tokenizer(
        sample,
        request.preparation.tokenizer_vocab_size,
        origin,
        request.preparation.tokenizer_special_tokens,
    )
    num_ids = tokenizer.entry.vocab_size
    seconds = time.monotonic() - start_time
    request.log(f"Tokenizer: {num_ids} ids, {origin} in {seconds:.1f} s")
    return tokenizer


def _load_tokenizer(request: _Request) -> Tokenizer:
    """Loads the tokenizer of the keys; that of bytes if text is exported."""
    if request.preparation.exports_text:
        return load_tokenizer("", "byte")
    return load_tokenizer(request.preparation.tokenizer_path, request.preparation.tokenizer_type)


def _read_shards(request: _Request, jobs: list[sampling.ReadJob]) -> list[sampling.ShardText]:
    """Reads shards in parallel."""
    return run_jobs(
        "Reading",
        sampling.read_shard,
        request.preparation,
        jobs,
        sizes=[job.shard.num_bytes for job in jobs],
        max_processes=request.preparation.prepare_num_workers,
        log=request.log,
    )


def _control_ids(
    preparation: PreparationConfig, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids before and after each document.

    Raises UserError if the tokenizer lacks a token that is to be added.
    """
    entry = tokenizer.entry
    separator = preparation.prepare_separator_id
    if separator >= entry.vocab_size:
        raise UserError(
            f"prepare_separator_id={separator} is not below {entry.vocab_size}, the ids of the "
            f"tokenizer ({entry.origin}). Give one of its ids, or -1 for its end of text."
        )
    ids_before = ()
    ids_after = ()
    if preparation.add_bos:
        ids_before = (_control_id("bos", entry.bos_id, entry.origin),)
    if preparation.add_eos:
        eos_id = entry.eos_id if separator < 0 else separator
        ids_after = (_control_id("eos", eos_id, entry.origin),)
    return ids_before, ids_after


def _control_id(name: str, control_id: int | None, origin: str) -> int:
    """Returns a control id; UserError if it is None."""
    if control_id is None:
        raise UserError(
            f"add_{name}=true, and the tokenizer ({origin}) names no {name} token. Put "
            f'a tokenizer_config.json with "{name}_token" next to it, or set add_{name}=false.'
        )
    return control_id


def _check_existing(request: _Request, folder: Path, location: str) -> Manifest:
    """Returns the manifest in `folder` if it matches the request.

    `location` names the dataset in messages. Raises UserError, listing the differences, otherwise.
    """
    manifest = read_manifest(str(folder), request.manifest_name)
    differences = _different_options(request, manifest)
    if request.trains_tokenizer:
        has_path = bool(manifest.options.get("tokenizer_path"))
        same_tokenizer = not has_path and manifest.options.get("tokenizer_type") != "byte"
    else:
        tokenizer = _load_tokenizer(request)
        same_tokenizer = tokenizer.entry.sha256 == manifest.tokenizer.sha256
    if not same_tokenizer:
        differences.append(f"different tokenizer ({manifest.tokenizer.origin})")
    # Read all text only if nothing else differs and no digest is cached.
    if not differences and _text_sha256(request) != manifest.source.sha256:
        differences.append(f"different source text ({manifest.source.description})")
    if differences:
        raise UserError(
            f"dataset_path={location} is a different data set: {'; '.join(differences)}. Choose "
            "another folder, or delete it to prepare it again."
        )
    request.log(f"Kept {location}: it already holds this text with these options")
    return manifest


def _text_sha256(request: _Request) -> str:
    """Returns the digest of the text, from the cache or by reading all of it."""
    path = request.digest_path
    with contextlib.suppress(OSError):
        if path and local_cache.mark_used(path):
            return path.read_text(encoding="ascii")
    jobs = [sampling.ReadJob(number, shard) for number, shard in enumerate(request.corpus.shards)]
    texts = _read_shards(request, jobs)
    sha256 = sampling.corpus_digest([text.sha256 for text in texts])
    _cache_text_sha256(request, sha256)
    return sha256


def _cache_text_sha256(request: _Request, sha256: str) -> None:
    """Stores the digest of the text for later commands, if there is a cache."""
    path = request.digest_path
    if path:
        with contextlib.suppress(OSError):  # the cache may be read-only
            local_cache.delete_unused(path.parent.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.atomic_write_text(path, sha256)


def _different_options(request: _Request, manifest: Manifest) -> list[str]:
    """Returns a phrase per option with another value in the manifest than in the request."""
    requested = _options(request.preparation)
    # A key that the manifest lacks had its default.
    prepared = _options(PreparationConfig()) | manifest.options
    ignored = set(_COMPARED_BY_CONTENT)
    if request.preparation.exports_text:
        ignored |= _OPTIONS_OF_IDS
    if not request.trains_tokenizer:
        ignored |= _OPTIONS_OF_TRAINED_TOKENIZERS
    if not request.is_records:
        ignored |= {_FORMAT, *record_options(request.preparation)}
    return [
        f"{key} was {prepared[key]!r} and is {requested[key]!r}"
        for key in requested
        if key not in ignored and prepared[key] != requested[key]
    ]


def _options(preparation: PreparationConfig) -> dict[str, Any]:
    """Returns the options that manifests store, by the keys that users type."""
    options = preparation.model_dump(mode="json", exclude=_NOT_IN_MANIFEST)
    return options | record_options(preparation)


def _prepare_and_upload(request: _Request, url: str, cache_dir: Path) -> Manifest:
    """Prepares the dataset at `url`, or keeps one matching the request.

    Readers recognize a dataset by its manifest, which is uploaded last. Several machines may
    prepare the same one concurrently: they write the same bytes. Raises UserError as `prepare`
    does, if other files are there, or if the bucket cannot be written.
    """
    staging = cache_dir / "prepared" / hashlib.sha256(url.encode()).hexdigest()[:24]
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise local_cache.cache_write_error(cache_dir, error) from error
    with atomic.lock(staging.with_suffix(".lock"), request.log):
        local_cache.mark_used(staging)
        local_cache.delete_unused(cache_dir)
        if request.is_complete(url):
            copied = local_cache.copy_folder(url, cache_dir)
            assert copied is not None, url
            return _check_existing(request, copied, location=url)
        folder = staging / "data_set"
        manifest = _prepare_folder(request, folder)
        _upload(folder, url, last=request.manifest_name)
        shutil.rmtree(staging, ignore_errors=True)
        request.log(f"Uploaded it to {url}")
        return manifest


def _upload(folder: Path, url: str, last: str) -> None:
    """Uploads all files of a folder, with `last` as the last one.

    Raises UserError if the bucket has other files there, or cannot be written.
    """
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    system, bucket_path = file_access.file_system(url)
    try:
        existing = {name[len(bucket_path) + 1 :] for name in system.find(bucket_path)}
        # `last` means that another machine finished meanwhile, maybe with other contents.
        conflicting = existing - {*files} | existing & {last}
        if conflicting:
            raise UserError(
                f"dataset_path={url} has other files ({min(conflicting)}). Choose another folder."
            )
        local_cache.upload({file: folder / file for file in files}, url, last)
    except Exception as error:  # fsspec backends raise their own errors
        if file_access.is_mistake(error):
            raise
        raise UserError(
            f"dataset_path={url} cannot be written ({error}). The data set is kept in {folder}: "
            "run the same command to upload it."
        ) from error


def tokenize_to_cache(
    files: list[str], preparation: PreparationConfig, cache_dir: Path, log: Callable[[str], None]
) -> Path:
    """Returns the folder of the tokenized `files`, which are tokenized at first use.

    If several processes (or machines that share `cache_dir`) need it, one works and the others
    wait. Finished shards of a killed process are kept.

    Args:
      files: Files of text.
      preparation: The tokenizer and the keys in _KEYS_OF_TEXT; others keep their defaults.
      cache_dir: local_cache_dir.
      log: Takes lines for the terminal.

    Raises:
      UserError: There is no tokenizer, or the text cannot be read or tokenized.
    """
    if not preparation.tokenizer_path and preparation.tokenizer_type != "byte":
        raise UserError(
            f"{files[0]} holds text, and tokenizer_path is not set. Set it to the tokenizer of the "
            "model, name records of token ids, or prepare the text first (prepare_data.py)."
        )
    keys = preparation.model_dump(include={*_KEYS_OF_TEXT})
    tokenizer = load_tokenizer(preparation.tokenizer_path, preparation.tokenizer_type)
    identity = {
        "files": [file._replace(path=absolute(file.path)) for file in file_infos(files)],
        "tokenizer": tokenizer.entry.sha256,
        "control ids": [tokenizer.entry.bos_id, tokenizer.entry.eos_id],
        **{key: keys[key] for key in ("text_field", "add_bos", "add_eos")},
    }
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir / "text" / name
    if not local_cache.mark_used(folder):
        local_cache.mark_used(_staging(folder))
        local_cache.delete_unused(cache_dir)
        notes: list[str] = []
        sources = [source for path in files for source in resolve_files(path, notes)]
        shards = split_into_shards(sources, [""] * len(sources), preparation.text_field)
        description = sources[0].name
        if len(sources) > 1:
            description = f"{len(sources):,} files ({sources[0].name} ...)"
        log(f"Tokenizing the text of {description} once, into {folder}")
        corpus = Corpus(description, len(sources), shards)
        keys |= {"prepare_source": ",".join(files), "validation_fraction": 0.0}
        request = _Request(PreparationConfig(**keys), corpus, log)
        _prepare_if_needed(request, folder, lambda: read_manifest(str(folder)))
    return folder
