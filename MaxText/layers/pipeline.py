"""Layers split over the stages of a pipeline, through which microbatches flow.

A stage is the devices at one place of the mesh axis `stage`. The L layers are cut into runs of K;
run c lies on stage c mod S, so that a microbatch passes through all stages R times (GPipe, Huang et
al. 2019, for R = 1; interleaved stages, Narayanan et al. 2021, section 2.2, for more).

Turn by turn all stages compute at once, each on another microbatch, and hand on what they have to
the next stage. Stage s starts in turn s; its visit v is that of microbatch v mod M in repeat
v // M, so all microbatches finish a repeat before the first of them begins the next. One that comes
out of the last stage waits at the first one until then. That takes M R + S - 1 turns, of which a
stage is idle in S - 1: it computes then, too, and what comes out is dropped.

Legend: B sequences, T tokens, D emb_dim, S stages, R repeats, K layers of a run, M microbatches,
b sequences of a microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.configuration.layer_plan import PipelineSchedule
from MaxText.configuration.model_sections import RematPolicy
from MaxText.layers.context import Context
from MaxText.layers.stack import Blueprint, scan_cycle
from MaxText.parallelism.constraints import HIDDEN, constrain, joined_rows, split_rows


def pipelined(
    layers: Any,
    blueprint: Blueprint,
    x_BTD: jax.Array,
    context: Context,
    apply: Callable[[Any, jax.Array, Context, jax.Array], tuple[jax.Array, dict[str, jax.Array]]],
    *,
    schedule: PipelineSchedule,
    policy: RematPolicy,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends `x_BTD` through all layers of a stacked module, on stages of a mesh.

    The result is that of `stack.apply_scanned`, but for rounding and for which numbers dropout
    draws: each microbatch draws its own.

    Args:
      layers: what `stack` returned, all of them repeats of one cycle.
      context: of the whole batch.
      apply: (layer, x, context of these rows, index) -> (y, scalars).
      schedule: whose number of stages is that of the mesh in force.
      policy: what each layer's backward pass computes again.

    Returns:
      The last output, and each scalar summed over layers and rows.
    """
    num_stages, repeats, per_stage, num_microbatches = schedule
    contexts = context.in_parts(num_microbatches)
    plan, cycle = blueprint.plan, blueprint.plan.cycle
    if blueprint.is_stacked:
        weights_SK = by_stage(nnx.state(layers), schedule, per_stage)
    else:
        weights_SK = {
            str(run): by_stage(
                nnx.state(layers["cycle"][str(run)]), schedule, per_stage // cycle * length
            )
            for run, length in enumerate(plan.runs)
        }

    def stage(number: jax.Array, x_bTD: jax.Array, weights_K: Any, turn: jax.Array):
        visit = turn - number
        repeat = jnp.clip(visit // num_microbatches, 0, repeats - 1)
        first = (repeat * num_stages + number) * per_stage

        def of_repeat(weights_R: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, repeat, keepdims=False), weights_R
            )

        y_bTD, scalars = scan_cycle(
            blueprint,
            weights_K,
            x_bTD,
            lambda layer, x, index: apply(layer, x, contexts(visit % num_microbatches), index),
            policy,
            num_repeats=per_stage // cycle,
            first=first,
            select=of_repeat if repeats > 1 else None,
        )
        has_work = (visit >= 0) & (visit < num_microbatches * repeats)
        return y_bTD, {name: jnp.where(has_work, x, 0) for name, x in scalars.items()}

    all_stages = jax.vmap(stage, in_axes=(0, 0, 0, None), spmd_axis_name="stage")
    numbers_S = jnp.arange(num_stages)
    is_first_S = (numbers_S == 0)[:, None, None, None]

    def one_turn(carry: tuple[jax.Array, jax.Array], turn: jax.Array):
        arrived_SbTD, waiting_SMbTD = carry
        next_SbTD = _at(waiting_SMbTD, turn % num_microbatches)
        x_SbTD = staged(jnp.where(is_first_S, next_SbTD, arrived_SbTD))
        y_SbTD, scalars = all_stages(numbers_S, x_SbTD, weights_SK, turn)
        arrived_SbTD = staged(jnp.roll(staged(y_SbTD), 1, axis=0))
        # What has come around from the last stage; nothing has before its first visit is over.
        place = (turn - (num_stages - 1)) % num_microbatches
        has_come = turn >= num_stages - 1
        kept_SbTD = jnp.where(has_come, arrived_SbTD, _at(waiting_SMbTD, place))
        waiting_SMbTD = jax.lax.dynamic_update_index_in_dim(waiting_SMbTD, kept_SbTD, place, 1)
        return (arrived_SbTD, staged(waiting_SMbTD)), jax.tree.map(jnp.sum, scalars)

    x_MbTD = split_rows(constrain(x_BTD, *HIDDEN), num_microbatches, *HIDDEN[1:])
    # Only the first stage's places are ever read. The others get rows as well, not zeros, and so
    # do stages that wait for their first visit: what they compute stays finite, as must be for
    # its gradient to be 0.
    waiting_SMbTD = staged(jnp.broadcast_to(x_MbTD, (num_stages, *x_MbTD.shape)))
    carry = (_at(waiting_SMbTD, 0), waiting_SMbTD)
    (_, waiting_SMbTD), scalars = jax.lax.scan(one_turn, carry, jnp.arange(schedule.num_turns))
    y_MbTD = constrain(waiting_SMbTD[0], None, *HIDDEN)
    return constrain(joined_rows(y_MbTD), *HIDDEN), jax.tree.map(jnp.sum, scalars)


def by_stage(state: Any, schedule: PipelineSchedule, per_stage: int) -> dict:
    """Stacked weights [L, ...] as [S, K, R, ...], each stage's on its devices; R = 1 is left out.

    `per_stage` is K, which counts the layers that are stacked here.

    With one repeat they lie there already. With several, runs of layers move between stages once
    for the forward and once for the backward pass: checkpoints know layers by their number alone.
    """
    num_stages, repeats = schedule.num_stages, schedule.num_repeats

    def arranged(parameter: Any) -> jax.Array:
        leaf, names = parameter.get_value(), parameter.get_metadata()["logical_axes"]
        if repeats == 1:
            leaf = leaf.reshape(num_stages, per_stage, *leaf.shape[1:])
            return constrain(leaf, "layers", None, *names[1:])
        leaf = leaf.reshape(repeats, num_stages, per_stage, *leaf.shape[1:])
        return constrain(jnp.moveaxis(leaf, 0, 2), "layers", None, None, *names[1:])

    return nnx.to_pure_dict(state, arranged)


def staged(x: jax.Array) -> jax.Array:
    """Hidden states [S, ..., b, T, D], those of each stage on its devices."""
    return constrain(x, "activation_stage", *[None] * (x.ndim - 4), *HIDDEN)


def _at(waiting_SMbTD: jax.Array, place: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(waiting_SMbTD, place, 1, keepdims=False)
