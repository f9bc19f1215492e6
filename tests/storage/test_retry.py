"""Retries of calls that fail: how often, how long between them, and which errors."""

import pytest

from MaxText.storage.retry import call_with_retries, exponential_delays


def failing(*errors):
    """A function that raises these errors, one a call, and then returns the number of calls."""
    remaining = list(errors)

    def call():
        if remaining:
            raise remaining.pop(0)
        return len(errors) + 1

    return call


def test_delays_double_up_to_the_longest():
    assert [*exponential_delays(5, 1.5, 10.0)] == [1.5, 3.0, 6.0, 10.0, 10.0]
    assert [*exponential_delays(2, 90.0, 60.0)] == [60.0, 60.0]
    assert [*exponential_delays(0, 1.0, 60.0)] == []


def test_retried_until_it_succeeds():
    errors, waits = [OSError("a"), OSError("b")], []
    reported = []
    result = call_with_retries(
        failing(*errors),
        delays=(1.0, 2.0, 4.0),
        is_retryable=lambda error: isinstance(error, OSError),
        report=lambda error, delay: reported.append((error, delay)),
        wait=waits.append,
    )
    assert result == 3
    assert waits == [1.0, 2.0]
    assert reported == [*zip(errors, waits, strict=True)]


@pytest.mark.parametrize("errors", [(KeyError("no"),), (OSError("a"), OSError("b"))])
def test_the_last_or_another_error_is_raised(errors):
    waits = []
    with pytest.raises(type(errors[-1])) as raised:
        call_with_retries(
            failing(*errors),
            delays=(1.0,),
            is_retryable=lambda error: isinstance(error, OSError),
            wait=waits.append,
        )
    assert raised.value is errors[-1]
    assert len(waits) == len(errors) - 1
