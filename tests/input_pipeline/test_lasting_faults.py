"""Files that do not come back, are damaged for good, or hold other data: refused or skipped."""

import itertools

import pytest

from MaxText.errors import UserError

from .faults import (
    DOCUMENTS,
    Mend,
    assert_same_or_lost,
    assert_undisturbed,
    broken,
    changed,
    failing_reads,
    kept_files,  # noqa: F401
    moved,
    opened,
    settle,
    undisturbed,
)
from .small_data import write_data_set
from .streams import token_files
from .test_loader import take


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_what_never_comes_is_an_error_with_the_remedy(kept):
    folder, files, keys = kept
    waits = []
    iterator = opened(folder, keys | {"data_read_retries": 3}, waits.append)
    restore = moved(files)
    with pytest.raises(UserError) as caught:
        next(iterator)
    message = str(caught.value)
    assert message.startswith("Step 0 of the training data could not be read after 4 tries in ")
    assert any(file.name in message for file in files)
    assert "The same command then goes on from the last checkpoint" in message
    assert len([line for line in waits if "could not be read" in line]) == 3
    # The iterator is still one: after the files are back it goes on where it was.
    restore()
    assert_undisturbed(take(iterator, 20), undisturbed(folder, keys))


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_a_damaged_record_is_read_once_more(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)
    # Of a file that is copied over while it is read.
    iterator = opened(folder, keys, Mend(lambda: restore()))
    restore = changed(files, broken)
    assert_undisturbed(take(iterator, 20), expected)
    assert len(iterator.incidents.drain()) == 2
    # The same bytes again are the same.
    iterator = opened(folder, keys)
    restore = changed(files, broken)
    with pytest.raises(UserError, match=r"after 2 tries .*\.tfrecord at byte .*on_bad_record=skip"):
        take(iterator, 20)
    restore()


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_a_file_that_is_filled_while_it_comes_back(kept):
    folder, files, keys = kept
    expected = undisturbed(folder, keys)

    def fill():
        for file, content in whole.items():
            file.write_bytes(bytes(len(content)))  # as some programs copy: first the size

    whole = {file: file.read_bytes() for file in files}
    put_back = Mend(lambda: [file.write_bytes(content) for file, content in whole.items()], at=3)
    show = Mend(fill, at=2)

    def shown(line):
        show(line)
        put_back(line)

    iterator = opened(folder, keys, shown)
    for file in files:
        file.unlink()
    assert_undisturbed(take(iterator, 20), expected)
    tries = [line.split(" Try ")[1][:6] for line in iterator.incidents.drain() if " Try " in line]
    assert tries == ["2 of 6", "3 of 6", "4 of 4"]


@pytest.mark.parametrize("kept", ["tfrecord", "array_record"], indirect=True)
def test_skipping_a_damaged_record_waits_for_nothing(kept):
    folder, files, keys = kept
    keys = keys | {"on_bad_record": "skip", "data_retry_seconds": 1000.0, "max_bad_records": 1000}
    expected = undisturbed(folder, keys)
    iterator = opened(folder, keys)
    restore = changed(files[:1], broken)
    batches = take(iterator, 20)
    assert iterator.incidents.drain() == []
    bad = iterator.bad_records.drain()
    assert bad
    assert all(files[0].name in message for message in bad)
    lost = assert_same_or_lost(batches, expected)
    assert 0 < lost < 40
    restore()


@pytest.mark.parametrize("kept", ["array_record", "bin", "tfrecord", "parquet"], indirect=True)
def test_skipping_a_file_that_does_not_come_back(kept):
    folder, files, keys = kept
    keys = keys | {"on_bad_record": "skip", "data_read_retries": 2, "max_bad_records": 1000}
    expected = undisturbed(folder, keys, 60)
    iterator = opened(folder, keys)
    restore = moved(files[:1])
    batches = list(itertools.islice(iterator, 40))
    incidents = iterator.incidents.drain()
    assert "was read at try 4, without what still could not be, after " in incidents[-1]
    tried = [line for line in incidents if "Try" in line]
    # One step waits for the file; later ones do not, and read it again when it is back.
    assert len(tried) == 2
    assert len({line.split()[1] for line in tried}) == 1
    assert all(files[0].name in message for message in iterator.bad_records.drain())
    assert assert_same_or_lost(batches, expected[:40]) > 0
    settle(iterator)
    restore()
    batches = take(iterator, 20)
    assert_undisturbed(batches[4:], expected[44:])
    assert iterator.incidents.drain() == []


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_skipping_what_was_cut_off_a_file(kept):
    folder, files, keys = kept
    keys = keys | {"on_bad_record": "skip", "data_read_retries": 2, "max_bad_records": 1000}
    expected = undisturbed(folder, keys, 60)
    iterator = opened(folder, keys)
    restore = changed(files[:2], lambda content: content[: len(content) // 2])
    batches = take(iterator, 60)
    lost = assert_same_or_lost(batches, expected)
    restore()
    # Rows of whole records before the cut are read: without the two files 80 would be lost.
    assert 0 < lost < 60
    # Each of the files made one step wait, with up to two further tries.
    assert 2 <= len([line for line in iterator.incidents.drain() if " Try " in line]) <= 4


@pytest.mark.parametrize("kept", ["tfrecord", "megatron", "array_record"], indirect=True)
def test_other_data_are_refused(kept):
    folder, files, keys = kept
    iterator = opened(folder, keys | {"data_read_retries": 2})
    next(iterator)
    settle(iterator)
    others = [document[::-1].copy() for document in DOCUMENTS]
    # The same names; the sizes of tfrecord's differ.
    if folder.joinpath("manifest.json").exists():
        (folder.parent / "old").mkdir()
        folder.rename(folder.parent / "old" / "set")
        write_data_set(folder, {"train": others})
        message = "holds other data than at the start"
    elif files[0].suffix == ".bin":
        token_files.write_megatron(folder / "ids", others)
        message = "read again, is another batch"
    else:
        for file in files:
            token_files.write_tfrecord(file, [*others, *others])
        message = "it holds other data"
    with (
        failing_reads(1),
        pytest.raises(UserError, match=f"after 3 tries .*{message}"),
    ):
        take(iterator, 20)
