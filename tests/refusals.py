"""The messages of refusals."""

from collections.abc import Callable

import pytest

from MaxText.errors import UserError


def refused(message: str, function: Callable, *arguments, **keywords) -> UserError:
    """Asserts that a call raises a UserError whose text matches `message`; returns it."""
    with pytest.raises(UserError, match=message) as caught:
        function(*arguments, **keywords)
    return caught.value
