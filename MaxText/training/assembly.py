"""Assembles a train step from a configuration and devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from MaxText.config.registry import registrations
from MaxText.config.schema import Config
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import Params
from MaxText.parallelism.compiler_options import CompilerOptions, train_step_options
from MaxText.parallelism.mesh import (
    ShardingPlan,
    assert_params_sufficiently_sharded,
    check_lengths,
)
from MaxText.training import backend_defaults
from MaxText.training.model_objective import abstract_frozen_params
from MaxText.training.objective import abstract_loss_sums
from MaxText.training.optimizer import make_optimizer, scale_existing_slot_updates
from MaxText.training.schedule import learning_rate_schedule, weight_decay_schedule
from MaxText.training.state import TrainState
from MaxText.training.step import TrainStep, make_initialize, make_train_step


class TrainSetup(NamedTuple):
    """A train step to run or to compile, with its parts."""

    model: Model  # with `auto` values resolved
    optimizer: optax.GradientTransformation
    initialize: Callable[[jax.Array], TrainState]  # key -> fresh state
    abstract_state: TrainState  # shapes and shardings
    abstract_frozen: Mapping[str, Params]  # of the models that the objective does not train
    step: TrainStep  # not compiled
    replicated_fraction: float  # of the parameters
    auto_choices: Sequence[str]  # one line for each `auto`
    compiler_options: CompilerOptions  # of the step


def setup_train(
    config: Config,
    sharding: ShardingPlan,
    existing_slots: Mapping[str, int] | None = None,
    existing_slots_lr_scale: float = 1.0,
) -> TrainSetup:
    """Assembles a train step.

    Args:
      config: Of the run.
      sharding: Of the mesh. Its devices may be those of another machine.
      existing_slots: Number of leading slots that were trained before the run grew, by the name of
        their parameter.
      existing_slots_lr_scale: Factor of the updates of those slots.

    Raises:
      UserError: The mesh does not divide the sequences, or replicates too many parameters.
    """
    platform = sharding.mesh.devices.flat[0].platform
    model_config, choices = backend_defaults.resolve_auto(config.model, platform, sharding)
    model = Model(model_config)
    frozen = abstract_frozen_params(model_config, sharding)
    if not all(part.is_built_in for part in registrations()):
        abstract_loss_sums(model)  # checks what the parts return, before anything slow
    schedule = learning_rate_schedule(config.schedule)
    decay_schedule = weight_decay_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters, decay_schedule)
    optimizer = scale_existing_slot_updates(
        optimizer, model.parameters, existing_slots, existing_slots_lr_scale
    )
    averaging = config.optimizer.parameter_average
    initialize = make_initialize(model, optimizer, config.guard, averaging)
    check_lengths(model_config.shape.max_target_length, config.batch, sharding)
    replicated = assert_params_sufficiently_sharded(
        model.parameters, sharding, config.mesh.sharding_tolerance
    )
    state = sharding.abstract_state(initialize, model.parameters)
    step = make_train_step(
        model,
        optimizer,
        schedule,
        num_microbatches=config.batch.gradient_accumulation_steps,
        guard=config.guard,
        optimizer_config=config.optimizer,
        offloads_opt_state=config.mesh.optimizer_memory_host_offload,
        log_layer_metrics=config.monitoring.log_layer_metrics,
    )
    options = train_step_options(platform, sharding.mesh.size)
    choices += [f"compiler option {name}={value}" for name, value in options.items()]
    return TrainSetup(
        model=model,
        optimizer=optimizer,
        initialize=initialize,
        abstract_state=state,
        abstract_frozen=frozen,
        step=step,
        replicated_fraction=replicated,
        auto_choices=choices,
        compiler_options=options,
    )
