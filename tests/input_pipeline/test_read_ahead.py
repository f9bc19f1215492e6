"""Batches made ahead: in order, bounded, with errors at their step, without threads left over."""

import gc
import threading
import time

import pytest

from MaxText.input_pipeline.read_ahead import BATCHES_READY, ReadAhead, ReadTimeout, within


class Numbers:
    """Step s is {"step": s}; slow for some, an error at `wrong`."""

    def __init__(self, size=30, wrong=None):
        self.size, self.wrong = size, wrong
        self.read: list[int] = []

    def __len__(self):
        return self.size

    def __getitem__(self, step):
        self.read.append(step)
        time.sleep(0.003 * (step % 3))
        if step == self.wrong:
            raise OSError(f"step {step}")
        return {"step": step}


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "batches"}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [1, 4])
def test_steps_come_in_order_and_few_are_ahead(threads):
    source = Numbers()
    ahead = ReadAhead(source, 7, threads, 0)
    wait_for(lambda: len(source.read) == BATCHES_READY)
    time.sleep(0.05)
    assert sorted(source.read) == [7, 8, 9, 10]
    assert [ahead.next(60)["step"] for _ in range(7, 30)] == list(range(7, 30))
    assert sorted(source.read) == list(range(7, 30))
    ahead.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_comes_at_its_step(threads):
    ahead = ReadAhead(Numbers(wrong=3), 0, threads, 0)
    assert [ahead.next(60)["step"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="step 3"):
        ahead.next(60)
    ahead.close()


def test_threads_end_with_their_user():
    before = readers()
    ahead = ReadAhead(Numbers(), 0, 4, 0)
    ahead.next(60)
    assert len(readers() - before) == 4
    ahead.close()
    assert readers() <= before
    forgotten = ReadAhead(Numbers(), 0, 4, 0)
    forgotten.next(60)
    del forgotten
    gc.collect()
    wait_for(lambda: readers() <= before)


def test_a_limit_of_time_for_any_call():
    release = threading.Event()
    with pytest.raises(ReadTimeout, match=r"within 0\.1 s"):
        within(0.1, release.wait)
    release.set()
    assert within(None, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0)
