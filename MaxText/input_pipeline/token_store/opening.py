"""Opens any token data for training.

Prepared flat files and those of Megatron, datatrove and Dolma are read in place. Other records are
imported at first use, and text is tokenized then. Names tell the format, and the first record
whether records hold ids or text.
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
from MaxText.formatting import pluralize
from MaxText.input_pipeline.document_sources import tables
from MaxText.input_pipeline.document_sources.records import (
    USUAL_FIELDS,
    holds_text,
    read_chunks,
    read_ids,
)
from MaxText.input_pipeline.document_sources.source_files import FileRange
from MaxText.input_pipeline.local_cache import Arrays, copy_files, copy_folder
from MaxText.input_pipeline.token_store.flat_token_files import (
    FLAT_FORMATS,
    open_flat_token_files,
)
from MaxText.input_pipeline.token_store.import_records import RecordImport
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    Manifest,
    Split,
    check_files,
    describe,
    find_split,
    read_manifest,
)
from MaxText.input_pipeline.token_store.megatron import open_megatron
from MaxText.input_pipeline.token_store.store import TokenStore, load_offsets, open_flat
from MaxText.input_pipeline.token_store.token_dataset import (
    TokenDataset,
    boundaries_digest,
    foreign_dataset,
)
from MaxText.input_pipeline.tokenization.load_tokenizer import find_tokenizer_near
from MaxText.storage import file_access
from MaxText.storage.file_access import FileInfo, is_url, local_path, relative_names

ACCEPTED = (
    "a folder that prepare_data.py wrote; .tfrecord, .array_record, .parquet or .arrow files of "
    "token ids or text; webdataset .tar archives of tensors; Megatron's .bin with .idx; "
    "datatrove's .ds with .ds.index; Dolma's .npy with .csv.gz; .txt or .jsonl text"
)

# Format -> pattern of file names.
_NAMES = {
    "tfrecord": re.compile(r"\.tfrecords?(?![a-z])|tfrecord-\d"),
    "arrayrecord": re.compile(r"\.array_?records?(?![a-z])"),
    "parquet": re.compile(r"\.parquet(?![a-z])"),
    "arrow": re.compile(r"\.arrow(?![a-z])"),
    "megatron": re.compile(r"\.(bin|idx)$"),
    "datatrove": re.compile(r"\.ds$"),
    "dolma": re.compile(r"\.npy$"),
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
    def setting(self) -> str:
        """Key and location, for messages."""
        return f"{self.key}={self.location}"

    @property
    def split(self) -> str:
        """Name of the split to read."""
        return self.data.train_split if self.for_training else self.data.eval_split


def _format_of(path: str) -> str:
    """Returns the file format that a name tells; "" if none."""
    name = path.rsplit("/", 1)[-1]
    return next((kind for kind, pattern in _NAMES.items() if pattern.search(name)), "")


def _choose_format(request: OpenRequest, files: list[FileInfo]) -> tuple[str, list[FileInfo]]:
    """Returns the file format of a location, a key of _NAMES, and the files in this format.

    Raises UserError if it is unknown or ambiguous.
    """
    files_by_format: dict[str, list[FileInfo]] = collections.defaultdict(list)
    for file in files:
        files_by_format[_format_of(file.path)].append(file)
    configured_format = request.data.grain_file_type
    if configured_format != "auto":
        return configured_format, files_by_format[configured_format] or files
    files_by_format.pop("", None)  # auxiliary files
    if len(files_by_format) > 1:
        files_by_format.pop("text", None)  # a README.txt next to records
    if len(files_by_format) == 1:
        return files_by_format.popitem()
    if not files_by_format:
        raise UserError(
            f"{request.setting}: {files[0].path} has an unknown format. Accepted: {ACCEPTED}. If "
            "its name does not end like these, set grain_file_type."
        )
    formats = ", ".join(
        f"{len(of_format)} {name} ({Path(of_format[0].path).name})"
        for name, of_format in files_by_format.items()
    )
    raise UserError(
        f"{request.setting} holds files of several formats: {formats}. Set grain_file_type "
        "to the one to read, or give a pattern that matches only these."
    )


def _text_not_read(files: list[FileInfo], file_format: str) -> str:
    """Describes the text files next to records; often they describe these."""
    names = [Path(file.path).name for file in files]
    text_names = [name for name in names if _NAMES["text"].search(name)]
    if file_format == "text" or not text_names:
        return ""
    count = pluralize(len(text_names), "text file")
    return f"; not read: {count} next to them ({text_names[0]} ...)"


def _choose_split(request: OpenRequest, files: list[FileInfo]) -> list[FileInfo]:
    """Selects files by eval_split below their common folder, or UserError."""
    eval_split = request.data.eval_split
    names = relative_names([file.path for file in files])
    selected = [
        file
        for file, name in zip(files, names, strict=True)
        if (eval_split in name) != request.for_training
    ]
    if not selected:
        files_with_split = "every file has" if request.for_training else "no file has"
        purpose = "train" if request.for_training else "evaluate"
        raise UserError(
            f"{request.setting}: {files_with_split} eval_split={eval_split} in its name (for "
            f"example {Path(files[0].path).name}), so there is none to {purpose} on. Set "
            "eval_split to what only files for evaluation have in their names, name these in "
            "grain_eval_files, or switch evaluation off (eval_interval=-1)."
        )
    return selected


def open_token_data(request: OpenRequest) -> TokenDataset:
    """Opens the data at a location.

    A prepared dataset has splits, of which `split` is read. Of other files, evaluation reads those
    whose name contains `split`, and training those whose name does not contain data.eval_split;
    grain_eval_files are all read for evaluation.

    Raises:
      BadRecordError: A file is damaged.
      UserError: Nothing is there, the format is unknown, or the split is missing.
    """
    location = request.location
    configured_format = request.data.grain_file_type
    if configured_format == "prepared" or (configured_format == "auto" and _is_prepared(request)):
        return _open_prepared(request, location, request.split)
    listed_files = _list_files(request)
    file_format, files = _choose_format(request, listed_files)
    if request.for_training or request.key != "grain_eval_files":
        files = _choose_split(request, files)
    files = file_access.without_repeated_links(files)
    dataset = _open_files(request, files, file_format)
    if dataset.tokenizer_folder is not None:
        return dataset
    tokenizer_path = request.preparation.tokenizer_path
    return dataclasses.replace(
        dataset,
        tokenizer_folder=find_tokenizer_near(files[0].path, location, tokenizer_path),
        description=dataset.description + _text_not_read(listed_files, file_format),
    )


def _open_files(request: OpenRequest, files: list[FileInfo], file_format: str) -> TokenDataset:
    """Opens files of one format, which are no prepared dataset."""
    data = request.data
    cache_dir = data.local_cache_dir
    if file_format == "megatron":
        return open_megatron(files, request.key, request.location, cache_dir)
    if file_format in FLAT_FORMATS:
        return open_flat_token_files(files, file_format, request.key, request.location, cache_dir)
    field = data.token_records.field
    fields = (field,) if field else ()
    paths = [file.path for file in files]
    if file_format == "text" or holds_text(
        paths, file_format, fields, request.preparation.text_field
    ):
        from MaxText.input_pipeline.prepare.prepare import tokenize_to_cache

        folder = tokenize_to_cache(paths, request.preparation, cache_dir, request.log)
        return _open_prepared(request, str(folder), "train")
    has_labels = False
    # The identity is part of the fingerprint of the data, which data positions hold.
    if file_format in ("parquet", "arrow"):
        identity, has_labels = _table_identity(request, paths[0], fields or USUAL_FIELDS)
    elif file_format == "webdataset":
        identity = f"TarTensors(field={field!r})"
    else:
        name = {"tfrecord": "TFRecordIds", "arrayrecord": "ArrayRecordIds"}[file_format]
        identity = f"{name}(names={fields or USUAL_FIELDS})"
    job = RecordImport(
        files,
        read=functools.partial(read_ids, kind=file_format, fields=fields),
        identity=identity,
        cache_dir=cache_dir,
        cache_url=data.cache_url,
        eos_id=data.token_records.eos_id,
        skip=data.bad_records.action == "skip",
        max_bad_records=data.bad_records.maximum,
        has_labels=has_labels,
    )
    return _open_records(request, file_format, job)


def _is_prepared(request: OpenRequest) -> bool:
    """Returns whether the location is a folder with a manifest."""
    location = request.location
    # Web servers may answer requests for any name.
    if location.startswith(("http://", "https://")):
        return False
    return _exists(request, f"{location.rstrip('/')}/{MANIFEST_NAME}")


def _exists(request: OpenRequest, path: str) -> bool:
    """Returns whether there is a file or folder; UserError if it cannot be known."""
    try:
        return bool(file_access.path_type(path))
    except PermissionError as error:
        raise UserError(
            f"{request.setting} cannot be read ({error.strerror}). Check the permissions of it and "
            "the folders above it."
        ) from error


def _open_prepared(request: OpenRequest, location: str, split: str) -> TokenDataset:
    """Opens a split of a dataset that prepare_data.py wrote, in place or in a bucket."""
    folder = Path(local_path(location))
    if is_url(location):
        folder = _copy_small_files(request, location)
    manifest = read_manifest(str(folder))
    split_key = "train_split" if request.for_training else "eval_split"
    entry = find_split(manifest, location, split, split_key)
    if is_url(location):
        files = _remote_files(f"{location.rstrip('/')}/{split}", entry, folder / split)
    else:
        files = check_files(manifest, folder, split)
    if manifest.format == "bin":
        store = open_flat(folder, manifest, split, files)
    else:
        store = _open_chunks(request, manifest, files, load_offsets(folder / split, entry))
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


def _open_chunks(
    request: OpenRequest, manifest: Manifest, files: list[FileInfo], documents: Arrays
) -> TokenStore:
    """Imports the chunks of a prepared dataset in ArrayRecord files."""
    job = RecordImport(
        files,
        read=functools.partial(read_chunks, dtype=manifest.dtype),
        identity=f"chunks of {manifest.dtype}",
        cache_dir=request.data.local_cache_dir,
        cache_url=request.data.cache_url,
    )
    return job.run(request.log).store(documents)


def _copy_small_files(request: OpenRequest, url: str) -> Path:
    """Returns a local copy of the files directly in a remote folder: manifest and tokenizer."""
    copy = copy_folder(url.rstrip("/"), request.data.local_cache_dir)
    if copy is None:
        raise UserError(f"{request.setting}: no such folder.")
    return copy


def _remote_files(url: str, entry: Split, folder: Path) -> list[FileInfo]:
    """Returns the token files of a split, and copies its other files to a local folder."""
    files_by_name = {file.path.rsplit("/", 1)[-1]: file for file in file_access.files_in(url)}
    names = [file.name for file in entry.files]
    copy_files([file for name, file in files_by_name.items() if name not in names], folder)
    missing = [name for name in names if name not in files_by_name]
    if missing:
        raise UserError(
            f"{url}/{missing[0]} is missing, and {MANIFEST_NAME} lists it. Copy the data set again."
        )
    return [files_by_name[name] for name in names]


def _list_files(request: OpenRequest) -> list[FileInfo]:
    """Returns all files of the location; Megatron's .bin and .idx may be named without ending."""
    location = request.location
    if not is_url(location) and not _exists(request, location):
        index = f"{location}.idx"
        if _exists(request, index):
            location = index
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


def _open_records(request: OpenRequest, file_format: str, job: RecordImport) -> TokenDataset:
    """Imports records of ids, or opens an earlier import of them."""
    imported = job.run(request.log)
    documents = Arrays(imported.folder)
    labels = imported.store(documents, "labels") if imported.has_labels else None
    source = f"{len(job.files)} {file_format} files at {request.location}"
    if labels is not None:
        source += ", with labels"
    boundaries = boundaries_digest(documents["document_offsets"])
    return foreign_dataset(
        imported.store(documents),
        setting=request.setting,
        source=source,
        fingerprint=file_access.fingerprint(job.files, [job.identity, job.eos_id, boundaries]),
        pad_id=max(job.eos_id, 0),
        eos_id=job.eos_id if job.eos_id >= 0 else None,
        max_token_id=imported.max_token_id,
        labels=labels,
        skipped=tuple(imported.skipped),
    )
