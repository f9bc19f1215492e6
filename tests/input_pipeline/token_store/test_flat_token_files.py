"""Token files of datatrove and of Dolma, as their own code writes them."""

import csv
import gzip
import io

import numpy as np
import pytest

from tests.input_pipeline.token_store.token_files import documents, open_data, tokens_of
from tests.refusals import refused


def ends_of(ids):
    return np.cumsum([len(document) for document in ids], dtype=np.int64)


def write_datatrove(folder, name, ids, dtype="<u2"):
    """As datatrove.pipeline.tokens.TokenizedFile: packed ids, and the ends as uint64."""
    np.concatenate(ids).astype(dtype).tofile(folder / f"{name}.ds")
    ends_of(ids).astype("<u8").tofile(folder / f"{name}.ds.index")
    (folder / f"{name}.ds.metadata").write_text(f"tokenizer|2\n{sum(map(len, ids))}\n")


def write_dolma(folder, name, ids, dtype="<u2"):
    """As dolma.tokenizer: a memory map, and lines of start, end, id, source and line."""
    np.concatenate(ids).astype(dtype).tofile(folder / f"{name}.npy")
    text = io.StringIO()
    rows = csv.writer(text)
    start = 0
    for number, end in enumerate(ends_of(ids).tolist()):
        rows.writerow([start, end, f'a "name", {number}', "source.jsonl.gz", number + 1])
        start = end
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def opened(folder):
    return open_data(folder, folder.parent / "cache")


def documents_of(data):
    tokens = np.asarray(tokens_of(data))
    return [part.tolist() for part in np.split(tokens, data.store.document_offsets[1:-1])]


WRITERS = {"datatrove": write_datatrove, "dolma": write_dolma}
INDEX = {"datatrove": "a.ds.index", "dolma": "a.csv.gz"}
TOKENS = {"datatrove": "a.ds", "dolma": "a.npy"}


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("kind", WRITERS)
def test_documents_of_several_files(kind, dtype, tmp_path):
    ids = documents(0, [5, 1, 30, 0, 7, 12, 3], 60_000 if dtype == "<u2" else 100_000)
    WRITERS[kind](tmp_path, "a", ids[:4], dtype)
    WRITERS[kind](tmp_path, "b", ids[4:], dtype)
    data = opened(tmp_path)
    assert documents_of(data) == [document.tolist() for document in ids]
    assert f"2 {'Dolma' if kind == 'dolma' else kind} files" in data.description
    again = opened(tmp_path)
    assert again.fingerprint == data.fingerprint
    one_file = opened(tmp_path / TOKENS[kind])
    assert documents_of(one_file) == [document.tolist() for document in ids[:4]]


@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_files_are_refused(kind, tmp_path):
    ids = documents(1, [5, 6, 7])
    WRITERS[kind](tmp_path, "a", ids)
    index, tokens = tmp_path / INDEX[kind], tmp_path / TOKENS[kind]
    stored = tokens.read_bytes()
    tokens.write_bytes(stored[:-3])
    refused(r"33 bytes, where its documents hold 18 tokens of 2 or 4", opened, tmp_path)
    tokens.write_bytes(stored)
    content = index.read_bytes()
    index.write_bytes(content[:-5])
    refused(r"multiple of 8|cannot be read", opened, tmp_path)
    index.unlink()
    refused(rf"{INDEX[kind]} is missing", opened, tmp_path)


def test_documents_out_of_order_are_refused(tmp_path):
    write_datatrove(tmp_path, "a", documents(2, [5, 6, 7]))
    np.array([5, 3, 18], "<u8").tofile(tmp_path / "a.ds.index")
    refused("end to end", opened, tmp_path)


def test_gaps_between_documents_are_refused(tmp_path):
    write_dolma(tmp_path, "a", documents(3, [5, 6]))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,5,x,y,1\n6,11,x,y,2\n"))
    refused("starts at token 6, where the one before it ends at 5", opened, tmp_path)


def test_ids_of_two_sizes_are_no_data_set(tmp_path):
    write_datatrove(tmp_path, "a", documents(4, [5, 6]))
    write_datatrove(tmp_path, "b", documents(5, [5, 6]), "<u4")
    refused("data_mixture_weights", opened, tmp_path)
