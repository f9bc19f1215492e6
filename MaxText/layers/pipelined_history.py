"""Stages of a pipeline whose layers read sums of all hidden states before them.

As in pipeline.py microbatches flow through stages, run c of layers lying on stage c mod S. Here a
stage keeps all states that it has seen of each microbatch, the history: those that its own layers
read, and that their backward pass reads again. Since a microbatch was here last, S - 1 stages have
made K states each, W = (S - 1) K in all, and these are handed on; each state so visits each stage
once. Backward, gradients of the same W states go the other way. What a stage makes of states that
it had before waits with it until the microbatch comes back there.

In its slot t mod M each stage keeps the microbatch of turn t. A stage that is idle at the end does
again what it did last and writes the same numbers; one that is idle at the beginning writes what
the first microbatch of the slot will overwrite. Nothing but scalars and gradients has to be left
out then. The gradients are our own, as in history.py: automatic ones would keep the whole history
once for each turn.

Legend: B sequences, T tokens, D emb_dim, L layers, H = L + 1 states, J sums, S stages, R repeats,
K layers of a run, I sums of a run, M microbatches, b sequences of a microbatch, P = M H places of a
stage's history, W states that are handed on. Arrays `of_rows` hold the gradients of states that
sums read, in the same order, on each stage.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.configuration.model_sections import RematPolicy
from MaxText.configuration.pipeline_schedule import PipelineSchedule
from MaxText.layers.connections import DenseConnections
from MaxText.layers.context import Context
from MaxText.layers.history import Apply, Given, Gradients, Segment, Walk, with_state
from MaxText.layers.history_plan import plan_of
from MaxText.layers.pipeline import by_stage, staged
from MaxText.parallelism.constraints import HIDDEN, constrain, joined_rows, split_rows


def pipelined_with_history(
    layers: Any,
    connections: DenseConnections,
    x_BTD: jax.Array,
    apply: Apply,
    context: Context,
    *,
    schedule: PipelineSchedule,
    period: int,
    policy: RematPolicy,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends `x_BTD` through all layers and their sums, on stages of a mesh.

    The result is that of `history.walk_with_history`, but for rounding and for which numbers
    dropout draws: each microbatch draws its own.

    Args:
      layers: what `stack` returned, of layers that are alike.
      apply: makes a layer's output of its inputs and the arrays of its rows' context. It may read
        no traced values besides its arguments.
      context: of the whole batch.
      schedule: whose number of stages is that of the mesh in force.
      period: length of the pattern of kinds that layers follow.
      policy: what each layer's backward pass computes again. Sums are always made again.

    Returns:
      r of the sum after the last layer, and each scalar summed over layers and rows.
    """
    batch, length, dims = x_BTD.shape
    microbatch = (batch // schedule.num_microbatches, length, dims)
    state_bTD: Any = jax.ShapeDtypeStruct(microbatch, x_BTD.dtype)
    walk = Walk(layers, connections, plan_of(connections, period), apply, state_bTD, policy)
    stages = _Stages(walk, schedule, state_bTD)
    arrays, without = context.arrays_apart()

    def arrays_of(arrays: Any):
        """Microbatch -> the arrays of its context."""
        contexts = without.with_arrays(arrays).in_parts(schedule.num_microbatches)
        return lambda number: contexts(number).arrays_apart()[0]

    @jax.custom_vjp
    def run(given: Given, arrays: Any):
        return stages.forward(given, arrays_of(arrays), keep=False)[0]

    def run_forward(given: Given, arrays: Any):
        results, kept = stages.forward(given, arrays_of(arrays), keep=True)
        return results, (given, arrays, kept)

    def run_backward(kept, gradients):
        given, arrays, kept = kept
        return stages.backward(given, arrays_of(arrays), kept, gradients), None

    run.defvjp(run_forward, run_backward)
    given = walk.given(constrain(x_BTD, *HIDDEN))
    result_BTD, scalars = run(given._replace(layers=stages.weights), arrays)
    return constrain(result_BTD, *HIDDEN), scalars


class _Stages:
    """All turns forward and backward."""

    def __init__(self, walk: Walk, schedule: PipelineSchedule, state_bTD: jax.Array):
        self.walk, self.schedule, self.state_bTD = walk, schedule, state_bTD
        self.num_states, self.num_rows = walk.num_layers + 1, walk.plan.num_rows
        self.rows_H = jnp.asarray(walk.plan.rows_H)
        self.numbers_S = jnp.arange(schedule.num_stages)
        # [S, K R, ...]: those of a layer's repeats lie side by side.
        self.weights = self._by_stage(walk.weights)

    def forward(self, given: Given, arrays_of: Any, *, keep: bool):
        """(result_BTD, scalars), and what the backward pass reads."""
        num_stages, _, _, num_microbatches = self.schedule
        x_MbTD = split_rows(given.x_BTD, num_microbatches, *HIDDEN[1:])
        x_SMbTD = _on_stages(functools.partial(jnp.roll, x_MbTD, axis=0), 0)(self.numbers_S)
        # All stages have the embedding, which so needs not be handed on. It also stands for states
        # that are not there yet: sums may read these, with weight 0, and idle stages do.
        history_SMHbTD = jnp.repeat(x_SMbTD[:, :, None], self.num_states, axis=2)
        history_SPbTD = staged(history_SMHbTD.reshape(num_stages, -1, *x_MbTD.shape[1:]))

        def stage(number, layers, history_PbTD, turn, counts_I):
            segment = self._segment(number, turn, counts_I)
            own = given._replace(layers=layers)
            arrays = arrays_of((turn - number) % num_microbatches)
            history_PbTD, scalars, kept = self.walk.forward(
                history_PbTD, own, arrays, segment, keep=keep
            )
            scalars = {name: jnp.where(segment.has_work, x, 0) for name, x in scalars.items()}
            return history_PbTD, scalars, kept

        def one_turn(history_SPbTD, turn):
            history_SPbTD, scalars, kept = _on_stages(stage, (0, 0, 0, None, None))(
                self.numbers_S,
                given.layers,
                self._handed_on(history_SPbTD, turn),
                turn,
                self._counts(turn),
            )
            return staged(history_SPbTD), (jax.tree.map(jnp.sum, scalars), kept)

        turns = jnp.arange(self.schedule.num_turns)
        history_SPbTD, (scalars, kept) = jax.lax.scan(one_turn, history_SPbTD, turns)

        def last(history_PbTD, slot):
            return self.walk.last(history_PbTD, given, slot * self.num_states)

        def last_of_slot(_, slot):
            # On all stages, as there is one program. That of the last stage is the result.
            return None, staged(_on_stages(last, (0, None))(history_SPbTD, slot))

        slots = jnp.arange(num_microbatches)
        _, result_MSbTD = jax.lax.scan(last_of_slot, None, slots)
        result_BTD = joined_rows(jnp.roll(result_MSbTD[:, -1], 1 - num_stages, axis=0))
        return (result_BTD, jax.tree.map(jnp.sum, scalars)), (history_SPbTD, kept)

    def backward(self, given: Given, arrays_of: Any, kept: Any, gradients: Any) -> Given:
        """Gradients of all that is given."""
        num_stages, _, _, num_microbatches = self.schedule
        history_SPbTD, kept = kept
        of_result_BTD, of_scalars = gradients
        of_result_MbTD = split_rows(of_result_BTD, num_microbatches, *HIDDEN[1:])
        of_result_MbTD = jnp.roll(of_result_MbTD, num_stages - 1, axis=0)
        is_last_S = (self.numbers_S == num_stages - 1)[:, None, None, None]

        def last(history_PbTD, of_rows, of_result_bTD, slot):
            base, base_row = slot * self.num_states, slot * self.num_rows
            of_last, of_rows, of_y_bTD, _ = self.walk.last_backward(
                history_PbTD, given, of_result_bTD, of_rows, None, base, base_row
            )
            return of_last, with_state(of_rows, of_y_bTD, base_row + self.rows_H[-1])

        def last_of_slot(carry, given_of_slot):
            of_last_S, of_rows = carry
            slot, of_result_bTD = given_of_slot
            of_result_SbTD = staged(jnp.where(is_last_S, of_result_bTD, 0))
            found_S, of_rows = _on_stages(last, (0, 0, 0, None))(
                history_SPbTD, of_rows, of_result_SbTD, slot
            )
            return (jax.tree.map(jnp.add, of_last_S, found_S), staged(of_rows)), None

        slots = jnp.arange(num_microbatches)
        shape = (num_stages, num_microbatches * self.num_rows, *self.state_bTD.shape)
        carry = (self._zeros_S(given.last), staged(jnp.zeros(shape, self.state_bTD.dtype)))
        (of_last_S, of_rows), _ = jax.lax.scan(last_of_slot, carry, (slots, of_result_MbTD))

        def stage(number, layers, history_PbTD, of_rows, so_far, kept, turn, counts_I):
            segment = self._segment(number, turn, counts_I)
            own = given._replace(layers=layers)
            arrays = arrays_of((turn - number) % num_microbatches)
            end_row = segment.base_row + self.rows_H[segment.first + segment.num_layers]
            of_y_bTD = jax.lax.dynamic_index_in_dim(of_rows, end_row, keepdims=False)
            of_y_bTD, of_own_scalars = jax.tree.map(
                lambda x: jnp.where(segment.has_work, x, 0), (of_y_bTD, of_scalars)
            )
            made = self.walk.made_before_end(history_PbTD, own, kept, segment)
            found = self.walk.backward(
                history_PbTD, own, arrays, segment, kept, of_own_scalars,
                Gradients(so_far, of_rows, of_y_bTD, made),
            )  # fmt: skip
            first_row = segment.base_row + self.rows_H[segment.first]
            return found.of_given, with_state(found.of_rows, found.of_y_BTD, first_row)

        def one_turn(carry, given_of_turn):
            so_far, of_rows = carry
            turn, kept = given_of_turn
            so_far, of_rows = _on_stages(stage, (0, 0, 0, 0, 0, 0, None, None))(
                self.numbers_S, given.layers, history_SPbTD, of_rows, so_far, kept, turn,
                self._counts(turn),
            )  # fmt: skip
            return (so_far, self._handed_back(staged(of_rows), turn)), None

        of_layers = self._by_stage(jax.tree.map(jnp.zeros_like, self.walk.weights))
        so_far = (of_layers, self._zeros_S(given.sums), self._zeros_S(given.factors_JMD))
        turns = jnp.arange(self.schedule.num_turns)
        carry = (so_far, of_rows)
        (so_far, of_rows), _ = jax.lax.scan(one_turn, carry, (turns, kept), reverse=True)
        of_layers, *of_whole_S = so_far
        of_sums, of_factors, of_last = jax.tree.map(
            lambda x: jnp.sum(x, axis=0), (*of_whole_S, of_last_S)
        )
        of_x_SMbTD = of_rows[:, :: self.num_rows]
        of_x_SMbTD = _on_stages(functools.partial(jnp.roll, axis=0), 0)(of_x_SMbTD, -self.numbers_S)
        of_x_MbTD = jnp.sum(staged(of_x_SMbTD), axis=0, dtype=jnp.float32)
        of_x_BTD = joined_rows(of_x_MbTD).astype(given.x_BTD.dtype)
        return Given(of_x_BTD, of_layers, of_sums, of_last, of_factors)

    def _by_stage(self, state: Any) -> Any:
        weights = by_stage(state, self.schedule)
        if self.schedule.num_repeats == 1:
            return weights
        return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), weights)

    def _zeros_S(self, whole: Any) -> Any:
        """For the gradients of arrays that are whole on every stage."""
        num_stages = self.schedule.num_stages
        return jax.tree.map(lambda x: jnp.zeros((num_stages, *x.shape), x.dtype), whole)

    def _repeat(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        visits = (turn - number) // self.schedule.num_microbatches
        return jnp.clip(visits, 0, self.schedule.num_repeats - 1)

    def _has_work(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        visit = turn - number
        return (visit >= 0) & (visit < self.schedule.num_microbatches * self.schedule.num_repeats)

    def _first(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        """The first layer of a stage's run."""
        num_stages, _, per_stage, _ = self.schedule
        return (self._repeat(number, turn) * num_stages + number) * per_stage

    def _counts(self, turn: jax.Array) -> jax.Array:
        """States that the sums of a run read, of the stage that reads the most of them.

        A loop over them then has one end for all stages. As all go on together after a turn, it
        takes no longer.
        """
        plan, per_stage = self.walk.plan, self.schedule.layers_per_stage
        first_sums_S = self._first(self.numbers_S, turn) // plan.every
        sums_SI = first_sums_S[:, None] + jnp.arange(per_stage // plan.every)
        return jnp.max(jnp.asarray(plan.counts_J)[sums_SI], axis=0)

    def _segment(self, number: jax.Array, turn: jax.Array, counts_I: jax.Array) -> Segment:
        _, repeats, per_stage, num_microbatches = self.schedule
        slot = turn % num_microbatches
        first, plan = self._first(number, turn), self.walk.plan
        if self.walk.reading.kernel:
            counts_J, num_sums = jnp.asarray(plan.counts_J), per_stage // plan.every
            counts_I = jax.lax.dynamic_slice_in_dim(counts_J, first // plan.every, num_sums)
        return Segment(
            num_layers=per_stage,
            counts_I=counts_I,
            first=first,
            base=slot * self.num_states,
            base_row=slot * self.num_rows,
            stored=self._repeat(number, turn),
            stride=repeats,
            has_work=self._has_work(number, turn),
        )

    def _ways(self, turn: jax.Array):
        """(slots, last state before those that are handed on), of receivers and of senders.

        Of each stage what it receives, and of each what it sends to the next one. The last stage
        has microbatches waiting that the first one goes on with, if these are more than stages.
        """
        num_stages, _, per_stage, num_microbatches = self.schedule

        def before(number: jax.Array) -> jax.Array:
            return jnp.maximum(self._first(number, turn) - (num_stages - 1) * per_stage, 0)

        slots_S = jnp.full(num_stages, turn % num_microbatches)
        is_last_S = self.numbers_S == num_stages - 1
        senders_S = (turn - 1 + jnp.where(is_last_S, num_stages, 0)) % num_microbatches
        next_S = (self.numbers_S + 1) % num_stages
        return (slots_S, before(self.numbers_S)), (senders_S, before(next_S))

    def _handed_on(self, history_SPbTD: jax.Array, turn: jax.Array) -> jax.Array:
        """The history with the states that stages receive before a turn."""
        num_stages, _, per_stage, _ = self.schedule
        number = (num_stages - 1) * per_stage
        to_S, from_S = (
            slots_S * self.num_states + before_S + 1 for slots_S, before_S in self._ways(turn)
        )
        sent_SWbTD = _on_stages(functools.partial(_cut, number), 0)(history_SPbTD, from_S)
        arrived_SWbTD = staged(jnp.roll(staged(sent_SWbTD), 1, axis=0))
        return staged(_on_stages(_paste, 0)(history_SPbTD, arrived_SWbTD, to_S))

    def _handed_back(self, of_rows: jax.Array, turn: jax.Array) -> jax.Array:
        """The gradients with those of the same states, which go the other way after the turn."""
        num_stages, _, per_stage, _ = self.schedule
        number = (num_stages - 1) * self.walk.plan.row_of[per_stage]
        from_S, to_S = (
            slots_S * self.num_rows + self.rows_H[before_S] + 1
            for slots_S, before_S in self._ways(turn)
        )
        has_work_S = self._has_work(self.numbers_S, turn)
        sent = _on_stages(functools.partial(_cut, number), 0)(of_rows, from_S)
        sent = jnp.where(has_work_S[:, None, None, None, None], sent, 0)
        arrived = staged(jnp.roll(staged(sent), -1, axis=0))
        there = _on_stages(functools.partial(_cut, number), 0)(of_rows, to_S)
        return staged(_on_stages(_paste, 0)(of_rows, there + arrived, to_S))


def _on_stages(function: Any, in_axes: Any) -> Any:
    return jax.vmap(function, in_axes=in_axes, spmd_axis_name="stage")


def _cut(number: int, states: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(states, start, number)


def _paste(states: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(states, new, start, 0)
