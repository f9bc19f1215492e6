"""Progress of a set of runs: a bar on a terminal, else periodic lines."""

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from MaxText.experiments.comparison_plan import Trial
from MaxText.metrics.sinks.terminal import print_above, start_bar
from MaxText.metrics.step_line import format_duration

_SECONDS_BETWEEN_LINES = 60.0


class RunsProgress(contextlib.AbstractContextManager["RunsProgress"]):
    """Tracks sequential runs.

    The time left is the remaining work at the speed of the steps so far, without startup.
    """

    def __init__(
        self,
        runs: Sequence[Trial],
        finished: Collection[Trial],
        log: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """`finished` runs are from earlier commands."""
        self._total = sum(run.weight for run in runs)
        self._done = sum(run.weight for run in finished)  # by all runs but the current one
        self._names = {
            id(run): f"[{number}/{len(runs)}] {run.name}" for number, run in enumerate(runs, 1)
        }
        self._log, self._now = log, now
        self._began = self._line_at = now()  # of the current run; of the last line
        self._work = self._seconds = 0.0  # of the steps that determine the speed
        self._bar = self._new_bar() if sys.stderr.isatty() else None

    def _new_bar(self) -> Any:
        from rich import progress

        bar = start_bar(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.percentage:.0f} %"),
            progress.TextColumn("{task.fields[left]}"),
        )
        self._task = bar.add_task("", total=self._total, completed=self._done, left="")
        return bar

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._line_at = self._now()
        print_above(self._bar, text, self._log)

    def begin(self, run: Trial, steps: int) -> None:
        """Starts or resumes a run, with `steps` completed earlier."""
        self._run, self._began = run, self._now()
        self._first, self._reported = steps, (self._began, steps)
        self.line(f"{self._names[id(run)]}: {'resumed' if steps else 'started'}")
        self._update(self._names[id(run)])

    def steps(self, done: int) -> None:
        """Reports the number of completed steps."""
        now, (before, steps) = self._now(), self._reported
        if done > steps:
            if steps > self._first:  # the first report includes startup
                self._work += self._run.weight * (done - steps) / self._run.config.run.steps
                self._seconds += now - before
            self._reported = now, done
        name = self._names[id(self._run)]
        self._update(name)
        if self._bar is None and now - self._line_at >= _SECONDS_BETWEEN_LINES:
            self.line(f"{name}: {done}/{self._run.config.run.steps} steps{self.eta()}")

    def end(self, run: Trial, result: str) -> None:
        """Ends the current run."""
        took = format_duration(self._now() - self._began)
        self._finish(run)
        self.line(f"{self._names[id(run)]}: {result}, {took}{self.eta()}")

    def skip(self, run: Trial, why: str) -> None:
        """Skips a run."""
        self._finish(run)
        self.line(f"{self._names[id(run)]}: {why}")

    def _finish(self, run: Trial) -> None:
        self._done += run.weight
        self._reported = self._now(), 0
        self._update("")

    def eta(self) -> str:
        """Returns ", about ... left", or "" while unknown."""
        rest = self._total - self._completed()
        if self._work <= 0 or rest <= 0:
            return ""
        return f", about {format_duration(rest * self._seconds / self._work)} left"

    def _completed(self) -> float:
        _, steps = self._reported
        part = self._run.weight * steps / self._run.config.run.steps if steps else 0.0
        return self._done + part

    def _update(self, what: str) -> None:
        if self._bar is not None:
            left = self.eta().removeprefix(", ")
            self._bar.update(self._task, description=what, completed=self._completed(), left=left)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
