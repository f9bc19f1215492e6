"""Batches read ahead: in order, bounded, with errors at their step, retried, and stopped."""

import gc
import itertools
import threading
import time

import pytest

from MaxText.config.data_sections import DataRetryConfig
from MaxText.errors import UserError, WaitCancelledError
from MaxText.input_pipeline import prefetch
from MaxText.input_pipeline.iterator import EvalBatches
from MaxText.input_pipeline.prefetch import BATCHES_READY, Prefetcher, Retries, poll_intervals
from tests.input_pipeline.faults import changed, kept_files, opened  # noqa: F401
from tests.input_pipeline.small_data import assert_same, data_keys, open_eval, quiet, take
from tests.refusals import refused


class Numbers:
    """Step s is {"step": s}; `error` from step `wrong` on."""

    has_documents = False

    def __init__(self, size=30, wrong=-1, error=None):
        self.size, self.wrong, self.error = size, wrong, error
        self.read: list[int] = []

    def __len__(self):
        return self.size

    def __getitem__(self, step):
        self.read.append(step)
        if step >= self.wrong >= 0:
            raise self.error
        return {"step": step}


class Hangs(Numbers):
    """Steps that never come, until they are released."""

    def __init__(self):
        super().__init__()
        self.release = threading.Event()

    def __getitem__(self, step):
        self.release.wait()
        return {}


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "batches"}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_steps_come_in_order_and_few_are_read_ahead():
    source = Numbers()
    ahead = Prefetcher(source, 7, 0)
    for step in range(7, 30):  # one that reads more would be seen at one of them
        may_be_read = [*range(7, min(step + BATCHES_READY, 30))]
        wait_for(lambda: len(source.read) >= len(may_be_read))  # noqa: B023
        assert source.read == may_be_read
        assert ahead.next(60) == {"step": step}
    ahead.close()
    # An error comes at its step.
    ahead = Prefetcher(Numbers(wrong=3, error=OSError("step 3")), 0, 0)
    assert [ahead.next(60)["step"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="step 3"):
        ahead.next(60)
    ahead.close()


def test_threads_end_with_their_user():
    before = readers()
    ahead = Prefetcher(Numbers(), 0, 0)
    ahead.next(60)
    assert len(readers() - before) == 1
    assert all(thread.daemon for thread in readers())  # one that hangs keeps no program alive
    ahead.close()
    assert readers() <= before
    forgotten = Prefetcher(Numbers(), 0, 0)
    forgotten.next(60)
    del forgotten
    gc.collect()
    wait_for(lambda: readers() <= before)


@pytest.mark.parametrize("timeout", [0.0, 1000.0])
def test_waiting_ends_at_its_limit_or_when_the_run_stops(timeout):
    source, asked = Hangs(), itertools.count()
    ahead = Prefetcher(source, 0, 0)
    with pytest.raises(WaitCancelledError):
        ahead.next(timeout, lambda: next(asked) >= 1)
    with pytest.raises(WaitCancelledError):
        next(poll_intervals(1000.0, lambda: True))
    assert not [*poll_intervals(0.0, lambda: False)]
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        ahead.next(0.01)
    source.release.set()
    ahead.close()


def reader_of(source, **limits):
    """Batches of a source other than BatchSource."""
    return EvalBatches(source, [], Retries(DataRetryConfig(**limits), quiet))


def test_a_hang_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(prefetch, "_SECONDS_TO_CLOSE", 0.05)
    source = Hangs()
    reader = reader_of(source, attempts=0, timeout=0.02)
    refused(r"1 try .*0\.02 s.* \(data_retry.timeout", next, iter(reader))
    source.release.set()


@pytest.mark.parametrize("error", [KeyError("a bug"), UserError("an id is too large")])
def test_other_errors_than_those_of_storage_are_not_retried(error):
    source = Numbers(size=1, wrong=0, error=error)
    with pytest.raises(type(error)) as caught:
        next(iter(reader_of(source, attempts=5)))
    assert caught.value is error
    assert source.read == [0]


def test_waits_double_up_to_a_minute(monkeypatch):
    waits = []
    monkeypatch.setattr(prefetch, "poll_intervals", lambda seconds, _: waits.append(seconds) or ())
    reader = reader_of(Numbers(), attempts=9, delay=1.5)
    refused("10 tries", next, iter(reader))  # of waiting for a batch
    assert waits[1::2] == [1.5, 3, 6, 12, 24, 48, 60, 60, 60]


@pytest.mark.parametrize("kept", ["megatron"], indirect=True)
def test_stopping_ends_the_wait_before_another_try(kept):
    folder, files, keys = kept
    stop = threading.Event()
    keys = keys | {"data_retry.delay": 1000.0}
    iterator = opened(folder, keys, lambda line: stop.set() if " Try " in line else None)
    iterator.stop_waiting(stop.is_set)
    read = list(itertools.islice(iterator, 3))
    iterator.close()
    restore = changed(files, lambda content: content[:50])
    with pytest.raises(WaitCancelledError):
        read.extend(iterator)
    # The position is that of the step which was not read.
    assert iterator.get_state()["step"] == len(read)
    assert f"Step {len(read)}" in "".join(iterator.retries.drain())
    restore()
    with pytest.raises(WaitCancelledError):  # whatever is ready
        next(iterator)
    stop.clear()
    expected = opened(folder, keys)
    expected.set_state(iterator.get_state())
    assert_same(take(iterator, 1), take(expected, 1))
    evaluation = open_eval(data_keys(folder, grain_eval_files=str(folder), **keys), batch=2)
    evaluation.stop_waiting(lambda: True)
    with pytest.raises(WaitCancelledError):
        next(iter(evaluation))
