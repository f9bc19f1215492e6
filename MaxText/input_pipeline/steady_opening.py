"""Data that cannot be opened at the start because storage fails for a moment: tried again.

Imports no jax.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from MaxText.errors import UserError
from MaxText.input_pipeline.storage import is_url
from MaxText.input_pipeline.transient import may_pass

if TYPE_CHECKING:
    from MaxText.input_pipeline.retrying import Incidents, Retrying

_Opened = TypeVar("_Opened")


class SteadyOpening:
    """Opens data sets, as often as failed reads are tried again in mid-run."""

    def __init__(self, retrying: "Retrying", incidents: "Incidents"):
        """Args: `retrying`: limits; `incidents`: takes what was tried again."""
        self._retrying = retrying
        self._incidents = incidents

    def open(self, location: str, open_once: Callable[[], _Opened]) -> _Opened:
        """What `open_once` returns.

        Args:
          location: of the data, for messages.
          open_once: opens it from nothing; what it made before it failed is dropped.

        Raises:
          UserError: storage has failed at every try.
          Exception: what `open_once` raises and no further try can mend, at once.
        """
        remote = is_url(location) or location.startswith("@")
        retries, failed, began = self._retrying.retries, 0, time.monotonic()
        while True:
            try:
                opened = open_once()
                break
            except Exception as error:
                if not may_pass(error, remote):
                    raise
                failed += 1
                reason = (str(error) or type(error).__name__).rstrip(".")
                if failed > retries:
                    raise UserError(
                        f"{location} could not be opened after {failed} "
                        f"{'try' if failed == 1 else 'tries'} in {time.monotonic() - began:,.1f} "
                        f"s: {reason}. Look at its storage, and start again."
                    ) from error
            wait = self._retrying.wait(failed)
            self._incidents.add(
                f"{location} could not be opened: {reason}. Try {failed + 1} of {retries + 1} in "
                f"{wait:g} s."
            )
            time.sleep(wait)
        if failed:
            self._incidents.add(
                f"{location} was opened at try {failed + 1}, after "
                f"{time.monotonic() - began:,.1f} s."
            )
        return opened
