"""One who waits for data stops at once when the program shall end, whatever it waits for."""

import itertools
import threading

import pytest

from MaxText.errors import StopWaiting
from MaxText.input_pipeline.loader import eval_loader
from MaxText.input_pipeline.read_ahead import ReadAhead, ReadTimeout, pause, within

from .faults import changed, kept_files, opened, settle  # noqa: F401
from .small_data import VOCAB_SIZE, data_keys
from .test_loader import LENGTH


class Hangs:
    """Steps that never come, until they are let go."""

    def __init__(self):
        self.release = threading.Event()

    def __len__(self):
        return 9

    def __getitem__(self, step):
        self.release.wait()
        return {}


def count_until_stopped(batches, at_each=lambda: None):
    """Batches until StopWaiting."""
    count, iterator = 0, iter(batches)
    while True:
        try:
            next(iterator)
        except StopWaiting:
            return count
        count += 1
        at_each()


@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_a_wait_for_a_batch_or_a_file(timeout):
    source, asked = Hangs(), itertools.count()
    ahead = ReadAhead(source, 0, 1, 0)

    def at_the_third_look():
        return next(asked) >= 2

    with pytest.raises(StopWaiting):
        ahead.next(timeout, at_the_third_look)
    with pytest.raises(StopWaiting):
        within(timeout, source.release.wait, lambda: True)
    with pytest.raises(ReadTimeout):
        ahead.next(0.01)
    source.release.set()
    ahead.close()


def test_a_pause_lasts_unless_it_shall_end():
    pause(0.0, lambda: False)
    with pytest.raises(StopWaiting):
        pause(1000.0, lambda: True)


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_the_wait_before_another_try_ends_and_the_position_is_that_of_the_step(kept):
    folder, files, keys = kept
    stop = threading.Event()
    keys = keys | {"data_retry_seconds": 1000.0}

    def show(line):
        if "could not be read" in line:
            stop.set()

    iterator = opened(folder, keys, show)
    iterator.stop_waiting(stop.is_set)
    done = len(list(itertools.islice(iterator, 3)))
    settle(iterator)
    restore = changed(files, lambda content: content[:50])
    done += count_until_stopped(iterator)
    assert iterator.position["step"] == done
    (message,) = iterator.incidents.drain()
    assert message.startswith(f"Step {done} of the training data could not be read")
    restore()
    with pytest.raises(StopWaiting):  # whatever is ready
        next(iterator)
    stop.clear()
    expected = opened(folder, keys)
    expected.resume(iterator.position)
    assert (next(iterator).tokens_BT == next(expected).tokens_BT).all()


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_an_evaluation_ends_in_the_midst_of_its_batches(kept):
    folder, _, keys = kept

    batches = eval_loader(
        data_keys(folder, grain_eval_files=str(folder), **keys),
        eval_steps=-1,
        max_target_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=2,
        show=lambda line: None,
    )
    stop = threading.Event()
    batches.stop_waiting(stop.is_set)
    assert count_until_stopped(batches, stop.set) == 1
