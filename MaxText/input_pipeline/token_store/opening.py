"""Opens any token data for training.

Prepared flat files and Megatron data are read in place. Other records are imported at first use,
and text is tokenized then. Names tell the format, and the first record whether records hold ids or
text.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from MaxText.config.data_sections import DataConfig, PreparationConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources import tables
from MaxText.input_pipeline.document_sources.records import (
    USUAL_FIELDS,
    holds_text,
    read_chunks,
    read_ids,
)
from MaxText.input_pipeline.document_sources.source_files import FileRange
from MaxText.input_pipeline.local_cache import Arrays, copy_files, copy_folder
from MaxText.input_pipeline.token_store.import_records import RecordImport
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    Split,
    check_files,
    describe,
    find_split,
    read_manifest,
)
from MaxText.input_pipeline.token_store.megatron import open_megatron
from MaxText.input_pipeline.token_store.store import (
    TokenDataset,
    boundaries_digest,
    foreign_data,
    load_offsets,
    open_flat,
)
from MaxText.input_pipeline.tokenization.load_tokenizer import find_tokenizer_near
from MaxText.pluralize import pluralize
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo, is_url, local_path, relative_names

ACCEPTED = (
    "a folder that prepare_data.py wrote; .tfrecord, .array_record, .parquet or .arrow files of "
    "token ids or text; webdataset .tar archives of tensors; Megatron's .bin with .idx; .txt or "
    ".jsonl text"
)

_NAMES = {
    "tfrecord": re.compile(r"\.tfrecords?(?![a-z])|tfrecord-\d"),
    "arrayrecord": re.compile(r"\.array_?records?(?![a-z])"),
    "parquet": re.compile(r"\.parquet(?![a-z])"),
    "arrow": re.compile(r"\.arrow(?![a-z])"),
    "megatron": re.compile(r"\.(bin|idx)$"),
    "webdataset": re.compile(r"\.(tar|tar\.gz|tgz)$"),
    "text": re.compile(r"(?i)^(?!readme).*\.(txt|md|rst|text|jsonl)(\.(gz|zst|xz|bz2))?$"),
}


@dataclasses.dataclass(frozen=True)
class OpenRequest:
    """The data to open for training or evaluation."""

    data: DataConfig
    preparation: PreparationConfig
    for_training: bool
    vocab_size: int
    log: Callable[[str], None]
    location: str = ""
    key: str = ""  # configuration key of the location

    @property
    def where(self) -> str:
        """Key and location, for messages."""
        return f"{self.key}={self.location}"

    @property
    def split(self) -> str:
        return self.data.train_split if self.for_training else self.data.eval_split


def _choose_format(request: OpenRequest, files: list[FileInfo]) -> tuple[str, list[FileInfo]]:
    """Returns the file format of a location and the files in this format.

    Formats are tfrecord, arrayrecord, parquet, arrow, webdataset, megatron and text. Raises
    UserError if it is unknown or ambiguous.
    """
    by_kind: dict[str, list[FileInfo]] = collections.defaultdict(list)
    for file in files:
        name = file.path.rsplit("/", 1)[-1]
        by_kind[next((kind for kind in _NAMES if _NAMES[kind].search(name)), "")].append(file)
    kind = request.data.grain_file_type
    if kind != "auto":
        return kind, by_kind[kind] or files
    by_kind.pop("", None)  # auxiliary files
    if len(by_kind) > 1:
        by_kind.pop("text", None)  # a README.txt next to records
    if len(by_kind) == 1:
        return by_kind.popitem()
    if not by_kind:
        raise UserError(
            f"{request.where}: {files[0].path} has an unknown format. Accepted: {ACCEPTED}. If "
            "its name does not end like these, set grain_file_type."
        )
    found = (f"{len(of)} {kind} ({Path(of[0].path).name})" for kind, of in by_kind.items())
    raise UserError(
        f"{request.where} holds files of several formats: {', '.join(found)}. Set grain_file_type "
        "to the one to read, or give a pattern that matches only these."
    )


def _text_not_read(listed: list[FileInfo], kind: str) -> str:
    """Describes the text files next to records; often they describe these."""
    names = [Path(file.path).name for file in listed]
    texts = [name for name in names if _NAMES["text"].search(name)]
    if kind == "text" or not texts:
        return ""
    return f"; not read: {pluralize(len(texts), 'text file')} next to them ({texts[0]} ...)"


def _choose_split(request: OpenRequest, files: list[FileInfo]) -> list[FileInfo]:
    """Selects files by eval_split below their common folder, or UserError."""
    evaluation = request.data.eval_split
    for_training = request.for_training
    names = relative_names([file.path for file in files])
    chosen = [
        file
        for file, name in zip(files, names, strict=True)
        if (evaluation in name) != for_training
    ]
    if not chosen:
        which, use = ("every", "train") if for_training else ("no", "evaluate")
        raise UserError(
            f"{request.where}: {which} file has eval_split={evaluation} in its name (for example "
            f"{Path(files[0].path).name}), so there is none to {use} on. Set eval_split to what "
            "only files for evaluation have in their names, name these in grain_eval_files, or "
            "switch evaluation off (eval_interval=-1)."
        )
    return chosen


def open_token_data(request: OpenRequest) -> TokenDataset:
    """Opens the data at a location.

    A prepared dataset has splits, of which `split` is read. Of other files, evaluation reads those
    whose name contains `split`, and training those whose name does not contain data.eval_split;
    grain_eval_files are all read for evaluation. Raises BadRecordError for a damaged file, and
    UserError if nothing is there, the format is unknown, or the split is missing.
    """
    location = request.location
    kind = request.data.grain_file_type
    if kind == "prepared" or (kind == "auto" and _is_prepared(request)):
        return _open_prepared(request, location, request.split)
    listed = _find(request)
    kind, files = _choose_format(request, listed)
    if request.for_training or request.key != "grain_eval_files":
        files = _choose_split(request, files)
    files = file_access.without_repeated_links(files)
    tokens = _open_files(request, files, kind)
    if tokens.tokenizer_folder is not None:
        return tokens
    named = request.preparation.tokenizer_path
    folder = find_tokenizer_near(files[0].path, location, named)
    description = tokens.description + _text_not_read(listed, kind)
    return dataclasses.replace(tokens, tokenizer_folder=folder, description=description)


def _open_files(request: OpenRequest, files: list[FileInfo], kind: str) -> TokenDataset:
    data = request.data
    cache_dir = request.data.local_cache_dir
    if kind == "megatron":
        return open_megatron(files, request.key, request.location, cache_dir)
    field = data.token_records.field
    fields = (field,) if field else ()
    paths = [file.path for file in files]
    if kind == "text" or holds_text(paths, kind, fields, request.preparation.text_field):
        from MaxText.input_pipeline.prepare.prepare import tokenize_to_cache

        folder = tokenize_to_cache(paths, request.preparation, cache_dir, request.log)
        return _open_prepared(request, str(folder), "train")
    has_labels = False
    # Names from earlier versions, so that their runs can be resumed.
    if kind in ("parquet", "arrow"):
        identity, has_labels = _table_identity(request, paths[0], fields or USUAL_FIELDS)
    elif kind == "webdataset":
        identity = f"TarTensors(field={field!r})"
    else:
        name = {"tfrecord": "TFRecordIds", "arrayrecord": "ArrayRecordIds"}[kind]
        identity = f"{name}(names={fields or USUAL_FIELDS})"
    read = functools.partial(read_ids, kind=kind, fields=fields)
    eos_id = data.token_records.eos_id
    bad = data.bad_records
    caches = (cache_dir, data.cache_url)
    skip = bad.action == "skip"
    job = RecordImport(files, read, identity, *caches, eos_id, skip, bad.maximum, has_labels)
    return _open_records(request, kind, job)


def _is_prepared(request: OpenRequest) -> bool:
    location = request.location
    # Web servers may answer requests for any name.
    if location.startswith(("http://", "https://")):
        return False
    return _exists(request, f"{location.rstrip('/')}/{MANIFEST_NAME}")


def _exists(request: OpenRequest, path: str) -> bool:
    try:
        return bool(file_access.path_type(path))
    except PermissionError as error:
        raise UserError(
            f"{request.where} cannot be read ({error.strerror}). Check the permissions of it and "
            "the folders above it."
        ) from error


def _open_prepared(request: OpenRequest, location: str, split: str) -> TokenDataset:
    url = location.rstrip("/")
    folder = Path(local_path(location))
    if is_url(location):
        copy = copy_folder(url, request.data.local_cache_dir)
        if copy is None:
            raise UserError(f"{request.where}: no such folder.")
        folder = copy
    manifest = read_manifest(str(folder))
    split_key = "train_split" if request.for_training else "eval_split"
    entry = find_split(manifest, location, split, split_key)
    if is_url(location):
        files = _remote_files(f"{url}/{split}", entry, folder / split)
    else:
        files = check_files(manifest, folder, split)
    if manifest.format == "bin":
        store = open_flat(folder, manifest, split, files)
    else:
        read = functools.partial(read_chunks, dtype=manifest.dtype)
        identity = f"chunks of {manifest.dtype}"
        caches = request.data.local_cache_dir, request.data.cache_url
        imported = RecordImport(files, read, identity, *caches).run(request.log)
        store = imported.store(load_offsets(folder / split, entry))
        if len(store) != entry.num_tokens:
            raise UserError(
                f"{location}: its ArrayRecord files hold {len(store)} tokens, and {MANIFEST_NAME} "
                f"says {entry.num_tokens}. Copy the data set again."
            )
    return TokenDataset(
        store=store,
        description=describe(manifest),
        fingerprint=f"{manifest.fingerprint}-{split}",
        pad_id=manifest.pad_id,
        eos_id=manifest.tokenizer.eos_id,
        special_ids=tuple(sorted(manifest.tokenizer.special_ids)),
        mask_id=manifest.tokenizer.mask_id,
        vocab_size=manifest.tokenizer.vocab_size,
        max_token_id=entry.max_token_id,
        unigram_entropy_nats=entry.unigram_entropy_nats,
        tokenizer_folder=folder,
        tokenizer_sha256=manifest.tokenizer.sha256,
        # An import may store fewer bytes a token.
        tokens_sha256=entry.tokens_sha256 if store.dtype == np.dtype(manifest.dtype) else "",
        num_text_bytes=entry.num_text_bytes,
        has_bos=bool(manifest.options.get("add_bos")),
    )


def _remote_files(url: str, entry: Split, folder: Path) -> list[FileInfo]:
    """Returns the token files of a split, and copies its other files."""
    found = {file.path.rsplit("/", 1)[-1]: file for file in file_access.files_in(url)}
    names = [file.name for file in entry.files]
    copy_files([file for name, file in found.items() if name not in names], folder)
    if missing := [name for name in names if name not in found]:
        raise UserError(
            f"{url}/{missing[0]} is missing, and {MANIFEST_NAME} lists it. Copy the data set again."
        )
    return [found[name] for name in names]


def _find(request: OpenRequest) -> list[FileInfo]:
    """Returns all files of the location; of Megatron, .bin and .idx."""
    location = request.location
    if not is_url(location) and not _exists(request, location):
        location += ".idx" * _exists(request, f"{location}.idx")
    return file_access.list_files(location, request.key)


def _table_identity(request: OpenRequest, path: str, fields: tuple[str, ...]) -> tuple[str, bool]:
    """Returns the identity of a table's documents, and whether it has labels."""
    with tables.open_table(FileRange.whole(path)) as table:
        column = tables.id_column(table, path, fields)
        has_mask, has_labels = tables.has_mask_and_labels(table)
    eos_id = request.data.token_records.eos_id
    if has_labels and eos_id >= 0:
        raise UserError(
            f"token_records.eos_id={eos_id}: {path} has labels, which have no place for another "
            "token. Leave token_records.eos_id=-1."
        )
    return f"TableIds({column!r}, {has_mask}, {has_labels})", has_labels


def _open_records(request: OpenRequest, kind: str, job: RecordImport) -> TokenDataset:
    files = job.files
    eos_id = job.eos_id
    imported = job.run(request.log)
    documents = Arrays(imported.folder)
    labels = imported.store(documents, "labels") if imported.has_labels else None
    labelled = ", with labels" if labels else ""
    # Excludes the tokens that token_records.eos_id adds, for compatibility with earlier versions.
    boundaries = boundaries_digest(documents["document_offsets"], int(eos_id >= 0))
    return foreign_data(
        imported.store(documents),
        request.where,
        f"{len(files)} {kind} files at {request.location}{labelled}",
        file_access.fingerprint(files, [job.identity, eos_id, boundaries]),
        pad_id=max(eos_id, 0),
        eos_id=eos_id if eos_id >= 0 else None,
        max_token_id=imported.max_token_id,
        labels=labels,
        skipped=tuple(imported.skipped),
    )
