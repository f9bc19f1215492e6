"""The picture, the bar, the trace."""

import io
import math
import random
import sys

import jax.numpy as jnp
import pytest

from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.loss_curve import draw_loss_curve, running_median, short_count
from MaxText.monitoring.profiler import StepProfiler
from MaxText.monitoring.progress import Progress
from MaxText.monitoring.recorder import Recorder
from MaxText.monitoring.step_line import EvaluationReport, StepReport


def report(step, loss):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0}
    return StepReport(step, 0.5, metrics, 64, 0.25, seconds_left=65)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_running_median_does_not_lag_and_ignores_spikes():
    line = [(step, 9.0 - step / 100) for step in range(500)]
    spiked = [(step, 99.0 if step == 250 else value) for step, value in line]
    for (step, value), (_, wanted) in zip(running_median(spiked), line, strict=True):
        assert value == pytest.approx(wanted, abs=0.06), step
    assert running_median(line[:1]) == line[:1]
    many = running_median([(step, 1.0) for step in range(100_000)])
    assert len(many) <= 600
    assert {value for _, value in many} == {1.0}


def test_loss_curve_is_drawn_from_the_records(tmp_path):
    recorder = Recorder(tmp_path, Monitoring(enable_tensorboard=False), "tiny")
    noise = random.Random(0)
    for step in range(300):
        loss = 3.2 + 5.1 * math.exp(-step / 60) + noise.gauss(0, 0.12)
        recorder.step(report(step, math.nan if step == 20 else loss + 9 * (step == 150)))
        if step % 50 == 49:
            loss = 3.3 + 5.1 * math.exp(-step / 60)
            recorder.evaluation(EvaluationReport(step, loss * 64, 64, 1, 0.1))
    recorder.close()
    path = draw_loss_curve(
        tmp_path, tokens_per_step=24_576, title="tiny", unigram_entropy=6.9, run_name="tiny"
    )
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().length > 20_000


def test_short_counts():
    assert [short_count(x) for x in (0, 12, 2_500_000, 1.5e9)] == ["0", "12", "2.5M", "1.5B"]


def test_nothing_recorded_nothing_drawn(tmp_path):
    assert draw_loss_curve(tmp_path, tokens_per_step=1) is None


def test_without_a_terminal_lines_go_out_as_they_are(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines = []
    with Progress(0, 10, lines.append) as progress:
        progress.line("completed step: 0")
        progress.update(report(0, 2.0))
    assert lines == ["completed step: 0"]
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("stdout_is_terminal", [False, True])
def test_with_a_terminal_there_is_a_bar_and_lines_stay_whole(monkeypatch, stdout_is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal() if stdout_is_terminal else io.StringIO())
    lines = []
    text = "completed step: 0, [not markup], " + "x" * 120
    progress = Progress(4, 10, lines.append)
    progress.line(text)
    progress.update(report(5, 2.0))
    progress._bar.refresh()
    progress.close()
    progress.close()
    drawn = sys.stderr.getvalue()
    assert "loss 2.000" in drawn
    assert "0:01:05 left" in drawn
    assert "step 6/10" in drawn
    if stdout_is_terminal:
        assert text in drawn
    else:
        assert lines == [text]


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
