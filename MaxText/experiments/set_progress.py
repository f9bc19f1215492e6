"""How far a set of runs is: one bar with the time left on a terminal, else a line now and then."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from MaxText.experiments.comparison_plan import Run
from MaxText.metrics.step_line import duration

_SECONDS_BETWEEN_LINES = 60.0


class SetProgress(contextlib.AbstractContextManager["SetProgress"]):
    """Follows runs that are done one after another.

    The time left is the work left at the speed of the work done since this program started, and for
    each run to come the time that runs took up to their first step. A run that goes on from a
    checkpoint counts from there.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        finished: Collection[Run],
        show: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          runs: all of them, in order.
          finished: those that earlier commands finished.
          show: takes lines where there is no terminal.
          now: a clock in seconds.
        """
        self._total = sum(run.weight for run in runs)
        self._done = sum(run.weight for run in finished)
        self._numbers = {id(run): number for number, run in enumerate(runs, 1)}
        self._show, self._now = show, now
        self._began = self._line_at = now()
        self._run: Run | None = None
        self._run_began = self._began
        self._steps = 0
        self._waiting = len(runs) - len(finished)
        # Seconds that runs took up to their first step, and whether the run at work is beyond it.
        self._starts: list[float] = []
        self._has_started = False
        # Work that was there already when this program started.
        self._found = self._done
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = self._new_bar()

    def _new_bar(self) -> Any:
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.percentage:.0f} %"),
            progress.TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task = bar.add_task("", total=self._total, left="")
        bar.update(self._task, completed=self._done)
        bar.start()
        return bar

    def line(self, text: str) -> None:
        """Shows a line; above the bar if there is one."""
        self._line_at = self._now()
        if self._bar is not None and sys.stdout.isatty():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._show(text)

    def begin(self, run: Run, steps: int) -> None:
        """A run starts, or goes on; earlier starts recorded `steps` updates."""
        self._run, self._steps, self._run_began = run, steps, self._now()
        self._waiting, self._has_started = self._waiting - 1, False
        self._found += self._part(steps)
        self.line(f"{self._name(run)}: {'goes on' if steps else 'started'}")
        self._update(steps)

    def steps(self, done: int) -> None:
        """The run has done so many of its updates."""
        if done > self._steps and not self._has_started:
            # Steps that were done when they were first seen belong to the start.
            self._has_started = True
            self._starts.append(self._now() - self._run_began)
            self._found += self._part(done) - self._part(self._steps)
        self._update(done)
        assert self._run is not None
        if self._bar is None and self._now() - self._line_at >= _SECONDS_BETWEEN_LINES:
            run = self._run
            self.line(f"{self._name(run)}: {done}/{run.config.run.steps} steps{self.left()}")

    def end(self, run: Run, result: str) -> None:
        """The run has ended."""
        self._run, self._steps = None, 0
        self._done += run.weight
        self._update(0)
        took = duration(self._now() - self._run_began)
        self.line(f"{self._name(run)}: {result}, {took}{self.left()}")

    def pass_over(self, run: Run, why: str) -> None:
        """A run is left out after all."""
        self._waiting -= 1
        self._done += run.weight
        self._found += run.weight
        self.line(f"{self._name(run)}: {why}")

    def left(self) -> str:
        """The time left in words, after a comma; nothing while it cannot be told."""
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
        return f", about {duration(seconds)} left"

    def _part(self, steps: int) -> float:
        if self._run is None:
            return 0.0
        return self._run.weight * min(steps / self._run.config.run.steps, 1.0)

    def _name(self, run: Run) -> str:
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
            left=self.left().removeprefix(", "),
        )

    def close(self) -> None:
        """Removes the bar. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *exception: object) -> None:
        self.close()
