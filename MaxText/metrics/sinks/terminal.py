"""Lines of a run on the terminal."""

import sys
from collections.abc import Callable

from MaxText.metrics.events import Event, Sink
from MaxText.metrics.step_line import compact_step_line, step_line

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
        self.line = log

    def write(self, event: Event) -> None:
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
            left = fields["perf/step_time_seconds"] * (self._num_steps - 1 - event.step)
            if self._compact:
                self.line(compact_step_line(event.step, fields, self._num_steps, left))
            else:
                self.line(step_line(event.step, fields, left))
        if since := fields.get("seconds_since_launch"):
            self.line(f"First step after {since:.1f} s")
