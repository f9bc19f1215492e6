"""Small files of token ids in every format, written with its own library, and opening them."""

import contextlib
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
from array_record.python import array_record_module
from pyarrow import parquet

from MaxText.config.data_sections import DataConfig, PreparationConfig
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.token_store.megatron import DTYPES, HEADER, MAGIC
from MaxText.input_pipeline.token_store.opening import OpenRequest, open_token_data
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset
from MaxText.storage.tfrecord import TFRecordWriter
from tests.hostile.files import npy, tar_archive, torch_file
from tests.input_pipeline.small_data import write_data_set

Documents = Sequence[np.ndarray]


def documents(seed: int, sizes: Sequence[int], vocab_size: int = 50_000) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, size).astype(np.int32) for size in sizes]


def write_tfrecord(path: Path, ids: Documents, field: str = "input_ids") -> None:
    with contextlib.closing(TFRecordWriter(path)) as writer:
        for document in ids:
            writer.write(tf_example.encode({field: document}))


def write_compressed_tfrecord(path: Path, ids: Documents) -> None:
    write_tfrecord(path, ids)
    path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def write_array_record(
    path: Path, ids: Documents, field: str = "input_ids", options: str = "group_size:1"
) -> None:
    write_records(path, (tf_example.encode({field: document}) for document in ids), options)


def write_records(path: Path, records: Iterable[bytes], options: str = "group_size:1") -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def write_tar(path: Path, ids: Documents, field: str = "input_id") -> None:
    members = {}
    for number, document in enumerate(ids):
        members[f"s/{number:06d}.json"] = b"{}"
        members[f"s/{number:06d}.{field}.npy"] = npy(document.astype(np.int64))
    content = tar_archive(members)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix in (".gz", ".tgz") else content)


def write_torch_tar(path: Path, ids: Documents) -> None:
    members = {f"s/{i:06d}.input_id.pth": torch_file(document) for i, document in enumerate(ids)}
    path.write_bytes(tar_archive(members))


def table(ids: Documents, **columns):
    lists = pyarrow.array([document.tolist() for document in ids], pyarrow.list_(pyarrow.int32()))
    return pyarrow.table({"input_ids": lists, **columns})


def write_parquet(path: Path, ids: Documents, row_group_size: int = 3, **columns) -> None:
    parquet.write_table(
        table(ids, **columns), path, row_group_size=row_group_size, write_page_checksum=True
    )


def write_arrow(path: Path, ids: Documents, stream: bool = True, **columns) -> None:
    content = table(ids, **columns)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(str(path), content.schema) as writer:
        writer.write_table(content, max_chunksize=3)


def write_megatron(prefix: Path, ids: Documents, dtype: str = "<u2") -> None:
    np.concatenate([np.empty(0, np.int32), *ids]).astype(dtype).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.dtype(dtype), [*map(len, ids)], range(len(ids) + 1))


RECORDS = {
    "tfrecord": write_tfrecord,
    "array_record": write_array_record,
    "tar": write_tar,
    "parquet": write_parquet,
    "arrow": write_arrow,
}
FORMATS = (*RECORDS, "prepared_array_record", "prepared_bin", "prepared_bin_u4", "megatron")


def write(kind: str, folder: Path, parts: Sequence[Documents]) -> list[Path]:
    """Writes a data set, records with a file for each part; returns the files of ids."""
    documents = [document for part in parts for document in part]
    if kind.startswith("prepared_"):
        file_format = kind.removeprefix("prepared_").removesuffix("_u4")
        vocab_size = 70_000 if kind.endswith("u4") else 50_000
        write_data_set(folder, {"train": documents}, vocab_size, file_format=file_format)
        return sorted(folder.glob("train/tokens-*"))
    folder.mkdir(exist_ok=True)
    if kind == "megatron":
        write_megatron(folder / "ids", documents)
        return [folder / "ids.bin"]
    files = [folder / f"ids{number}.{kind}" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        RECORDS[kind](file, part)
    return files


def open_data(location: Path | str, cache_dir: Path, **keys) -> TokenDataset:
    """Opens a location with keys of data, preparation and open_token_data."""
    options = {"key": "dataset_path", "for_training": True, "log": str}
    options |= {name: keys.pop(name) for name in options if name in keys}
    if "split" in keys:
        keys["train_split" if options["for_training"] else "eval_split"] = keys.pop("split")
    preparation = {name: keys.pop(name) for name in keys.keys() & PreparationConfig.model_fields}
    data = DataConfig(data_cache_dir=str(cache_dir), **keys)
    preparation = PreparationConfig(**preparation)
    request = OpenRequest(data, preparation, vocab_size=2**31, location=str(location), **options)
    return open_token_data(request)


def tokens_of(data: TokenDataset) -> list[int]:
    return data.store.read(np.array([0]), np.array([len(data.store)])).tolist()


def write_index(path, dtype: np.dtype, sizes: Sequence[int], documents: Sequence[int]) -> None:
    """Writes the index of contiguous sequences.

    `documents` are the first sequence of each document, then the number of sequences.
    """
    codes = {np.dtype(name): code for code, name in DTYPES.items()}
    tokens = np.asarray(sizes, "<i4")
    ends = np.cumsum(tokens, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([[0], ends[:-1]]) if tokens.size else ends
    with open(path, "wb") as file:
        code = codes[dtype.newbyteorder("<")]
        file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(documents)))
        file.write(tokens.tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.asarray(documents, "<i8").tobytes())
