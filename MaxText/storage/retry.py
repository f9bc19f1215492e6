"""Retries of calls that fail while storage does."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")


def exponential_delays(count: int, first: float, longest: float) -> Iterator[float]:
    """Yields `count` delays in seconds that double each time, up to `longest`."""
    delay = first
    for _ in range(count):
        delay = min(delay, longest)
        yield delay
        delay *= 2


def call_with_retries(
    call: Callable[[], _Result],
    *,
    delays: Iterable[float],
    is_retryable: Callable[[Exception], bool],
    report: Callable[[Exception, float], None] | None = None,
    wait: Callable[[float], None] | None = None,
) -> _Result:
    """Returns the result of the first successful `call`.

    Args:
      call: What may fail.
      delays: Seconds to wait before each retry; there are as many retries as delays.
      is_retryable: Whether an error may be gone at the next call. Other errors are raised at once.
      report: Called with each error that is retried, and the delay.
      wait: Waits for a number of seconds; None is time.sleep. What it raises ends the retries.

    Raises:
      Exception: The error of the last call, or the first one that is not retryable.
    """
    for delay in delays:
        try:
            return call()
        except Exception as error:
            if not is_retryable(error):
                raise
            if report is not None:
                report(error, delay)
        (wait or time.sleep)(delay)
    return call()
