"""Progress of a set of runs: a bar on a terminal, else periodic lines."""

import contextlib
import statistics
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

    The time left is the remaining work at the speed so far, plus the mean startup time for each
    remaining run. Steps that a resumed run had already done do not count toward the speed.
    """

    def __init__(
        self,
        runs: Sequence[Trial],
        finished: Collection[Trial],
        show: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """`finished` runs are from earlier commands."""
        self._total = sum(run.weight for run in runs)
        self._done = sum(run.weight for run in finished)
        self._numbers = {id(run): number for number, run in enumerate(runs, 1)}
        self._show, self._now = show, now
        self._began = self._line_at = now()
        self._run: Trial | None = None
        self._run_began = self._began
        self._steps = 0
        self._waiting = len(runs) - len(finished)
        # Seconds until the first step of each run, and whether the current run is past it.
        self._starts: list[float] = []
        self._has_started = False
        self._found = self._done  # work that existed before this program started
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
        print_above(self._bar, text, self._show)

    def begin(self, run: Trial, steps: int) -> None:
        """Starts or resumes a run, with `steps` completed earlier."""
        self._run, self._steps, self._run_began = run, steps, self._now()
        self._waiting, self._has_started = self._waiting - 1, False
        self._found += self._part(steps)
        self.line(f"{self._name(run)}: {'resumed' if steps else 'started'}")
        self._update(steps)

    def steps(self, done: int) -> None:
        """Reports the number of completed steps."""
        if done > self._steps and not self._has_started:
            # Steps done by the first report count as startup.
            self._has_started = True
            self._starts.append(self._now() - self._run_began)
            self._found += self._part(done) - self._part(self._steps)
        self._update(done)
        assert self._run is not None
        if self._bar is None and self._now() - self._line_at >= _SECONDS_BETWEEN_LINES:
            run = self._run
            self.line(f"{self._name(run)}: {done}/{run.config.run.steps} steps{self.eta()}")

    def end(self, run: Trial, result: str) -> None:
        """Ends the current run."""
        self._run, self._steps = None, 0
        self._done += run.weight
        self._update(0)
        took = format_duration(self._now() - self._run_began)
        self.line(f"{self._name(run)}: {result}, {took}{self.eta()}")

    def skip(self, run: Trial, why: str) -> None:
        """Skips a run."""
        self._waiting -= 1
        self._done += run.weight
        self._found += run.weight
        self.line(f"{self._name(run)}: {why}")

    def eta(self) -> str:
        """Returns ", about ... left", or "" while unknown."""
        now_done = self._done + self._part(self._steps)
        now = self._now()
        is_starting = self._run is not None and not self._has_started
        starts = sum(self._starts) + (now - self._run_began if is_starting else 0.0)
        worked, elapsed = now_done - self._found, now - self._began - starts
        rest = self._total - now_done
        if worked <= 0 or elapsed <= 0 or rest <= 0:
            return ""
        start = statistics.fmean(self._starts) if self._starts else 0.0
        seconds = rest * elapsed / worked + start * (self._waiting + is_starting)
        return f", about {format_duration(seconds)} left"

    def _part(self, steps: int) -> float:
        if self._run is None:
            return 0.0
        return self._run.weight * min(steps / self._run.config.run.steps, 1.0)

    def _name(self, run: Trial) -> str:
        return f"[{self._numbers[id(run)]}/{len(self._numbers)}] {run.name}"

    def _update(self, steps: int) -> None:
        self._steps = steps
        if self._bar is None:
            return
        what = "" if self._run is None else self._name(self._run)
        self._bar.update(
            self._task,
            description=what,
            completed=self._done + self._part(steps),
            left=self.eta().removeprefix(", "),
        )

    def close(self) -> None:
        """Removes the bar. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *exception: object) -> None:
        self.close()
