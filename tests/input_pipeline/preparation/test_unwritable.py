"""What is said where a folder cannot be written."""

import errno
import os

import pytest

from MaxText.input_pipeline.preparation.unwritable import cannot_write

AGAIN = ", and run the same command again: what was finished is kept."


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room or choose another dataset_path"),
        (errno.EDQUOT, "Make room or choose another dataset_path"),
        (errno.EACCES, "Get the right to write there or choose another dataset_path"),
        (errno.EROFS, "Get the right to write there or choose another dataset_path"),
        (errno.ENOENT, "Mend that or choose another dataset_path"),
    ],
)
def test_the_remedy_follows_the_reason(number, remedy):
    reason = os.strerror(number)
    error = cannot_write("out", OSError(number, reason, "/proc/.x.lock"))
    assert str(error) == f"/proc/.x.lock cannot be written ({reason}). {remedy}{AGAIN}"
    assert str(cannot_write("out", OSError(number, reason))).startswith("out cannot be written (")


def test_a_library_gives_words_only():
    error = cannot_write("out", OSError(f"RESOURCE: {os.strerror(errno.ENOSPC)}"))
    assert "Make room" in str(error)
