"""A run with checkpoints."""

from tests.checkpointing.conftest import kept, run, saved_run

__all__ = ["kept", "run", "saved_run"]
