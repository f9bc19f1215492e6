"""Terminal output: lines on stdout, a progress bar on stderr."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from MaxText.metrics.events import Event, Sink
from MaxText.metrics.step_line import compact_step_line, format_duration, step_line

# Source of a compiled step, see runtime.compiled_steps.
_SOURCES = {
    "": "compiled",
    "cache": "loaded from the compilation cache",
    "file": "loaded from compiled_trainstep_file",
}


class Terminal(Sink):
    """Prints steps, compilations, skips and rollbacks."""

    def __init__(
        self, num_steps: int, log: Callable[[str], None] = print, *, step_line: str = "auto"
    ):
        """Prints nothing yet; "auto" is "compact" on a terminal, else "full"."""
        on_terminal = step_line == "auto" and sys.stdout.isatty()
        self._compact = step_line == "compact" or on_terminal
        self._num_steps = num_steps
        self._log = log
        self._bar: Any = None
        self._task: Any = None

    def write(self, event: Event) -> None:
        if event.kind in ("start", "resume"):
            self._start_bar(event.step or 0)
        fields = event.fields
        if event.kind == "compile":
            shape = f"{fields['rows']} x {fields['length']} tokens"
            source = _SOURCES[fields.get("source", "")]
            self.line(f"Train step ({shape}) {source} in {fields['compile_seconds']:.1f} s")
        if event.kind == "step_skipped":
            count = fields["count"]
            steps = f"Step {event.step}" if count == 1 else f"{count} steps up to {event.step}"
            self.line(f"{steps} skipped: {fields['reason']}")
        # A repeated event was printed before, and its exclusions when the data were opened.
        if event.kind == "rollback" and not fields.get("again"):
            first, end = fields["samples"]
            self.line(
                f"Rolling back to step {fields['restored_step']} ({fields['source']}), skipping "
                f"samples {first} to {end - 1}. Reason (step {fields['detected_step']}): "
                f"{fields['reason']}"
            )
        if event.kind == "step" and event.step is not None:
            self._show_step(event.step, fields)
        if since := fields.get("seconds_since_launch"):
            self.line(f"First step after {since:.1f} s")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None and sys.stdout.isatty():
            # Both streams are the terminal: printed past the bar, the line would tear it.
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._log(text)

    def close(self, until: float | None = None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start_bar(self, first_step: int) -> None:
        if not (sys.stderr.isatty() and jax.process_index() == 0):
            return
        from rich import console, progress

        self._bar = progress.Progress(
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeElapsedColumn(),
            console=console.Console(stderr=True),
            # Lines come through `line`; other output stays on its own stream.
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(
            "", total=self._num_steps, completed=first_step, numbers="compiling"
        )

    def _show_step(self, step: int, row: Mapping[str, Any]) -> None:
        left = row["perf/step_time_seconds"] * (self._num_steps - 1 - step)
        if self._compact:
            self.line(compact_step_line(step, row, self._num_steps, left))
        else:
            self.line(step_line(step, row, left))
        if self._bar is not None:
            speed = row["perf/per_device_tokens_per_sec"] * jax.device_count()
            numbers = f"loss {row['learning/loss']:.3f}  {speed:,.0f} tokens/s"
            numbers += f"  {format_duration(left)} left"
            self._bar.update(self._task, completed=step + 1, numbers=numbers)
