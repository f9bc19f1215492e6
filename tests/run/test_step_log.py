"""When steps are reported, what their seconds count, and which runs end as diverged."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.training_sections import GuardConfig
from MaxText.cost.peak_flops import PeakFlops
from MaxText.errors import TrainingDivergedError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.model import Model
from MaxText.metrics.event_stream import EventLog
from MaxText.metrics.loss_trend import LossTrend
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
    def start(period, last_step, guard=None):
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
