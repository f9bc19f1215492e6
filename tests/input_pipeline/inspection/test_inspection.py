"""inspect_data.py: every number it shows, against plain NumPy."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from MaxText.configuration.data_sections import Preparation
from MaxText.configuration.loading import configure
from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.tfrecord import TFRecordWriter
from MaxText.input_pipeline.inspection import data_statistics
from MaxText.input_pipeline.inspection.data_statistics import (
    document_lengths,
    find_repeats,
    measure_rows,
    measure_tokens,
    spread,
)
from MaxText.input_pipeline.inspection.inspecting import Inspection
from MaxText.input_pipeline.inspection.length_picture import bin_edges, draw_lengths
from MaxText.input_pipeline.inspection.report import (
    batch_lines,
    document_lines,
    show_row,
    visible,
)
from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.opening import open_token_data
from MaxText.input_pipeline.tokenization.loading import load_tokenizer

from ..small_data import EOS, data_keys, random_documents, write_data_set
from ..streams import token_files

PROGRAM = Path(__file__).parents[3] / "MaxText" / "inspect_data.py"
ALL = 10**9
LARGE_ID = 40_000


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    """Random documents, some planted again, and one id that is larger than all others."""
    documents = random_documents(0, 120, 60, vocab_size=1000)
    for planted in (7, 30, 90, 91, 92, 93, 94):
        documents[planted] = np.append(np.arange(100, 130), EOS)
    documents[55] = documents[54]
    documents[70] = np.append(np.arange(5, 25), LARGE_ID)
    return documents


def no_progress(_done: int) -> None:
    pass


def write_records(path: Path, documents: list[np.ndarray]) -> None:
    with TFRecordWriter(path) as writer:
        for document in documents:
            writer.write(tf_example.encode({"input_ids": document}))


def open_data(location: Path, data=None):
    return open_token_data(
        str(location),
        key="dataset_path",
        data=data or data_keys(location),
        preparation=Preparation(),
        split="train",
        for_training=True,
        show=lambda line: None,
    )


def open_source(location: Path, length: int, **keys):
    batches = train_loader(
        data_keys(location, **keys),
        plan=BatchPlan.constant(1, length),
        vocab_size=2**31 - 1,
        show=lambda line: None,
    )
    (source,) = batches.opened
    return source


def repeats_of(sequences: list[np.ndarray]) -> tuple[int, int, int]:
    """Sequences, repeats and the largest number of equal ones, counted by their bytes."""
    counts: dict[bytes, int] = {}
    for sequence in sequences:
        key = sequence.tobytes()
        counts[key] = counts.get(key, 0) + 1
    return len(sequences), len(sequences) - len(counts), max(counts.values())


@pytest.mark.parametrize("kind", ["array_record", "bin", "tfrecord"])
@pytest.mark.parametrize("block", [7, 64, 1000, 10**6])
def test_tokens_are_those_of_numpy(tmp_path, documents, monkeypatch, kind, block):
    location = tmp_path / "set"
    if kind == "tfrecord":
        location.mkdir()
        write_records(location / "a.tfrecord", documents[:50])
        write_records(location / "b.tfrecord", documents[50:])
    else:
        write_data_set(location, {"train": documents}, file_format=kind)
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", block)
    data = open_data(location, data_keys(location, data_cache_dir=str(tmp_path / "cache")))
    seen: list[int] = []
    found = measure_tokens(data, ALL, None, seen.append)
    stream = np.concatenate(documents)
    assert found.num_tokens == found.num_read == sum(seen) == stream.size
    assert (found.smallest_id, found.largest_id) == (stream.min(), stream.max())
    assert found.largest_document == (70, 20)
    np.testing.assert_array_equal(found.counts_V, np.bincount(stream))
    assert found.num_uncounted == 0
    assert found.occurrences(0) == 119  # all documents end with 0 but the planted one
    assert found.num_from(1000) == 1
    repeats = found.documents
    assert (repeats.num_sequences, repeats.num_repeats, repeats.most_often) == repeats_of(documents)
    assert (repeats.most_often, repeats.example) == (7, (7, 30))


def test_a_sample_is_spread_evenly_and_is_what_is_measured(tmp_path, monkeypatch):
    stream = np.arange(1, 1001)
    write_data_set(tmp_path / "set", {"train": np.split(stream, 20)})
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", 100)
    found = measure_tokens(open_data(tmp_path / "set"), 350, None, no_progress)
    assert spread(10, 3).tolist() == [0, 3, 6]
    assert (found.num_tokens, found.num_read) == (1000, 300)
    expected = np.concatenate([stream[0:100], stream[300:400], stream[600:700]])
    np.testing.assert_array_equal(np.flatnonzero(found.counts_V), expected)
    assert found.documents.num_sequences == 6
    # Less than a block is asked for: one is read.
    assert measure_tokens(open_data(tmp_path / "set"), 1, None, no_progress).num_read == 100


def test_documents_are_compared_by_length_and_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(data_statistics, "COMPARED_TOKENS", 10)
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", 8)
    first = np.arange(1, 31)
    other_end, other_beginning = first.copy(), first.copy()
    other_end[-1] = other_beginning[9] = 99
    documents = [first, other_end, other_beginning, first[:29], first[::-1].copy()]
    write_data_set(tmp_path / "set", {"train": documents})
    found = measure_tokens(open_data(tmp_path / "set"), ALL, None, no_progress).documents
    assert (found.num_sequences, found.num_repeats, found.example) == (5, 1, (0, 1))


def test_ids_beyond_every_vocabulary_are_counted_together(tmp_path):
    write_records(tmp_path / "a.tfrecord", [np.array([5, 2**31 - 1, 2**30]), np.array([3])])
    data = open_data(tmp_path, data_keys(tmp_path, data_cache_dir=str(tmp_path / "cache")))
    found = measure_tokens(data, ALL, None, no_progress)
    assert found.largest_id == 2**31 - 1
    assert found.largest_document == (0, 1)
    assert found.num_uncounted == 2
    assert found.num_from(4) == 3
    assert found.counts_V.tolist() == [0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("block", [6, 10**6])
def test_unreadable_records_are_left_out_or_end_it(tmp_path, monkeypatch, block):
    path = tmp_path / "a.tfrecord"
    write_records(path, [np.arange(10, 20), np.arange(20, 30), np.arange(30, 40)])
    keys = {"packing": False, "data_cache_dir": str(tmp_path / "cache")}
    data, rows = open_data(path, data_keys(path, **keys)), open_source(path, 9, **keys).rows
    # Damaged after it was opened, as the first opening reads every record.
    contents = bytearray(path.read_bytes())
    contents[contents.index(bytes(range(20, 30)))] = 21
    path.write_bytes(contents)
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", block)
    with pytest.raises(BadRecord, match=r"a\.tfrecord at byte"):
        measure_tokens(data, ALL, None, no_progress)
    bad: set[str] = set()
    found = measure_tokens(data, ALL, lambda problem: bad.add(str(problem)), no_progress)
    assert len(bad) == 1
    assert (found.num_read, found.smallest_id, found.largest_id) == (20, 10, 39)
    assert found.counts_V[20:30].sum() == 0
    assert found.documents.num_sequences == 2

    with pytest.raises(BadRecord):
        measure_rows(rows, ALL, None, no_progress)
    measured = measure_rows(rows, ALL, lambda problem: bad.add(str(problem)), no_progress)
    assert (measured.num_read, measured.num_places, measured.num_counted) == (3, 27, 18)
    assert measured.windows.num_sequences == 2
    assert len(bad) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"packing": False},
        {"grain_packing_type": "first_fit"},
        {"attend_across_documents": True, "zero_loss": False},
    ],
)
@pytest.mark.parametrize("block", [32, 10**6])
def test_rows_are_those_of_an_epoch(tmp_path, documents, monkeypatch, keys, block):
    location = tmp_path / "set"
    write_data_set(location, {"train": documents})
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", block)
    source = open_source(location, 16, **keys)
    found = measure_rows(source.rows, ALL, None, no_progress)
    count = len(source.rows.windows)
    epoch = source.rows.read(np.arange(count))
    assert (found.num_windows, found.num_read) == (count, count)
    assert found.num_places == epoch["weights"].size
    assert found.num_counted == epoch["weights"].sum()
    rows = list(epoch["tokens"][epoch["weights"].any(axis=1)])
    windows = found.windows
    assert (windows.num_sequences, windows.num_repeats, windows.most_often) == repeats_of(rows)


def test_planted_rows_are_found_and_a_sample_says_what_it_read(tmp_path, monkeypatch):
    stream = np.arange(1, 161)
    stream[96:112] = stream[32:48]
    write_data_set(tmp_path / "set", {"train": [stream]})
    rows = open_source(tmp_path / "set", 16).rows
    found = measure_rows(rows, ALL, None, no_progress).windows
    assert (found.num_sequences, found.num_repeats, found.example) == (10, 1, (2, 6))
    monkeypatch.setattr(data_statistics, "BLOCK_TOKENS", 32)
    sample = measure_rows(rows, 64, None, no_progress)
    assert (sample.num_windows, sample.num_read, sample.num_places) == (10, 4, 64)
    assert data_statistics.window_origin(rows, 3) == [("numbers.txt, row 0", 48, 17)]


def test_lengths_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr(data_statistics, "_BLOCK_DOCUMENTS", 7)
    sizes = np.random.default_rng(0).integers(0, 40, 500)
    found = document_lengths(np.append(0, np.cumsum(sizes)))
    np.testing.assert_array_equal(np.repeat(found.tokens_L, found.documents_L), np.sort(sizes))
    assert (found.num_documents, found.num_tokens) == (500, sizes.sum())
    for share in (0.01, 0.5, 0.99, 1):
        expected = np.quantile(sizes, share, method="inverted_cdf")
        assert found.quantile(share) == expected


def test_repeats_of_nothing():
    found = find_repeats(np.zeros(0, np.uint64), np.zeros(0, np.int64))
    assert (found.num_sequences, found.num_repeats, found.example) == (0, 0, None)


def test_the_histogram_has_a_line_for_each_doubling():
    lengths = document_lengths(np.cumsum([0, 0, 1, 1, 5, 7, 4, 32]))
    repeats = find_repeats(np.array([3, 4, 3, 5, 6, 7], np.uint64), np.arange(6))
    lines = document_lines(lengths, repeats, lambda document: f"file {document}")
    assert lines[0] == ("Documents: 7 of 0 to 32 tokens, median 4, mean 7.1, 99 % of them up to 32")
    assert lines[1] == (
        "  duplicates: 1 of 6 documents equal an earlier one (16.67%); the most frequent occurs "
        "2 times: file 0 = file 2"
    )
    cells = [line.split() for line in lines[3:]]
    assert cells == [
        ["0", "1", "0.0%", "#" * 14],
        ["1", "2", "4.0%", "#" * 27],
        ["2", "to", "3", "0", "0.0%"],
        ["4", "to", "7", "3", "32.0%", "#" * 40],
        ["8", "to", "15", "0", "0.0%"],
        ["16", "to", "31", "0", "0.0%"],
        ["32", "to", "63", "1", "64.0%", "#" * 14],
    ]


def test_what_does_not_show_is_made_visible():
    assert visible("a\tb\n\r\x00\x7f") == "a␉b␊␍␀␡"
    assert visible("ünï 日本 \u200b\u202e\x9b\ud800") == "ünï 日本 \\u200b\\u202e\\x9b\\ud800"


def test_rows_are_shown_from_both_ends():
    tokenizer = load_tokenizer("bytes")
    text = "".join(chr(65 + i % 26) for i in range(1203))
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    assert show_row(ids[:1000], tokenizer) == [text[:1000]]
    assert show_row(ids, tokenizer) == [text[:500], "... 203 more characters ...", text[-500:]]
    assert show_row(np.zeros(0, np.int32), tokenizer) == [""]
    assert show_row(np.arange(120), None) == [" ".join(map(str, range(120)))]
    assert show_row(np.arange(121), None)[1] == "... 1 more ids ..."
    masked = np.array([300, 65, 66, 300, 300, 67], np.int32)
    assert show_row(masked, tokenizer, mask_id=300) == ["[MASK]AB[MASK][MASK]C"]
    assert show_row(masked, None, mask_id=300) == ["[MASK] 65 66 [MASK] [MASK] 67"]


def test_a_batch_of_shorter_rows_names_its_documents_once():
    arrays = {
        "tokens": np.array([[5, 6], [7, 0], [0, 0], [8, 0]]),
        "weights": np.array([[1, 1], [1, 0], [0, 0], [0, 0]], np.float32),
    }
    origins = [[("a", 0, 4)], [("b", 10, 1), ("c", 0, 1)]]
    lines = batch_lines(3, arrays, origins, lambda ids: [" ".join(map(str, ids))], filler_id=0)
    assert lines[0].startswith("Step 3: 4 rows of 2 tokens, 3 of 8 targets count, ids 0 to 8.")
    assert lines[1:] == [
        "Row 0: 2 targets of 2",
        "  a: tokens 0 to 3",
        "  | 5 6",
        "Row 1: 1 targets of 2, 1 places of filling",
        "  part 2 of 2 of the documents of row 0",
        "  | 7",
        "Row 2: 0 targets of 2, 2 places of filling",
        "  b: tokens 10 to 10",
        "  c: tokens 0 to 0",
        "  | ",
        "Row 3: 0 targets of 2, 1 places of filling",
        "  part 2 of 2 of the documents of row 2",
        "  | 8",
    ]


@pytest.mark.parametrize("longest", [1, 2, 3, 100, 2048, 2**20 - 1, 2**20])
def test_bins_of_the_picture_hold_every_length_once(longest):
    edges = bin_edges(longest)
    assert edges[0] == 1
    assert edges[-1] > longest
    assert np.diff(edges).min() >= 1


def test_the_picture_is_written_or_refused(tmp_path):
    lengths = document_lengths(np.cumsum([0, 1, 3, 0, 900, *[40] * 500]))
    draw_lengths(tmp_path / "a.png", lengths, 64, "a title " * 40)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        draw_lengths(tmp_path, lengths, 64, "")


def text_set(folder: Path) -> list[np.ndarray]:
    """Writes three documents of bytes with their tokenizer."""
    tokenizer = load_tokenizer("bytes")
    texts = ["first document\n", "second\tone", "ß" * 30]
    documents = [
        np.append(ids, tokenizer.entry.eos_id).astype(np.int64) for ids in tokenizer.encode(texts)
    ]
    write_data_set(folder, {"train": documents}, vocab_size=tokenizer.entry.vocab_size)
    tokenizer.save(folder)
    return documents


def inspection(show, has_model=False, num_devices=1, **keys) -> Inspection:
    keys = {"max_target_length": 8, "per_device_batch_size": 2} | keys
    return Inspection(configure(**keys), num_devices, has_model, show)


def test_the_batch_is_that_of_training(tmp_path):
    documents = text_set(tmp_path / "set")
    stream = np.concatenate(documents)
    keys = {"dataset_path": str(tmp_path / "set"), "enable_data_shuffling": False}
    lines: list[str] = []
    inspection(lines.append, gradient_accumulation_steps=2, num_devices=2, **keys).show_batch(0)
    shown = "\n".join(lines)
    assert "Step 0: 8 rows of 8 tokens" in shown
    assert "\n  | first do\n" in shown
    assert "\n  | cument␊" in shown
    lines.clear()
    # 88 tokens make 11 windows: step 3 begins with window 6, and step 5 holds the last.
    inspection(lines.append, **keys).show_batch(3)
    shown = "\n".join(lines)
    ids = stream[48:56]
    assert f"ids {stream[48:64].min()} to {stream[48:64].max()}" in shown
    text = bytes(ids.astype(np.uint8)).decode(errors="replace")
    assert f"\n  | {text}\n" in shown
    assert "  numbers.txt, row 2: tokens 21 to 29\n" in shown


def test_refusals(tmp_path):
    text_set(tmp_path / "set")
    keys = {"dataset_path": str(tmp_path / "set")}
    with pytest.raises(UserError, match="ends after 6 steps"):
        inspection(lambda line: None, num_epoch=1, **keys).show_batch(6)
    with pytest.raises(UserError, match="not a whole number"):
        inspection(lambda line: None, per_device_batch_size=0.5, **keys)
    with pytest.raises(UserError, match="nothing to inspect"):
        inspection(lambda line: None, dataset_type="synthetic")
    lines: list[str] = []
    small = inspection(lines.append, has_model=True, vocab_size=200, **keys)
    with pytest.raises(UserError, match="vocab_size=200 is too small: id"):
        small.show_statistics(ALL, None)
    assert "the model has vocab_size = 200 ids: 3 tokens are beyond" in "\n".join(lines)


def test_hidden_tokens_are_shown_as_masks(tmp_path):
    text_set(tmp_path / "set")
    lines: list[str] = []
    inspection(
        lines.append,
        dataset_path=str(tmp_path / "set"),
        mlm_training=True,
        mlm_mask_id=299,
        mlm_mask_prob=1.0,
        mlm_same_token_prob=0.0,
        mlm_random_token_prob=0.0,
        vocab_size=300,
        enable_data_shuffling=False,
    ).show_batch(0)
    assert "Row 0: 8 targets of 8" in "\n".join(lines)
    assert f"  | {'[MASK]' * 8}\n" in "\n".join(lines)


def test_without_its_tokenizer_ids_are_shown(tmp_path):
    write_data_set(tmp_path / "set", {"train": [np.arange(1, 30)]})
    lines: list[str] = []
    inspection(
        lines.append, dataset_path=str(tmp_path / "set"), enable_data_shuffling=False
    ).show_batch(0)
    shown = "\n".join(lines)
    assert "Showing ids instead of text" in shown
    assert "\n  | 1 2 3 4 5 6 7 8\n" in shown


def run(folder: Path, environment: dict[str, str], *arguments: str):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def test_the_program_reports_statistics(tmp_path, users_environment):
    documents = text_set(tmp_path / "set")
    environment = users_environment | {"PYTHONIOENCODING": "utf-8"}
    result = run(
        tmp_path, environment, "set", "max_target_length=8", "vocab_size=300", "output=lengths.png"
    )
    assert result.returncode == 0, result.stderr
    stream = np.concatenate(documents)
    lines = result.stdout.splitlines()
    assert f"Tokens: all {stream.size} read" in lines
    different = np.unique(stream).size
    assert f"  ids: {stream.min()} to {stream.max()}, {different} different ones" in lines
    assert "  the model has vocab_size = 300 ids: every id is below that" in lines
    rows = -(-(stream.size - 1) // 8)
    assert f"Rows of 8 tokens: {rows} in an epoch, all read" in lines
    counted = stream.size - 3
    share = f"{counted} of {8 * rows} places ({counted / (8 * rows):.2%})"
    assert f"  targets that count: {share}" in lines
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_the_program_refuses_without_traceback(tmp_path, users_environment):
    result = run(tmp_path, users_environment, "nowhere", "step=3")
    assert result.returncode == 2
    assert result.stderr.startswith("error: dataset_path=nowhere")
    assert "Traceback" not in result.stderr
    result = run(tmp_path, users_environment, "set", "step=-1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: step=-1 is not a whole number, 0 or more.")


def test_labels_beyond_the_vocabulary_are_refused(tmp_path):
    import pyarrow

    labels = pyarrow.array([[6, 400, -100], [9, -100, -100]], pyarrow.list_(pyarrow.int64()))
    path = tmp_path / "x.parquet"
    token_files.write_parquet(path, [np.array([5, 6, 7]), np.array([8, 9, 0])], labels=labels)
    lines: list[str] = []
    keys = {"dataset_path": str(path), "max_target_length": 3, "vocab_size": 300}
    small = inspection(lines.append, has_model=True, **keys)
    with pytest.raises(UserError, match="vocab_size=300 is too small: id 400 occurs"):
        small.show_statistics(ALL, None)
    assert "  labels that count: ids up to 400" in lines
    with pytest.raises(UserError, match="vocab_size=300 is too small: id 400 occurs"):
        small.show_batch(0)


def test_a_file_named_for_evaluation_is_read_where_it_is_the_one_named(tmp_path):
    write_records(tmp_path / "validation.tfrecord", [np.arange(1, 30)] * 2)
    lines: list[str] = []
    keys = {"dataset_path": str(tmp_path / "validation.tfrecord")}
    inspection(lines.append, **keys).show_statistics(ALL, None)
    assert "Tokens: all 58 read" in "\n".join(lines)


def test_records_are_shown_as_text_by_the_tokenizer_beside_them(tmp_path):
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode(["some text"])
    write_records(tmp_path / "x.tfrecord", [np.asarray(ids)] * 2)
    lines: list[str] = []
    keys = {"dataset_path": str(tmp_path / "x.tfrecord"), "max_target_length": 16}
    inspection(lines.append, **keys).show_batch(0)
    assert "  | 115 111" in "\n".join(lines)
    lines.clear()
    tokenizer.save(tmp_path)
    inspection(lines.append, **keys).show_batch(0)
    assert "  | some tex" in "\n".join(lines)
