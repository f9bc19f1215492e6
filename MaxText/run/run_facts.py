"""Facts of the first event of each attempt."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from MaxText.cost.cost_table import ModelCost
from MaxText.growth.record import event_facts, parent_folder, sizes
from MaxText.input_pipeline.iterator import BatchIterator
from MaxText.metrics.event_stream import EventStream
from MaxText.run.lineage import Lineage
from MaxText.run.quantities import TrainingStats
from MaxText.run.restore import RestoreResult
from MaxText.runtime import start_up
from MaxText.training.objective import is_in_nats


def run_metadata(
    run_name: str,
    quantities: TrainingStats,
    cost: ModelCost,
    lineage: Lineage,
    batches: BatchIterator,
) -> dict[str, Any]:
    """Returns the facts of a start event as JSON values."""
    section = quantities.model.section
    vocab_size, objective = section.shape.vocab_size, section.objective
    return {
        "run_name": run_name,
        "num_steps": quantities.num_updates,
        "num_parameters": quantities.model.num_parameters,
        "num_devices": quantities.num_devices,
        "num_processes": jax.process_count(),
        "device_kind": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "tokens_of_run": quantities.tokens_of_run,
        "flops_of_run": quantities.flops_of_run,
        "peak_tflops": quantities.peak.tflops,
        "peak_source": quantities.peak.source,
        "cost": cost.facts(),
        "lineage": lineage.facts(),
        "data": {**batches.facts, "vocab_size": vocab_size},
        "unigram_entropy": batches.unigram_entropy if is_in_nats(objective) else None,
    }


def emit_start(events: EventStream, start: RestoreResult, facts: Mapping[str, Any]) -> None:
    """Emits "resume" (from the run's own checkpoint) or "start".

    A changed configuration and a growth are events of their own.
    """
    events.emit(
        "resume" if start.how == "resume" else "start",
        step=start.first_step,
        seconds=time.time() - start_up.launch_time(),
        source=start.source,
        lost=events.lost,
        **facts,
    )
    if start.changes:
        changes = {name: list(values) for name, values in start.changes.items()}
        events.emit("config_change", step=start.first_step, changes=changes)
    if grown := _growth_facts(start):
        events.emit("growth", step=start.first_step, **grown)


def _growth_facts(start: RestoreResult) -> dict[str, Any]:
    """Returns the facts of a growth event; empty if none preceded this start."""
    if start.how == "growth":
        assert start.growth is not None
        return event_facts(start.growth, start.folder)
    # A model grown by convert.py is first trained here, and no run has reported that. A zoom alone
    # is no growth.
    if start.how == "parameters" and start.growth and sizes(start.growth):
        return event_facts(start.growth, parent_folder(start.metadata), start.folder)
    return {}
