"""The event stream of a run: each event goes to all sinks.

A sink (monitoring/events.py) is a destination: the terminal, events.jsonl, metrics.jsonl,
TensorBoard, Weights & Biases, Trackio, MLflow.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from MaxText.config.training_sections import MonitoringConfig
from MaxText.errors import storage_failure
from MaxText.monitoring.events import SECONDS_TO_CLOSE, Event, Sink
from MaxText.monitoring.json_lines import EventFile, MetricsFile
from MaxText.monitoring.sinks.background import BackgroundSink
from MaxText.monitoring.sinks.mlflow_sink import MlflowSink
from MaxText.monitoring.sinks.tensorboard import TensorBoardSink
from MaxText.monitoring.sinks.trackio_sink import TrackioSink
from MaxText.monitoring.sinks.weights_and_biases import WandbSink
from MaxText.value_types import JsonObject, JsonValue

# Events that trigger a flush, because the process may end soon after.
_FLUSHED = ("start", "resume", "checkpoint")
_SECONDS_WHEN_PREEMPTED = 10.0

Callback = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(eq=False)
class EventLog:
    """Sends each event to every sink, and then to the callbacks.

    A run that resumes at step s first removes older rows of step s and later, so that each step
    occurs once. Flush the rows of a step before its checkpoint is saved, or they may be missing.

    If a sink cannot write, nothing is raised: `failure` says why, so that the run can save its
    state and stop. Until then its rows stay in memory and are tried again.

    Attributes:
      sinks: Get the events, in this order.
      restart: Starts of the program in this run folder before this one.
      lost: Cost of the removed rows: {"steps": n, "seconds": {phase: s}}.
      flush_every: Steps between flushes.
      callbacks: Get each event as a row of events.jsonl, after the sinks.
      failure: The first storage error of a sink, with its path; None without one.
    """

    sinks: Sequence[Sink]
    restart: int = 0
    lost: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"steps": 0, "seconds": {}})
    flush_every: int = 100
    callbacks: Sequence[Callback] = ()
    failure: str | None = None
    _flushed_step: int | None = None
    _seconds_to_close: float = SECONDS_TO_CLOSE

    def emit(
        self, kind: str, *, step: int | None = None, seconds: float = 0.0, **fields: JsonValue
    ) -> None:
        """Records an event at its end.

        Args:
          kind: One of events.PHASES.
          step: The step it belongs to, from 0.
          seconds: Wall time that it took.
          **fields: What this kind of event has besides.
        """
        event = Event(
            kind, time=time.time(), restart=self.restart, step=step, seconds=seconds, fields=fields
        )
        for sink in self.sinks:
            self._attempt(functools.partial(sink.write, event))
        for callback in self.callbacks:
            callback(event.row())
        if kind == "stop":
            if fields.get("reason") == "preempted":
                self._seconds_to_close = _SECONDS_WHEN_PREEMPTED
            self.flush()
        elif kind in _FLUSHED:
            self._flush_sinks()
        elif kind == "step" and step is not None:
            if self._flushed_step is None:
                self._flushed_step = step
            if step - self._flushed_step >= self.flush_every:
                self._flushed_step = step
                self._flush_sinks()

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: JsonValue) -> Iterator[JsonObject]:
        """Emits an event with the seconds of the block.

        Yields:
          Its fields, to which the block may add. An exception in the block emits nothing.
        """
        began = time.perf_counter()
        yield fields
        self.emit(kind, seconds=time.perf_counter() - began, **fields)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Calls a sink; keeps its first storage error as `failure`."""
        try:
            call()
        except Exception as error:
            reason = storage_failure(error)
            if reason is None:
                raise
            self.failure = self.failure or reason

    def _flush_sinks(self) -> None:
        for sink in self.sinks:
            self._attempt(sink.flush)

    def flush(self) -> None:
        """Makes all events durable, waiting at most a minute for remote records."""
        self._flush_sinks()
        until = time.monotonic() + self._seconds_to_close
        for sink in self.sinks:
            sink.wait_durable(until)

    def close(self) -> None:
        """Flushes and closes every sink, within a minute in all. Idempotent."""
        until = time.monotonic() + self._seconds_to_close
        for sink in self.sinks:
            sink.request_close()
        self._flush_sinks()  # all of them before the wait for the first
        for sink in self.sinks:
            self._attempt(functools.partial(sink.close, until))


def open_stream(
    run_folder: str | epath.Path,
    monitoring: MonitoringConfig,
    run_name: str,
    config_flat: Mapping[str, Any],
    *,
    first_step: int,
    first_evaluation: int | None = None,
    terminal: Sink,
    callbacks: Sequence[Callback] = (),
) -> EventLog:
    """Opens the event stream of a new or resumed run.

    Process 0 records; the others have a terminal only.

    Args:
      run_folder: The folder of the run.
      monitoring: Says which sinks there are.
      run_name: The name of the run.
      config_flat: The configuration, by key.
      first_step: The first step of this start; older rows from there on are removed.
      first_evaluation: The step from which on evaluations are removed, by default `first_step`.
      terminal: The sink that prints.
      callbacks: Get each event as a row of events.jsonl.
    """
    if jax.process_index() != 0:
        return EventLog([terminal], callbacks=callbacks)
    folder = epath.Path(run_folder)
    sinks: list[Sink] = [terminal]
    run = (folder, run_name, config_flat, first_step)
    if monitoring.enable_wandb and monitoring.wandb.mode != "disabled":
        wandb = WandbSink(monitoring.wandb, *run)
        sinks.append(BackgroundSink(wandb, "Weights & Biases", remedy=wandb.remedy))
    remedy = "a restart of the unfinished run sends what is missing"
    if monitoring.enable_trackio:
        trackio = TrackioSink(monitoring.trackio, *run)
        sinks.append(BackgroundSink(trackio, "Trackio", remedy=remedy))
    if monitoring.enable_mlflow:
        sinks.append(BackgroundSink(MlflowSink(monitoring.mlflow, *run), "MLflow", remedy=remedy))
    events = EventFile(folder, first_step, first_evaluation=first_evaluation)
    sinks += [events, MetricsFile(folder, monitoring.metrics_file, run_name, first_step)]
    if monitoring.enable_tensorboard:
        sinks.append(
            BackgroundSink(TensorBoardSink(folder, config_flat, first_step), "TensorBoard")
        )
    return EventLog(
        sinks,
        restart=events.restart,
        lost=events.lost,
        flush_every=monitoring.log_period,
        callbacks=callbacks,
    )
