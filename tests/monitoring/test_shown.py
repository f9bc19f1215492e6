"""The picture, the bar, the trace."""

import dataclasses
import io
import math
import random
import sys

import jax.numpy as jnp
import pytest

from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.events import Event
from MaxText.monitoring.loss_curve import draw_loss_curve
from MaxText.monitoring.profiler import StepProfiler
from MaxText.monitoring.sinks.terminal import Terminal
from MaxText.monitoring.step_line import EvaluationReport, StepReport


def report(step, loss):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0}
    return StepReport(step, 0.5, metrics, 64, 0.25, seconds_left=65)


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_loss_curve_is_drawn_from_the_records(tmp_path):
    monitoring = Monitoring(enable_tensorboard=False)
    terminal = Terminal(300, lambda line: None)
    events = open_stream(tmp_path, monitoring, "tiny", {}, first_step=0, terminal=terminal)
    events.emit("start", step=0, run_name="tiny", unigram_entropy=6.9)
    noise = random.Random(0)
    for step in range(300):
        loss = 3.2 + 5.1 * math.exp(-step / 60) + noise.gauss(0, 0.12)
        shown = report(step, math.nan if step == 20 else loss + 9 * (step == 150))
        tokens = {"progress/tokens": 24_576 * (step + 1)}
        events.emit("step", step=step, report=shown, **shown.row(), **tokens)
        if step % 50 == 49:
            loss = 3.3 + 5.1 * math.exp(-step / 60)
            shown = EvaluationReport(step, loss * 64, 64, 1, 0.1)
            events.emit("evaluation", step=step, report=shown, **shown.row(), **tokens)
    events.close()
    path = draw_loss_curve(tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().length > 20_000


def test_nothing_recorded_nothing_drawn(tmp_path):
    terminal = Terminal(300, lambda line: None)
    monitoring = Monitoring(enable_tensorboard=False)
    events = open_stream(tmp_path, monitoring, "tiny", {}, first_step=0, terminal=terminal)
    events.emit("start", step=0, run_name="tiny")
    events.close()
    assert draw_loss_curve(tmp_path) is None


def begin(terminal, step):
    terminal.write(Event("start", 0.0, step=step))


def test_without_a_terminal_lines_go_out_as_they_are(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines = []
    terminal = Terminal(10, lines.append)
    begin(terminal, 0)
    terminal.write(Event("step", 0.0, step=0, report=report(0, 2.0)))
    terminal.write(Event("compile", 0.0, facts={"rows": 4, "length": 16, "compile_seconds": 1.26}))
    terminal.close()
    assert lines == [
        report(0, 2.0).line(),
        "Train step (4 x 16 tokens) compiled in 1.3 s",
    ]
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("step_line", "is_terminal", "compact"),
    [
        ("auto", False, False), ("auto", True, True), ("full", True, False),
        ("compact", False, True),
    ],
)  # fmt: skip
def test_the_line_of_a_step_is_short_on_a_terminal(monkeypatch, step_line, is_terminal, compact):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", Tty() if is_terminal else io.StringIO())
    lines = []
    terminal = Terminal(400, lines.append, step_line=step_line)
    begin(terminal, 0)
    shown = report(289, 4.1324)
    more = {"grad_norm": 0.767, "learning_rate": 1.751e-3}
    shown = dataclasses.replace(shown, metrics={**shown.metrics, **more})
    terminal.write(Event("step", 0.0, step=289, report=shown))
    short = (
        "step 290/400 (72%)  loss 4.1324  grad_norm 0.767  lr 1.75e-03  128 tokens/s/device  "
        "0:01:05 left"
    )
    assert lines == [short if compact else shown.line()]


@pytest.mark.parametrize("stdout_is_terminal", [False, True])
def test_with_a_terminal_there_is_a_bar_and_lines_stay_whole(monkeypatch, stdout_is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Tty())
    monkeypatch.setattr(sys, "stdout", Tty() if stdout_is_terminal else io.StringIO())
    lines = []
    text = "completed step: 0, [not markup], " + "x" * 120
    terminal = Terminal(10, lines.append)
    begin(terminal, 4)
    terminal.line(text)
    terminal.write(Event("step", 0.0, step=5, report=report(5, 2.0)))
    terminal._bar.refresh()
    terminal.close()
    terminal.close()
    drawn = sys.stderr.getvalue()
    assert "loss 2.000" in drawn
    assert "0:01:05 left" in drawn
    assert "step 6/10" in drawn
    if stdout_is_terminal:
        assert text in drawn
    else:
        assert lines == [text, report(5, 2.0).line()]


def test_the_configured_steps_are_traced(tmp_path):
    monitoring = Monitoring(profiler="xplane", skip_first_n_steps_for_profiler=1, profiler_steps=2)
    profiler = StepProfiler(monitoring, tmp_path, first_step=10)
    written = []
    for step in range(10, 15):
        with profiler.step(step):
            result = jnp.ones(4) + step
        if profiler.finished(step, result):
            written.append(step)
    profiler.close()
    assert written == [12]
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_no_trace_unless_asked_for(tmp_path):
    profiler = StepProfiler(Monitoring(), tmp_path, first_step=0)
    with profiler.step(1):
        pass
    assert not profiler.finished(1, None)
    assert not list(tmp_path.iterdir())
