"""The runs that reports are tested with."""

from tests.reports.conftest import completed_run, eventful_run, run

__all__ = ["completed_run", "eventful_run", "run"]
