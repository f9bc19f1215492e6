"""When steps are reported, what their seconds count, and which runs end as diverged."""

import dataclasses
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.errors import TrainingDivergedError
from MaxText.hardware.peak_flops import PeakFlops
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.assembly.model import Model
from MaxText.monitoring.event_stream import EventLog
from MaxText.monitoring.loss_trend import LossTrend
from MaxText.run import records as records_module
from MaxText.run.records import MetricLogger
from MaxText.run.restore import Lineage
from MaxText.run.training_stats import TrainingStats
from tests.small_models import tiny_config


class Clock:
    """Seconds that pass where a test lets them, and a nanosecond with each look at it."""

    now = 0.0
    time = staticmethod(time.time)

    def perf_counter(self):
        self.pass_(1e-9)
        return self.now

    def pass_(self, seconds):
        self.now += max(0.0, seconds)


class SlowScalar:
    """A device scalar that becomes ready after some time, as a step's do."""

    def __init__(self, clock, value, seconds):
        self.clock, self.value, self.ready_at = clock, value, clock.now + seconds

    def block_until_ready(self):
        self.clock.pass_(self.ready_at - self.clock.now)
        return self

    def __array__(self, dtype=None, copy=None):
        self.block_until_ready()
        return np.asarray(self.value, dtype)

    def is_ready(self):
        return self.clock.now >= self.ready_at

    def __float__(self):
        return float(self.__array__())


@pytest.fixture(name="clock")
def own_clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(records_module, "time", clock)
    # Slow scalars are none of jax.
    monkeypatch.setattr(MetricLogger, "_mean_losses", lambda self: {})
    return clock


@pytest.fixture
def metrics(clock):
    def metrics(loss, seconds=0.0):
        slow = SlowScalar(clock, loss, seconds)
        return {"loss": slow, "lm_loss": jnp.float32(loss), "total_weights": 1.0}

    return metrics


@pytest.fixture(scope="module")
def stats():
    config = tiny_config()
    plan = BatchSchedule.constant(4, config.model.shape.max_target_length)
    return TrainingStats(Model(config.model), config.batch, plan, 1, 21, PeakFlops(1.0, ""))


@pytest.fixture
def start(stats):
    def start(period, last_step, guard=None, stats=stats):
        events = []
        sink = SimpleNamespace(write=events.append, flush=list, close=list)
        records = SimpleNamespace(
            events=EventLog([sink]), stats=stats, lineage=Lineage(stats), trend=LossTrend()
        )
        config = tiny_config(step_log_period=period).model_copy(
            update={"guard": guard or GuardConfig()}
        )
        log = MetricLogger(records, config, last_step)
        log.start(0)
        return log, events

    return start


def test_a_step_is_reported_when_the_next_is_handed_over(start, metrics):
    log, events = start(period=1, last_step=3)
    log.add(0, metrics(3.0))
    assert not events
    log.add(1, metrics(2.0))
    assert [event.step for event in events] == [0]
    log.flush()
    assert [event.fields["learning/loss"] for event in events] == [3.0, 2.0]
    # Tokens and operations count from the first step of the run.
    assert [event.fields["progress/tokens"] for event in events] == [64, 128]
    flops = [event.fields["progress/flops"] for event in events]
    assert flops[1] == 2 * flops[0] > 0


def test_a_pause_does_not_swallow_the_step_that_is_still_running(start, metrics, clock):
    log, events = start(period=2, last_step=2)
    log.add(0, metrics(1.0))
    log.add(1, metrics(1.0, seconds=0.4))
    with log.exclude_time():
        clock.pass_(0.3)
    log.add(2, metrics(1.0))
    log.flush()
    # The 0.4 seconds of step 1 are counted, though they passed when the pause began.
    assert (events[-1].fields["updates"], events[-1].seconds) == (2, pytest.approx(0.4))
    assert events[-1].fields["perf/step_time_seconds"] == pytest.approx(0.2)


def test_waiting_counts_where_the_devices_have_nothing_to_do(start, metrics, clock):
    log, events = start(period=1, last_step=3)
    log.add(0, metrics(1.0))
    with log.waiting_for_data():
        clock.pass_(0.2)
    log.add(1, metrics(1.0, seconds=0.3))
    with log.waiting_for_data():
        clock.pass_(0.05)  # hidden behind the step that is still running
    log.add(2, metrics(1.0))
    log.flush()
    assert [e.fields["data_seconds"] for e in events] == pytest.approx([0.2, 0, 0], abs=1e-6)
    assert [event.seconds for event in events] == pytest.approx([0.2, 0.3, 0], abs=1e-6)


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_also_between_reports(start, metrics, loss):
    log, events = start(period=10, last_step=20)
    log.add(1, metrics(loss))
    with pytest.raises(TrainingDivergedError):
        log.complete()
    # Why it stopped is on record.
    assert [event.step for event in events] == [1]
    allowed, _ = start(10, 20, GuardConfig(abort_on_nan_loss=False))
    allowed.add(1, metrics(loss))
    allowed.complete()


def test_the_rows_account_for_every_update_before_a_checkpoint_and_at_the_end(start, metrics):
    log, events = start(period=4, last_step=20)
    assert log.newest_step is None
    log.complete()
    for step in range(11):
        log.add(step, metrics(1.0))
        if step == 6:
            log.complete()
    log.complete()
    log.complete()
    updates = [(event.step, event.fields["updates"]) for event in events]
    assert updates == [(0, 1), (4, 4), (6, 2), (8, 2), (10, 2)]


def run_of(start, period, losses, skipped=()):
    log, events = start(period=period, last_step=len(losses) - 1)
    for step, loss in enumerate(losses):
        numbers = {"loss": loss, "lm_loss": loss, "total_weights": 8.0}
        metrics = {name: jnp.float32(number) for name, number in numbers.items()}
        log.add(step, {**metrics, "skipped": jnp.int32(step in skipped)})
    log.flush()
    return {event.step: event.fields for event in events}


def test_the_loss_of_a_report_is_the_mean_since_the_last_one(start):
    losses = np.random.default_rng(0).normal(3.0, 1.0, 11).astype(np.float32)
    each, every_fifth = (run_of(start, period, losses) for period in (1, 5))
    assert [each[step]["learning/loss"] for step in range(11)] == losses.tolist()
    assert every_fifth[0]["learning/lm_loss"] == losses[0]
    assert every_fifth[5]["learning/lm_loss"] == pytest.approx(losses[1:6].mean(), rel=1e-6)
    assert every_fifth[10]["learning/loss"] == pytest.approx(losses[6:].mean(), rel=1e-6)


def test_a_skipped_update_is_not_part_of_the_mean(start):
    reports = run_of(start, 4, [5.0, 4.0, np.nan, 3.0, 2.0], skipped={2})
    assert reports[4]["learning/lm_loss"] == pytest.approx(3.0)
    reports = run_of(start, 2, [5.0, 90.0, 80.0], skipped={1, 2})
    assert reports[2]["learning/lm_loss"] == 80.0


@pytest.mark.parametrize("skipped", [True, False])
def test_the_loss_of_a_skipped_step_neither_stops_the_run_nor_counts_as_diverged(start, skipped):
    log, _ = start(period=1, last_step=70)
    for step, loss in enumerate([8.0, *[3.0] * 50, *[20.0] * 9]):
        numbers = {"loss": loss, "lm_loss": loss, "total_weights": 8.0}
        log.add(step, numbers | {"skipped": int(skipped and loss == 20.0)})
    log.flush()
    assert bool(log.run_logger.trend.diverged) != skipped
    log.add(60, {"loss": np.nan, "lm_loss": np.nan, "total_weights": 8.0, "skipped": int(skipped)})
    if skipped:
        log.flush()
    else:
        with pytest.raises(TrainingDivergedError):
            log.flush()


def test_parts_of_a_loss_are_means_like_their_sum(start):
    """Also those that routers and objectives of users add; state and norms are the newest."""
    log, events = start(period=4, last_step=8)
    parts = np.random.default_rng(0).normal(3.0, 1.0, (9, 3)).astype(np.float32)
    for step, (focal, smoothing, router) in enumerate(parts):
        numbers = {
            "loss": focal + smoothing + router,
            "focal": focal,
            "smoothing": smoothing,
            "moe_lb_loss": router,
            "lm_loss": 2 * focal,
            "log_z": focal,
            "grad_norm": smoothing,
            "learning_rate": router,
            "total_weights": 8.0,
            "grad_norm/layer_0": focal,
        }
        log.add(step, {name: jnp.float32(number) for name, number in numbers.items()})
    log.flush()
    for event, rows in zip(events, (parts[:1], parts[1:5], parts[5:]), strict=True):
        fields = event.fields
        names = ("focal", "smoothing", "moe_lb_loss")
        means = [fields[f"learning/{name}"] for name in names]
        np.testing.assert_allclose(means, rows.mean(0), rtol=1e-5)
        assert sum(means) == pytest.approx(fields["learning/loss"], rel=1e-5)
        assert fields["learning/lm_loss"] == pytest.approx(2 * rows[:, 0].mean(), rel=1e-5)
        newest = [fields[f"learning/{name}"] for name in ("log_z", "grad_norm")]
        np.testing.assert_array_equal(newest, rows[-1, :2])
        assert fields["learning/grad_norm/layer_0"] == rows[-1, 0]
        assert fields["learning/current_learning_rate"] == rows[-1, 2]


@pytest.mark.parametrize("cured", [True, False])
def test_a_step_beats_the_peak(start, stats, metrics, clock, monkeypatch, cured):
    """The peak is measured again; if it is still too low, three reports are the peak."""
    tflops = stats.flops(0).tflops(stats.tokens_per_device(0))
    stats = dataclasses.replace(stats, peak=PeakFlops(tflops / 2, "measured here"))
    better = PeakFlops(tflops * 4 if cured else tflops / 1.5, "measured here")
    asked = []

    def measure(cache_folder, beaten_by):
        asked.append(beaten_by)
        clock.pass_(100.0)
        return better

    monkeypatch.setattr(records_module, "peak_flops", measure)
    log, events = start(period=1, last_step=6, stats=stats)
    for step in range(7):  # of one second each, twice the first peak
        log.add(step, metrics(3.0))
        clock.pass_(1.0)
    log.complete()
    assert len(asked) == 1
    rows = [event.fields for event in events if event.kind == "step"]
    mfu = [row.get("perf/mfu") for row in rows]
    assert all(row["perf/step_time_seconds"] == pytest.approx(1.0, rel=1e-3) for row in rows)
    changes = [event.fields for event in events if event.kind == "peak_measured"]
    if cured:
        assert mfu == pytest.approx([0.25] * 7, rel=1e-3)
        assert [change["peak_tflops"] for change in changes] == [better.tflops]
    else:
        assert mfu[:2] == [None, None]
        assert mfu[2:] == pytest.approx([1.0] * 5, rel=1e-3)
        assert changes[-1]["peak_tflops"] == pytest.approx(tflops, rel=1e-3)
        assert "the fastest of 3 reports" in changes[-1]["peak_source"]


def test_a_data_sheet_is_not_measured_again(start, stats, metrics, clock, monkeypatch):
    tflops = stats.flops(0).tflops(stats.tokens_per_device(0))
    peak = PeakFlops(tflops / 2, "data sheet of NVIDIA L4, dense bfloat16")
    monkeypatch.setattr(records_module, "peak_flops", None)
    log, events = start(period=1, last_step=4, stats=dataclasses.replace(stats, peak=peak))
    for step in range(5):
        log.add(step, metrics(3.0))
        clock.pass_(1.0)
    log.complete()
    assert [event.fields.get("perf/mfu") for event in events] == [None] * 5
