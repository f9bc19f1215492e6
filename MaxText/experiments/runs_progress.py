"""Progress of a set of runs: a bar on a terminal, else periodic lines."""

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence

from rich import progress

from MaxText.experiments.comparison_plan import Trial
from MaxText.metrics.sinks.terminal import print_above, start_bar
from MaxText.metrics.step_line import format_duration

_SECONDS_BETWEEN_LINES = 60.0


class RunsProgress(contextlib.AbstractContextManager["RunsProgress"]):
    """Tracks sequential runs; the time left assumes the speed so far."""

    def __init__(
        self,
        runs: Sequence[Trial],
        finished: Collection[Trial],
        log: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """`finished` runs are from earlier commands."""
        self._names = {
            id(run): f"[{number}/{len(runs)}] {run.name}" for number, run in enumerate(runs, 1)
        }
        self._log, self._now = log, now
        self._began = self._line_at = now()  # of the current run; of the last line
        self._done = sum(run.weight for run in finished)  # work of all runs but the current one
        self._bar = start_bar(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            get_time=now,
            speed_estimate_period=float("inf"),
            disable=not sys.stderr.isatty(),
        )
        total = sum(run.weight for run in runs)
        self._task = self._bar.add_task("", total=total, completed=self._done)

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._line_at = self._now()
        print_above(None if self._bar.disable else self._bar, text, self._log)

    def begin(self, run: Trial, steps: int) -> None:
        """Starts or resumes a run, with `steps` completed earlier."""
        self._run, self._began = run, self._now()
        if steps:  # their time is unknown: forgets the speed
            self._bar.reset(self._task, completed=self._completed(steps))
        self._bar.update(self._task, description=self._names[id(run)])
        self.line(f"{self._names[id(run)]}: {'resumed' if steps else 'started'}")

    def steps(self, done: int) -> None:
        """Reports the number of completed steps."""
        self._bar.update(self._task, completed=self._completed(done))
        if self._bar.disable and self._now() - self._line_at >= _SECONDS_BETWEEN_LINES:
            name = self._names[id(self._run)]
            self.line(f"{name}: {done}/{self._run.config.run.steps} steps{self.eta()}")

    def _completed(self, steps: int) -> float:
        return self._done + self._run.weight * steps / self._run.config.run.steps

    def end(self, run: Trial, result: str) -> None:
        """Ends the current run."""
        self._done += run.weight
        self._bar.update(self._task, completed=self._done, description="")
        self.line(f"{self._names[id(run)]}: {result}, {self.took}{self.eta()}")

    @property
    def took(self) -> str:
        """Duration of the current run so far."""
        return format_duration(self._now() - self._began)

    def skip(self, run: Trial, why: str) -> None:
        """Ends or passes over a run; forgets the speed."""
        self._done += run.weight
        self._bar.reset(self._task, completed=self._done, description="")
        self.line(f"{self._names[id(run)]}: {why}")

    def eta(self) -> str:
        """Returns ", about ... left", or "" while unknown."""
        seconds = self._bar.tasks[0].time_remaining
        return f", about {format_duration(seconds)} left" if seconds else ""

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
