"""Pipeline parallelism over the stages of a mesh.

A stage is the devices at one index of the mesh axis `stage`. The L layers are split into runs of K;
run c is on stage c mod S, so a microbatch passes through all stages R times (GPipe, Huang et al.
2019, for R = 1; interleaved stages, Narayanan et al. 2021, section 2.2, for more).

In each turn every stage computes one microbatch and sends the result to the next stage. Stage s
starts in turn s; its visit v is that of microbatch v mod M in repeat v // M. All microbatches
finish a repeat before any begins the next, and wait at the first stage until then. That takes
M R + S - 1 turns. In S - 1 of them a stage is idle: it computes, too, but the result is dropped.

Legend: B sequences, T tokens, D emb_dim, S stages, R repeats, K layers of a run, M microbatches, b
sequences of a microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_plan import PipelineSchedule
from MaxText.config.model_sections import RematPolicy
from MaxText.layers.assembly.layer_loops import CycleScan
from MaxText.layers.assembly.stack import Blueprint
from MaxText.layers.context import ForwardContext
from MaxText.layers.lowering.pipeline_buffer import replace_slot, take_slot
from MaxText.layers.params import Params
from MaxText.layers.part import Carry, LayerIndex, Scalars
from MaxText.layers.part_scalars import sum_scalars
from MaxText.parallelism.logical_sharding import (
    HIDDEN,
    merge_batch,
    split_batch,
    with_logical_constraint,
)


def pipeline_apply(  # noqa: PLR0917
    layers: nnx.Module,
    blueprint: Blueprint,
    inputs: Carry,
    context: ForwardContext,
    apply: Callable[[Any, Carry, LayerIndex, ForwardContext], tuple[Carry, Scalars]],
    schedule: PipelineSchedule,
    policy: RematPolicy,
) -> tuple[Carry, Scalars]:
    """Applies all layers on the stages of a mesh.

    Equals `layer_loops.apply_scanned` except for rounding, and for dropout, which differs by
    microbatch.

    Turns are the iterations of a scan, stages the batch of a vmap. `arrived` [S, b, T, ...] is what
    each stage got from the stage before it. `waiting` [S, M, b, T, ...] holds what arrived at the
    first stage until its next repeat begins, and at the end the results.

    Args:
      layers: The module from `stack`, all layers repeats of one cycle.
      blueprint: From `stack`, too.
      inputs: Input of the first layer, a tree of arrays [B, T, ...].
      context: Of the batch; split into those of microbatches.
      apply: (layer, carry, index, context) -> (carry, scalars).
      schedule: With as many stages as the current mesh.
      policy: Of rematerialization, for each layer.

    Returns:
      Output of the last layer, like `inputs`, and scalars summed over layers and microbatches.
    """
    num_stages, repeats, per_stage, num_microbatches = schedule
    contexts = context.split(num_microbatches)
    plan = blueprint.plan
    cycle = blueprint.plan.cycle
    if blueprint.is_stacked:
        weights_SK = stack_by_stage(nnx.state(layers), schedule, per_stage)
    else:
        assert isinstance(layers, nnx.Dict)
        weights_SK = {
            str(run): stack_by_stage(
                nnx.state(layers["cycle"][str(run)]), schedule, per_stage // cycle * length
            )
            for run, length in enumerate(plan.runs)
        }

    def stage(number: jax.Array, arrived: Carry, weights_K: Params, turn: jax.Array):
        """Applies a stage's K layers to what has arrived; scalars are 0 while the stage is idle."""
        visit = turn - number
        repeat = jnp.clip(visit // num_microbatches, 0, repeats - 1)
        first = (repeat * num_stages + number) * per_stage

        def select_repeat(weights_R: Params) -> Params:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, repeat, keepdims=False), weights_R
            )

        run_of_layers = CycleScan(
            blueprint,
            lambda layer, x, index: apply(layer, x, index, contexts(visit % num_microbatches)),
            policy,
            num_repeats=per_stage // cycle,
            select=select_repeat if repeats > 1 else None,
        )
        output, scalars = run_of_layers.scan(weights_K, arrived, first)
        has_work = (visit >= 0) & (visit < num_microbatches * repeats)
        return output, jax.tree.map(lambda x: jnp.where(has_work, x, 0), scalars)

    all_stages = jax.vmap(stage, in_axes=(0, 0, 0, None), spmd_axis_name="stage")
    numbers_S = jnp.arange(num_stages)

    def select_input(waiting_SMbT: jax.Array, arrived_SbT: jax.Array, turn: jax.Array) -> jax.Array:
        """Returns each stage's input: the next waiting microbatch for the first stage."""
        is_first_S = (numbers_S == 0).reshape(-1, *[1] * (arrived_SbT.ndim - 1))
        next_SbT = take_slot(waiting_SMbT, turn % num_microbatches)
        return shard_over_stages(jnp.where(is_first_S, next_SbT, arrived_SbT))

    def store(waiting_SMbT: jax.Array, arrived_SbT: jax.Array, turn: jax.Array) -> jax.Array:
        """Stores what has arrived in its microbatch's slot; only the first stage's is read."""
        # Until the first microbatch arrives, the slot that was just read takes what no one reads.
        slot = jnp.where(turn < num_stages - 1, turn, turn - (num_stages - 1)) % num_microbatches
        return shard_over_stages(replace_slot(waiting_SMbT, arrived_SbT, slot), waits=True)

    def one_step(carry: tuple[Carry, Carry], turn: jax.Array):
        """Computes one turn of all stages, and sends each result to the next stage."""
        arrived, waiting = carry
        stage_inputs = jax.tree.map(lambda w, a: select_input(w, a, turn), waiting, arrived)
        output, scalars = all_stages(numbers_S, stage_inputs, weights_SK, turn)
        arrived = jax.tree.map(
            lambda y: shard_over_stages(jnp.roll(shard_over_stages(y), 1, axis=0)), output
        )
        waiting = jax.tree.map(lambda w, a: store(w, a, turn), waiting, arrived)
        return (arrived, waiting), jax.tree.map(sum_scalars, scalars)

    def begin(x: jax.Array) -> jax.Array:
        """Splits the batch [B, T, ...] into the first stage's waiting microbatches."""
        # Only the first stage's slots are read. The others hold rows instead of zeros, as idle
        # stages must compute something finite for its gradient to be 0.
        axes = _axes(x.ndim)
        x_MbT = split_batch(with_logical_constraint(x, *axes), num_microbatches, *axes[1:])
        return shard_over_stages(jnp.broadcast_to(x_MbT, (num_stages, *x_MbT.shape)), waits=True)

    def end(waiting_SMbT: jax.Array) -> jax.Array:
        """Joins the microbatches that wait at the first stage to [B, T, ...]."""
        axes = _axes(waiting_SMbT.ndim - 2)
        x_MbT = with_logical_constraint(waiting_SMbT[0], None, *axes)
        return with_logical_constraint(merge_batch(x_MbT), *axes)

    waiting = jax.tree.map(begin, inputs)
    carry = (jax.tree.map(lambda w: take_slot(w, 0), waiting), waiting)
    (_, waiting), scalars = jax.lax.scan(one_step, carry, jnp.arange(schedule.num_turns))
    return jax.tree.map(end, waiting), jax.tree.map(sum_scalars, scalars)


def stack_by_stage(state: nnx.State, schedule: PipelineSchedule, per_stage: int) -> Params:
    """Reshapes weights [L, ...] to [S, K, R, ...], sharded over stages.

    With several repeats, layers move between stages once per forward and once per backward pass,
    because checkpoints store them in order. `per_stage` is K.
    """
    num_stages = schedule.num_stages
    repeats = schedule.num_repeats

    def arranged(parameter: nnx.Variable) -> jax.Array:
        """Reshapes one stacked weight."""
        leaf = parameter.get_value()
        names = parameter.get_metadata()["logical_axes"]
        if repeats == 1:
            leaf = leaf.reshape(num_stages, per_stage, *leaf.shape[1:])
            return with_logical_constraint(leaf, "layers", None, *names[1:])
        leaf = leaf.reshape(repeats, num_stages, per_stage, *leaf.shape[1:])
        return with_logical_constraint(jnp.moveaxis(leaf, 0, 2), "layers", None, None, *names[1:])

    return nnx.to_pure_dict(state, arranged)


def shard_over_stages(x: jax.Array, *, waits: bool = False) -> jax.Array:
    """Shards [S, b, T, ...], or waiting [S, M, b, T, ...], over stages."""
    outer = ("activation_stage", None) if waits else ("activation_stage",)
    return with_logical_constraint(x, *outer, *_axes(x.ndim - len(outer)))


def _axes(num_dims: int) -> tuple[str | None, ...]:
    """Returns the logical axes of a carried array [B, T, ...] with `num_dims` dimensions."""
    return HIDDEN if num_dims == len(HIDDEN) else (*HIDDEN[:2], *[None] * (num_dims - 2))
