"""A progress bar on the terminal; without a terminal lines go out as they are."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from MaxText.monitoring.step_line import StepReport, duration


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Steps, loss, speed and time left, in the last line of stderr while the run goes on."""

    def __init__(self, first_step: int, num_steps: int, show: Callable[[str], None] = print):
        """
        Args:
          first_step: the update done first.
          num_steps: updates of the whole run.
          show: where lines go that are not part of the bar.
        """
        self._show = show
        self._bar: Any = None
        if not (sys.stderr.isatty() and jax.process_index() == 0):
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True),
            # Lines come through `line`; whatever else is printed stays on its own stream.
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=first_step, numbers="compiling"
        )
        self._bar.start()

    def line(self, text: str) -> None:
        """Shows a line; above the bar if there is one."""
        if self._bar is not None and sys.stdout.isatty():
            # Both streams are the terminal: written past the bar, the line would tear it.
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._show(text)

    def update(self, report: StepReport) -> None:
        """Moves the bar to a finished step."""
        if self._bar is None:
            return
        numbers = (
            f"loss {float(report.metrics['loss']):.3f}  "
            f"{report.tokens_per_second * jax.device_count():,.0f} tokens/s"
        )
        if report.seconds_left is not None:
            numbers += f"  {duration(report.seconds_left)} left"
        self._bar.update(self._task, completed=report.step + 1, numbers=numbers)

    def close(self) -> None:
        """Removes the bar. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *exception: object) -> None:
        self.close()
