"""Writes lists of texts as files of every format that is read, with the formats' own writers."""

import bz2
import functools
import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pyarrow
import zstandard
from pyarrow import parquet

from MaxText.input_pipeline.document_sources.corpus import TextDocument, open_corpus
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.formats import tf_example
from MaxText.storage import tfrecord
from tests.hostile.files import tar_archive
from tests.input_pipeline.token_store.token_files import write_records

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": functools.partial(gzip.compress, mtime=0),  # or names of tests would hold the time
    "zst": zstandard.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


def read_documents(
    source: object, text_field: str = "text", shard_bytes: int = 2**26
) -> tuple[list[TextDocument], Counter[str]]:
    skipped = Skipped()
    corpus = open_corpus(str(source), text_field, shard_bytes)
    return [document for unit in corpus.shards for document in unit.documents(skipped)], skipped


def read_texts(source: object, text_field: str = "text", shard_bytes: int = 2**26) -> list[str]:
    return [document.text for document in read_documents(source, text_field, shard_bytes)[0]]


def tfrecord_contents(path: Path) -> list[bytes]:
    """The records of a TFRecord file."""
    with path.open("rb") as file:
        records = [record for _, record in tfrecord.scan_records(file, str(path))]
    assert all(isinstance(record, bytes) for record in records), records
    return cast(list[bytes], records)


def rows(texts: Sequence[str], text_field: str = "text") -> bytes:
    lines = (json.dumps({"id": i, text_field: text}) + "\n" for i, text in enumerate(texts))
    return "".join(lines).encode()


def frames(texts: Sequence[str]) -> bytes:
    """Rows as zstd frames one after the other, as writers that are closed and opened again do."""
    return b"".join(zstandard.compress(rows([text])) for text in texts) or zstandard.compress(b"")


def tar(members: Sequence[tuple[str, bytes]], mode: str = "w") -> bytes:
    return tar_archive({"folder/": b"", **dict(members)}, mode)


def members_of(texts: Sequence[str]) -> list[tuple[str, bytes]]:
    """Members of an archive, one per text; names longer than a tar header holds."""
    return [(f"folder/{'long' * 30}/{i}.txt", text.encode()) for i, text in enumerate(texts)]


def openwebtext(texts: Sequence[str]) -> bytes:
    """Archives of one or two texts each, in an archive."""
    parts = [texts[i : i + 2] for i in range(0, len(texts), 2)]
    inner = [
        (f"openwebtext/urlsf_subset{i:02d}-1_data.xz", tar(members_of(part), "w:xz"))
        for i, part in enumerate(parts)
    ]
    return tar(inner, "w:xz")


def table(texts: Sequence[str], kind: pyarrow.DataType | None = None) -> pyarrow.Table:
    column = pyarrow.array(list(texts), kind or pyarrow.string())
    return pyarrow.table({"number": pyarrow.array(range(len(texts))), "text": column})


def parquet_file(texts: Sequence[str], kind: pyarrow.DataType | None = None) -> bytes:
    """Parquet in row groups of 2."""
    content = io.BytesIO()
    parquet.write_table(table(texts, kind), content, row_group_size=2)
    return content.getvalue()


def arrow_stream(
    texts: Sequence[str], kind: pyarrow.DataType | None = None, make_writer=pyarrow.ipc.new_stream
) -> bytes:
    content, data = io.BytesIO(), table(texts, kind)
    with make_writer(content, data.schema) as writer:
        writer.write_table(data, max_chunksize=2)
    return content.getvalue()


def _packed(content: Callable[[Sequence[str]], bytes], compression: str) -> Callable:
    return lambda texts: COMPRESS[compression](content(texts))


def _strings(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts).encode()


def _objects(texts: Sequence[str]) -> bytes:
    return json.dumps([{"text": text, "meta": {}} for text in texts], indent=1).encode()


# Ending of a file -> its contents.
_CONTENTS: dict[str, Callable[[Sequence[str]], bytes]] = {
    ".jsonl": rows,
    ".json": rows,
    "_list.json": lambda texts: json.dumps(texts).encode(),
    "_objects.json": _objects,
    "_strings.jsonl": _strings,
    ".jsonl.gz": _packed(rows, "gz"),
    ".jsonl.zst": frames,
    ".jsonl.xz": _packed(rows, "xz"),
    ".jsonl.bz2": _packed(rows, "bz2"),
    ".json.gz": _packed(_strings, "gz"),
    ".json.zst": _packed(lambda texts: json.dumps(texts).encode(), "zst"),
    ".tar": lambda texts: tar(members_of(texts)),
    ".tar.gz": lambda texts: tar(members_of(texts), "w:gz"),
    ".tgz": lambda texts: tar(members_of(texts), "w:gz"),
    ".tar.zst": _packed(lambda texts: tar(members_of(texts)), "zst"),
    ".tar.bz2": lambda texts: tar(members_of(texts), "w:bz2"),
    ".jsonl.zst.tar": lambda texts: tar(
        [("a.jsonl.zst", frames(texts[:3])), ("no_ending", frames(texts[3:]))]
    ),
    "openwebtext.tar.xz": openwebtext,
    "urlsf_subset00-3_data.xz": lambda texts: tar(members_of(texts), "w:xz"),
    ".parquet": parquet_file,
    ".arrow": arrow_stream,
    "_file.arrow": lambda texts: arrow_stream(texts, make_writer=pyarrow.ipc.new_file),
    **dict.fromkeys(
        (".tfrecord", ".tfrecord-00000-of-00001"),
        lambda texts: b"".join(map(tfrecord.frame, _examples(texts))),
    ),
}
_RECORDS = {
    "_text.array_record": lambda texts: map(str.encode, texts),
    "_example.array_record": lambda texts: _examples(texts),
}
ENDINGS = (*_CONTENTS, *_RECORDS)


def _examples(texts: Sequence[str]) -> list[bytes]:
    return [tf_example.encode({"id": [3], "text": text}) for text in texts]


def write(ending: str, path: Path, texts: Sequence[str]) -> None:
    """Writes a file in the format that its ending stands for."""
    if ending in _RECORDS:
        write_records(path, _RECORDS[ending](texts))
    else:
        path.write_bytes(_CONTENTS[ending](texts))
