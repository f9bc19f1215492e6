"""The train step of a configuration, laid out over given devices and compiled for them."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from MaxText.config.schema import Config
from MaxText.growth.settling import settle
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan, plan_batches
from MaxText.layers.batch import batch_shapes
from MaxText.layers.model import Model
from MaxText.parallelism import mesh
from MaxText.training.assembly import assemble
from MaxText.training.state import TrainState


class Planned(NamedTuple):
    """All that is known of a train step before it is compiled.

    Attributes:
      config: of the run, with the zoom of scores fixed where parameters grow.
      model: with what depends on the devices resolved.
      layout: where everything lies.
      state: shapes and shardings of the state.
      batch: likewise, of the largest batch of the run.
      plan: of its batches.
      length: tokens of a row of that batch.
      lowered: the program, not yet compiled.
      lines: choices to print.
    """

    config: Config
    model: Model
    layout: mesh.Layout
    state: TrainState
    batch: Any
    plan: BatchPlan
    length: int
    lowered: jax.stages.Lowered
    lines: Sequence[str]


def plan_step(config: Config, devices: Sequence[Any]) -> Planned:
    """Traces what train.py would compile for these devices, for the run's last stage of batches.

    Data are not opened: batches have positions and segments unless the text is synthetic or
    attend_across_documents says otherwise.

    Raises:
      UserError: the mesh, the batch or the sharding does not fit the devices.
    """
    layout = mesh.make_layout(config.mesh, devices, config.model.pipeline)
    settled = settle(config, [])
    config = settled.config
    built = assemble(config, layout, settled.old_slots, settled.old_slots_learning_rate)
    model, state = built.model, built.state
    plan = plan_batches(
        config.batch,
        model.section.shape.max_target_length,
        lambda size: mesh.rows_of_update(config.batch, layout, size),
    )
    stage = plan.stages[-1]
    data = config.data
    with_documents = data.dataset_type != "synthetic" and not data.attend_across_documents
    batch = layout.abstract_batch(batch_shapes(plan.rows(stage), stage.length, with_documents))
    lowered = layout.lower_step(built.step, state, batch)
    lines = [*built.choices, *settled.lines]
    return Planned(config, model, layout, state, batch, plan, stage.length, lowered, lines)


def compile_planned(planned: Planned) -> tuple[jax.stages.Compiled, float]:
    """The compiled step, and the seconds that took.

    Raises:
      jax.errors.JaxRuntimeError: as the compiler; RESOURCE_EXHAUSTED where memory does not suffice.
    """
    # jax cannot store a program on CPU that it took from the cache.
    was_enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        began = time.perf_counter()
        return planned.lowered.compile(), time.perf_counter() - began
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
