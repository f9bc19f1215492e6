"""Tells what is damaged for good from what a later read may find whole, and from other data."""

import contextlib
from collections.abc import Collection, Iterator, Sequence

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord, UnreadableFile
from MaxText.input_pipeline.storage import forget, is_url, sizes_now, version


@contextlib.contextmanager
def told_where(path: str, num_bytes: int, offset: int, unit: str) -> Iterator[None]:
    """Makes errors of reading records of one file a BadRecord that knows whether it may heal.

    Contents of a local file that is there and has its size stay what they are. Everything else may
    change: a file that is gone, was cut short or is behind a network.

    Args:
      path: of the file.
      num_bytes: its size when it was opened first.
      offset: place of the first record that is read.
      unit: what `offset` counts, see BadRecord.

    Raises:
      BadRecord: whatever is raised inside that storage or a library for records may raise.
    """
    try:
        yield
    except BadRecord as problem:
        problem.may_heal |= not _is_whole(path, num_bytes)
        raise
    except Exception as error:
        # RuntimeError is what ArrayRecord raises; libraries behind URLs have errors of their own.
        if not isinstance(error, (UnreadableFile, OSError, RuntimeError)) and (
            isinstance(error, UserError) or not is_url(path)
        ):
            raise
        reason = f"the file cannot be read ({error})"
        raise BadRecord(path, offset, reason, unit, may_heal=True) from error


def check_sizes(files: Sequence[str], sizes: Sequence[int], given_up: Collection[str]) -> None:
    """Looks whether files still have the sizes with which they were opened, see TokenStream.check.

    What was open of them is closed.

    Raises:
      UnreadableFile: one was cut short.
      UserError: one is longer.
    """
    forget(files)
    for file, size, now in zip(files, sizes, sizes_now(files), strict=True):
        if now is None or now == size or file in given_up:
            continue
        problem = f"{file} has {now} bytes and had {size} when it was opened"
        if now < size:
            raise UnreadableFile(f"{problem}: it was cut short. Copy it again.", file)
        raise UserError(f"{problem}: it holds other data. Put the file back.")


def _is_whole(path: str, num_bytes: int) -> bool:
    if is_url(path):
        return False
    try:
        return version(path)[0] == num_bytes
    except UnreadableFile:
        return False
