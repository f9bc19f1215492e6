"""Lowers and compiles the train step of a configuration for given devices."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from MaxText.config.schema import Config
from MaxText.growth.resolve import ResolvedGrowth, resolve_growth
from MaxText.input_pipeline.data_sources import prepared_has_documents
from MaxText.input_pipeline.registered_sources.opening_sources import is_registered_type
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.input_pipeline.sequences.plan_batches import plan_batches, resolve_global_batch
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch, batch_shapes
from MaxText.parallelism.mesh import ShardingPlan, make_sharding_plan
from MaxText.training.assembly import setup_train
from MaxText.training.state import TrainState


class LoweredStep(NamedTuple):
    """A train step before compilation."""

    growth: ResolvedGrowth
    model: Model  # with device-dependent choices resolved
    sharding: ShardingPlan
    state: TrainState
    batch: Batch  # shapes and shardings of the run's largest batch
    plan: BatchSchedule
    lowered: jax.stages.Lowered
    lines: Sequence[str]  # choices to print

    @property
    def config(self) -> Config:
        """The configuration of the run, once its growth is resolved."""
        return self.growth.config


def lower_train_step(config: Config, devices: Sequence[Any]) -> LoweredStep:
    """Traces train.py's step for the run's largest batch, without opening data.

    Batches have positions and segments unless the text is synthetic or cross_document_attention is
    set.

    Args:
        config: of the run.
        devices: present or absent ones, as JAX describes them.

    Raises:
        UserError: the configuration does not fit the devices.
    """
    sharding = make_sharding_plan(config.mesh, devices, config.model.pipeline)
    resolved = resolve_growth(resolve_global_batch(config, sharding), [])
    config = resolved.config
    setup = setup_train(config, sharding, resolved.existing_slots, resolved.existing_slots_lr_scale)
    model = setup.model
    state = setup.abstract_state
    plan = plan_batches(config, sharding)
    batch = sharding.abstract_batch(largest_batch(config, plan))
    lowered = sharding.lower_step(
        setup.step, state, batch, setup.compiler_options, setup.abstract_frozen
    )
    return LoweredStep(
        growth=resolved,
        model=model,
        sharding=sharding,
        state=state,
        batch=batch,
        plan=plan,
        lowered=lowered,
        lines=[*setup.auto_choices, *resolved.lines],
    )


def largest_batch(config: Config, plan: BatchSchedule) -> Batch:
    """Returns the shapes of a run's largest batch, without opening data.

    Args:
      config: Of the run.
      plan: Its batch sizes.
    """
    stage = plan.stages[-1]
    data = config.data
    with_documents = data.dataset_type != "synthetic" and not data.cross_document_attention
    if is_registered_type(data.dataset_type):
        with_documents = prepared_has_documents(config)
    return batch_shapes(plan.batch_size(stage), stage.length, with_documents)


def compile_lowered(planned: LoweredStep) -> tuple[jax.stages.Compiled, float]:
    """Returns the step and its compile seconds; raises like XLA."""
    # On CPU, JAX cannot serialize a program loaded from the cache.
    was_enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        began = time.perf_counter()
        return planned.lowered.compile(), time.perf_counter() - began
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()
