"""Opens any token data that can be trained on: what is at a location, and which part of it.

Whether records hold ids or text is told by the first of them.
"""

import contextlib
import dataclasses
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.configuration.data_sections import Data, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.formats.array_record_ids import (
    ArrayRecordIds,
    open_reader,
    read_records,
)
from MaxText.input_pipeline.formats.decompressed import decompressed_copy
from MaxText.input_pipeline.formats.table_ids import (
    LABELS,
    Table,
    TableIds,
    TableLabels,
    is_list_of_integers,
    labels_are_ids,
)
from MaxText.input_pipeline.formats.tar_tensors import TarTensors
from MaxText.input_pipeline.formats.tfrecord_ids import TFRecordIds
from MaxText.input_pipeline.local_copies import copied_data_set, local_copies
from MaxText.input_pipeline.storage import (
    Blocks,
    fingerprint,
    is_file,
    is_there,
    is_url,
    list_files,
    local_path,
    open_file,
    open_stream,
    status_of,
)
from MaxText.input_pipeline.token_store.file_formats import choose_kind, choose_split
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    describe,
    find_split,
    read_manifest,
)
from MaxText.input_pipeline.token_store.megatron_data import open_megatron
from MaxText.input_pipeline.token_store.record_index import RecordFormat, is_rows, open_index
from MaxText.input_pipeline.token_store.record_stream import RecordStream
from MaxText.input_pipeline.token_store.token_data import TokenData, boundaries_digest
from MaxText.input_pipeline.token_store.token_stream import TokenStream
from MaxText.input_pipeline.token_store.tokenizer_beside import holds_tokenizer, tokenizer_beside

# Features and columns that hold ids where tokens_field does not say.
USUAL_FIELDS = ("input_ids", "text", "tokens")


class _Request(NamedTuple):
    """What open_token_data was asked for."""

    location: str
    key: str
    data: Data
    preparation: Preparation
    show: Callable[[str], None]

    @property
    def cache_dir(self) -> Path:
        return Path(self.data.data_cache_dir).expanduser()

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.data.tokens_field,) if self.data.tokens_field else USUAL_FIELDS


def open_token_data(
    location: str,
    *,
    key: str,
    data: Data,
    preparation: Preparation,
    split: str,
    for_training: bool,
    show: Callable[[str], None],
) -> TokenData:
    """Opens what lies at a location.

    Of a prepared data set, `split` is read. Of other files, evaluation reads those whose name
    contains `split` and training all whose name does not contain data.eval_split; of
    grain_eval_files evaluation reads all.

    Args:
      location: see dataset_path.
      key: configuration key it came from.
      data: the keys about data.
      preparation: tokenizer and field of records of text.
      split: of prepared data; of other files part of a name.
      for_training: whether to train or to evaluate on it.
      show: takes lines about what is done.

    Raises:
      BadRecord: a file is damaged.
      UserError: nothing is there, of no known format, or without the split.
    """
    request = _Request(location, key, data, preparation, show)
    kind = data.grain_file_type
    if kind == "prepared" or (kind == "auto" and _is_prepared(location, key)):
        tokens = _open_prepared(request, split, "train_split" if for_training else "eval_split")
        if for_training:
            _check_unused(request, tokens)
        return tokens
    files = _find(request)
    kind, files = choose_kind(files, kind, key, location)
    if for_training or key != "grain_eval_files":
        evaluation = data.eval_split if for_training else split
        files = choose_split(files, evaluation, for_training, key, location)
    tokens = _open_files(request, files, kind)
    if tokens.tokenizer_folder is not None:
        return tokens
    return dataclasses.replace(
        tokens, tokenizer_folder=tokenizer_beside(files, location, preparation.tokenizer_path)
    )


def _open_files(request: _Request, files: list[str], kind: str) -> TokenData:
    if kind == "megatron":
        return open_megatron(files, request.key, request.location)
    if kind == "text":
        return _open_text(request, files)
    if kind in ("parquet", "arrow"):
        return _open_tables(request, files)
    if kind == "webdataset":
        return _open_records(request, files, TarTensors(request.data.tokens_field), kind)
    if kind == "tfrecord":
        if _holds_text(request, files, _first_of_tfrecord):
            return _open_text(request, files)
        return _open_records(request, files, TFRecordIds(request.fields), kind)
    assert kind == "arrayrecord", kind
    copies = local_copies(files, request.cache_dir, request.show)
    if _holds_text(request, copies, _first_of_array_record):
        return _open_text(request, copies)
    return _open_records(request, files, ArrayRecordIds(request.fields), kind, copies)


def _is_prepared(location: str, key: str) -> bool:
    if not location:
        return True  # whose message says how to make one
    if is_url(location):
        # What a web server answers for any name is no proof of a file.
        return not location.startswith("http") and is_there(_manifest_of(location))
    try:
        return is_file(Path(local_path(location)) / MANIFEST_NAME)
    except PermissionError as error:
        raise UserError(
            f"{key}={location} cannot be looked at ({error.strerror}). Check that you may read it "
            "and the folders above it."
        ) from error


def _manifest_of(url: str) -> str:
    return f"{url.rstrip('/')}/{MANIFEST_NAME}"


def _check_unused(request: _Request, tokens: TokenData) -> None:
    """Says which keys about records and text have no effect on a prepared data set."""
    data, preparation = request.data, request.preparation
    # In a mixture other sources may be records.
    is_alone = request.key != "dataset_mix" and ";" not in getattr(data, request.key)
    if data.records_eos_id >= 0 and is_alone:
        raise UserError(
            f"records_eos_id={data.records_eos_id} has no effect: {request.key}={request.location} "
            "is a prepared data set, whose documents end as they were prepared. Leave "
            "records_eos_id=-1."
        )
    asked = preparation.tokenizer_path
    if not asked or preparation.prepare_source:
        return
    manifest = read_manifest(str(tokens.tokenizer_folder))
    if asked != manifest.options.get("tokenizer_path") and not holds_tokenizer(
        asked, manifest.tokenizer.sha256, tokens.tokenizer_folder
    ):
        request.show(
            f"tokenizer_path={asked} is not used: {request.location} has a tokenizer of its own "
            f"({manifest.tokenizer.origin})."
        )


def _open_prepared(request: _Request, split: str, split_key: str) -> TokenData:
    location, records = request.location, None
    if is_url(location):
        records = location.rstrip("/")
        folder, manifest = copied_data_set(records, split, request.cache_dir, request.show)
    else:
        manifest = read_manifest(location)
        folder = Path(local_path(location))
    entry = find_split(manifest, location, split, split_key)
    stream = TokenStream(str(folder), manifest, split, records)
    return TokenData(
        stream=stream,
        description=describe(manifest),
        fingerprint=f"{manifest.fingerprint}-{split}",
        filler_id=manifest.filler_id,
        eos_id=manifest.tokenizer.eos_id,
        special_ids=tuple(sorted(manifest.tokenizer.special_ids)),
        mask_id=manifest.tokenizer.mask_id,
        vocab_size=manifest.tokenizer.vocab_size,
        largest_id=entry.largest_id,
        unigram_entropy=entry.unigram_entropy,
        file_of_document=stream.file_of_document,
        tokenizer_folder=folder,
        tokenizer_sha256=manifest.tokenizer.sha256,
    )


def _find(request: _Request) -> list[str]:
    """All files of the location; a Megatron prefix stands for its .bin and .idx."""
    location = request.location
    if not location.startswith("@") and not is_url(location):
        path = local_path(location)
        with contextlib.suppress(PermissionError):  # which list_files puts into words
            if status_of(path) is None and status_of(f"{path}.idx") is not None:
                location = f"{location}.idx"
    return list_files(location, request.key)


def _plain(request: _Request, file: str) -> str:
    if file.endswith((".gz", ".tgz")):
        return decompressed_copy(file, request.cache_dir, request.show)
    return file


def _first_of_tfrecord(file: str) -> bytes | None:
    if file.endswith(".gz"):
        try:
            with open_stream(file) as stream, gzip.open(stream) as contents:
                return next(tfrecord.read_records(file, contents), None)
        except OSError as error:
            reason = f"the file cannot be read ({error.strerror or error})"
            raise BadRecord(file, 0, reason) from error
    blocks = Blocks(open_file(file))
    for offset, length in tfrecord.payloads(blocks, file):
        # A damaged record says nothing about the others; the index finds it.
        with contextlib.suppress(BadRecord):
            stored = blocks[offset : offset + length + tfrecord.FOOTER_BYTES]
            return tfrecord.check(stored, file, offset)
    return None


def _first_of_array_record(file: str) -> bytes | None:
    reader = open_reader(file)
    for number in range(reader.num_records()):
        with contextlib.suppress(BadRecord):
            return read_records(reader, file, [number])[0]
    return None


def _holds_text(
    request: _Request, files: list[str], first_record: Callable[[str], bytes | None]
) -> bool:
    """Whether records are text: plain, or a feature of bytes named text_field."""
    text_field = request.preparation.text_field
    for file in files:
        record = first_record(file)
        if record is None:
            continue
        try:
            features = tf_example.decode(record)
        except tf_example.ExampleError as error:
            if _is_text(record):
                return True
            raise UserError(
                f"{file}: its first record is neither a tf.train.Example nor UTF-8 text ({error}). "
                "Name files of token ids or of text."
            ) from error
        if any(isinstance(features.get(name), np.ndarray) for name in request.fields):
            return False
        if isinstance(features.get(text_field), list):
            return True
        raise UserError(
            f"{file}: its records have no integer feature {' or '.join(request.fields)} and no "
            f"text in {text_field} (features there: {tf_example.describe(record)}). Set "
            "tokens_field, or text_field for text, to one of them."
        )
    return False


def _is_text(record: bytes) -> bool:
    try:
        return bool(record.decode().strip())
    except UnicodeDecodeError:
        return False


def _open_tables(request: _Request, files: list[str]) -> TokenData:
    first = Table(files[0])
    names = list(first.schema.names)
    for name in request.fields:
        if name in names and is_list_of_integers(first.schema.field(name).type):
            break
    else:
        text_field = request.preparation.text_field
        if text_field in names and "string" in str(first.schema.field(text_field).type):
            return _open_text(request, files)
        there = ", ".join(f"{field.name} ({field.type})" for field in first.schema)
        raise UserError(
            f"{files[0]} has no column of lists of integers named {' or '.join(request.fields)} "
            f"and no text in {text_field} (columns there: {there}). Set tokens_field, or "
            "text_field for text, to one of them."
        )
    tokens = _open_records(request, files, TableIds(name, names), "table")
    if LABELS not in names or not is_list_of_integers(first.schema.field(LABELS).type):
        return tokens
    if request.data.records_eos_id >= 0:
        raise UserError(
            f"records_eos_id={request.data.records_eos_id}: {files[0]} has labels, which a further "
            "token would not fit. Leave records_eos_id=-1."
        )
    assert isinstance(tokens.stream, RecordStream)
    labels = TableLabels(name, names, labels_are_ids(first, name))
    return TokenData(
        stream=tokens.stream,
        description=f"{tokens.description}, with labels",
        fingerprint=tokens.fingerprint,
        filler_id=tokens.filler_id,
        eos_id=tokens.eos_id,
        rows=tokens.rows,
        labels=RecordStream(tokens.stream.index, labels),
        file_of_document=tokens.file_of_document,
    )


def _open_records(
    request: _Request,
    files: list[str],
    record_format: RecordFormat,
    kind: str,
    copies: list[str] | None = None,
) -> TokenData:
    """Opens records, of the copies of the files where some cannot be read in place."""
    skip = request.data.on_bad_record == "skip"
    plain = [_plain(request, file) for file in copies or files]
    index = open_index(plain, record_format, request.cache_dir, request.show, skip)
    eos_id = request.data.records_eos_id
    stream = RecordStream(index, record_format, eos_id)
    sizes = np.diff(index.document_offsets)
    if sizes.size == 0 or len(stream) == 0:
        raise UserError(
            f"{request.key}={request.location}: {len(files)} {kind} files hold no tokens. Check "
            "that these are the files you mean."
        )
    rows = is_rows(sizes)
    description = (
        f"{len(stream):,} tokens in {sizes.size:,} "
        + (f"rows of {int(sizes[0]) + (eos_id >= 0):,}" if rows else "documents")
        + f" of {len(files)} {kind} files at {request.location}"
    )
    return TokenData(
        stream=stream,
        description=description,
        # Of the files as they were given: names of decompressed copies depend on their place.
        fingerprint=fingerprint(
            files, [repr(record_format), eos_id, boundaries_digest(index.document_offsets)]
        ),
        filler_id=max(eos_id, 0),
        eos_id=eos_id if eos_id >= 0 else None,
        rows=rows,
        file_of_document=index.first_record if len(files) > 1 else None,
    )


def _open_text(request: _Request, files: list[str]) -> TokenData:
    from MaxText.input_pipeline.preparation.text_cache import open_text

    preparation = request.preparation
    if not preparation.tokenizer_path:
        raise UserError(
            f"{request.key}={request.location}: {Path(files[0]).name} holds text, and "
            "tokenizer_path is not set. Set it to the tokenizer of the model, or name records of "
            "token ids."
        )
    folder = open_text(
        files,
        tokenizer_path=preparation.tokenizer_path,
        tokenizer_type=preparation.tokenizer_type,
        text_field=preparation.text_field,
        add_bos=preparation.add_bos,
        add_eos=preparation.add_eos,
        cache_dir=request.cache_dir,
        show=request.show,
    )
    return _open_prepared(request._replace(location=str(folder)), "train", "train_split")
