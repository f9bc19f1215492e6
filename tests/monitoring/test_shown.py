"""What users see of a run: lines, the bar, the figure, the trace."""

import io
import sys

import jax.numpy as jnp
import pytest

from MaxText.config.training_sections import MonitoringConfig
from MaxText.formatting import short_time
from MaxText.monitoring.events import Event
from MaxText.monitoring.profiler import StepProfiler
from MaxText.monitoring.step_line import (
    EvaluationReport,
    Terminal,
    compact_step_line,
    step_line,
    step_row,
)

METRICS = {"loss": 2.5, "lm_loss": 2.25, "total_weights": 4096.0}


def row_of(loss, **more):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0}
    return step_row(metrics | more, 0.5, 64, 0.25)


def test_the_line_of_maxtext_is_a_prefix_of_the_line_here():
    """Scripts parse it."""
    short = step_row(METRICS, 0.5, tokens=2048, tflops=1.25)
    maxtext = (
        "completed step: 7, seconds: 0.500, TFLOP/s/device: 2.500, Tokens/s/device: 4096.000, "
        "total_weights: 4096, loss: 2.500, lm_loss: 2.250, perplexity: 9.488"
    )
    assert step_line(7, short) == maxtext
    more = {"grad_norm": 1.0, "learning_rate": 3e-4}
    full = step_row(METRICS | more, 0.5, 2048, 1.25, peak_tflops=5.0)
    rest = ", mfu: 50.0%, grad_norm: 1.000, lr: 3.000e-04, eta: 1:02:05"
    assert step_line(7, full, seconds_left=3725) == maxtext + rest
    assert full["learning/current_learning_rate"] == 3e-4
    assert full["perf/mfu"] == 0.5


def test_lines_and_rows_of_other_reports(told):
    """A loss too high for a perplexity, evaluations, and entmax, which has no perplexity."""
    entmax = {"loss": 2.5, "entmax_loss": 2.25, "total_weights": 4096.0}
    rows = [step_row(each, 0.5, 2048, 1.25) for each in (METRICS | {"lm_loss": 143.0}, entmax)]
    evaluations = [
        EvaluationReport(10, 300.0, 100.0, 4, 1.5, correct=25.0),
        EvaluationReport(10, 300.0, 100.0, 4, 1.5, has_perplexity=False),
        EvaluationReport(10, 300.0, 100.0, 4, 1.5, has_perplexity=False, total_nats=400.0),
        EvaluationReport(10, 0.0, 0.0, 0, 1.0),
    ]
    shown = [(step_line(7, row), row) for row in rows]
    shown += [(one.line(), one.row()) for one in evaluations]
    numbers = ((line, {name: f"{x:.6g}" for name, x in row.items()}) for line, row in shown)
    told("\n\n".join(f"{line}\n{row}" for line, row in numbers))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.00603, "6.03 ms"),
        (5.922, "5.92 seconds"),
        (610, "10.2 minutes"),
        (9.8 * 86400, "9.8 days"),
        (3.42e3 * 86400, "9.36 years"),
        (4e12, "126,752 years"),
    ],
)
def test_times_have_units_that_people_use(seconds, shown):
    assert short_time(seconds) == shown


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_lines_go_out_as_they_are():
    lines = []
    terminal = Terminal(10, lines.append)
    terminal.write(Event("step", 0.0, step=0, fields=row_of(2.0)))
    terminal.write(Event("compile", 0.0, fields={"rows": 4, "length": 16, "compile_seconds": 1.26}))
    step, compiled = lines
    assert step == step_line(0, row_of(2.0), 4.5)
    assert "4 x 16" in compiled
    assert "1.3 s" in compiled


@pytest.mark.parametrize("num_steps", [60, 400, 150_001, 9_999_999])
@pytest.mark.parametrize("left", [1.0, 95.0, 4e5, 4e7, float("inf")])
@pytest.mark.parametrize("lm_loss_beside", [False, True])
def test_a_compact_line_fits_80_columns_and_keeps_what_matters(num_steps, left, lm_loss_beside):
    numbers = {"grad_norm": 1234.567, "learning_rate": 1.25e-5, "skipped": 1}
    row = step_row(METRICS | numbers, 0.5, tokens=2048, tflops=1.0, peak_tflops=5.0)
    shown = []
    for step in (0, 8, num_steps // 2, num_steps - 1):
        line = compact_step_line(step, row, num_steps, left, lm_loss_beside=lm_loss_beside)
        assert len(line) <= 80, line
        assert {"step", "loss", "skipped", "eta"} <= set(line.split())
        assert "  4.1K tok/s" in line
        shown.append([part.split()[0] for part in line.split("  ")])
    assert all(names[:2] == shown[0][:2] and len(names) == len(shown[0]) for names in shown)


def test_a_compact_line_of_a_usual_run_has_everything():
    numbers = {"grad_norm": 0.889, "learning_rate": 5.64e-3}
    row = step_row(METRICS | numbers, 0.5, tokens=3224, tflops=0.8, peak_tflops=5.0)
    line = "step 101/400  loss 2.5000  grad 0.889  lr 5.6e-3  6.45K tok/s  mfu 32%  eta 1:35"
    assert compact_step_line(100, row, 400, 95.0) == line


def test_no_share_above_the_peak():
    assert "perf/mfu" not in step_row(METRICS, 0.5, tokens=2048, tflops=2.6, peak_tflops=5.0)
    assert step_row(METRICS, 0.5, 2048, tflops=2.5, peak_tflops=5.0)["perf/mfu"] == 1.0


@pytest.mark.parametrize(
    ("choice", "is_terminal", "compact"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("full", True, False),
        ("compact", False, True),
    ],
)
def test_the_line_of_a_step_is_short_on_a_terminal(monkeypatch, choice, is_terminal, compact):
    monkeypatch.setattr(sys, "stdout", Tty() if is_terminal else io.StringIO())
    lines = []
    terminal = Terminal(400, lines.append, step_line=choice)
    row = row_of(4.1324, grad_norm=0.767, learning_rate=1.751e-3)
    terminal.write(Event("step", 0.0, step=289, fields=row))
    short = "step 290/400  loss 4.1324  grad 0.767  lr 1.8e-3  128 tok/s  eta 0:55"
    assert lines == [short if compact else step_line(289, row, 55.0)]


def test_the_configured_steps_are_traced(tmp_path):
    monitoring = MonitoringConfig(profiler="xplane", profiler_window={"skip": 1, "steps": 2})
    for section, expected in ((MonitoringConfig(), []), (monitoring, [12, 13, 14])):
        profiler = StepProfiler(section, tmp_path, first_step=10)
        written = []
        for step in range(10, 15):
            with profiler.step(step):
                result = jnp.ones(4) + step
            profiler.finished(step, result)
            if list(tmp_path.glob("plugins/profile/*/*.xplane.pb")):
                written.append(step)
        profiler.close()
        assert written == expected
