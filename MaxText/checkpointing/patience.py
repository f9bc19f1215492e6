"""Slow-storage warnings."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from MaxText.runtime.periodic import meanwhile

_SECONDS = 60.0


def told_while_waiting(what: str, show: Callable[[str], None]) -> AbstractContextManager[None]:
    """Logs a warning that starts with `what`, once a minute while the block runs."""
    began = time.monotonic()

    def tell() -> None:
        waited = time.monotonic() - began
        show(
            f"!!! WARNING: {what}, and the run has waited for {waited:.0f} s. "
            "What a bucket does not take is sent again and again; after heartbeat_timeout the "
            "process ends, and the same command goes on from the newest checkpoint."
        )

    return meanwhile(tell, _SECONDS, "patience")
