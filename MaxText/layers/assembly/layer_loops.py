"""Application of a stack of layers: scanned, or unrolled.

A scan compiles each kind of layer once. Unrolled layers compile one by one, and XLA may then
optimize across them. stack.py says how their weights are stored; both loops read either form.
config/layer_plan.py says what a cycle and its runs are. A model of L layers of one kind has a cycle
of 1 layer that is repeated L times: `apply_scanned` is then a single jax.lax.scan over L.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import RematPolicy
from MaxText.layers.assembly.remat import apply_remat
from MaxText.layers.assembly.stack import Blueprint, weights_dict
from MaxText.layers.lowering.scanned_layers import keep_casts_in_loop, with_token_major_layout
from MaxText.layers.lowering.unrolled_layers import (
    SequentialWeights,
    postpones_weight_gradients,
    take_layer,
)
from MaxText.layers.params import Params
from MaxText.layers.part import Carry, DecodeState, LayerIndex, Scalars
from MaxText.layers.part_scalars import add_scalars, sum_scalars
from MaxText.value_types import PyTree

# Weights of a cycle, in one of the forms of _CycleForm.
CycleWeights = PyTree
# (layer, carry, index) -> (carry, scalars); the index is traced in a scan
ApplyLayer = Callable[[Any, Carry, LayerIndex], tuple[Carry, Scalars]]
# (layer, carry, index, state) -> (carry, scalars, state)
ApplyLayerWithState = Callable[[Any, Carry, int, DecodeState], tuple[Carry, Scalars, DecodeState]]


def apply_scanned(
    layers: nnx.Module, blueprint: Blueprint, carry: Carry, apply: ApplyLayer, policy: RematPolicy
) -> tuple[Carry, Scalars]:
    """Applies all layers: repeats of the cycle in a scan, others unrolled.

    Args:
      layers: The module from `stack`.
      blueprint: From `stack`, too.
      carry: What the first layer reads.
      apply: Applies one layer.
      policy: Of rematerialization, for each layer.

    Returns:
      What the last layer passes on, and scalars summed over layers.
    """
    weights = weights_dict(layers)
    plan = blueprint.plan
    totals: Scalars = {}

    def apply_single(carry: Carry, index: int) -> tuple[Carry, Scalars]:
        """Applies a layer outside of the cycle."""

        def one_layer(carry: Carry, weights: Params) -> tuple[Carry, Scalars]:
            if blueprint.is_stacked:
                weights = take_layer(weights, 0 if blueprint.is_shared else index)
            return apply(nnx.merge(blueprint.graphdefs[index], weights), carry, index)

        stored = weights if blueprint.is_stacked else weights[str(index)]
        carry, scalars = apply_remat(one_layer, policy, in_scan=False)(carry, stored)
        return with_token_major_layout(carry), add_scalars(totals, scalars)

    for index in range(plan.prefix):
        carry, totals = apply_single(carry, index)
    if plan.repeats:
        cycle = CycleScan(blueprint, apply, policy, num_repeats=plan.repeats)
        carry, scalars = cycle.scan(_cycle_weights(blueprint, weights), carry, first=plan.prefix)
        totals = add_scalars(totals, scalars)
    for index in range(plan.end, plan.num_layers):
        carry, totals = apply_single(carry, index)
    return carry, totals


def _cycle_weights(blueprint: Blueprint, weights: Params) -> Params:
    """Returns the weights of the layers in repeats of the cycle, from those of all layers."""
    plan = blueprint.plan
    if not blueprint.is_stacked:
        return weights["cycle"]
    if plan.is_whole or blueprint.is_shared:
        return weights
    return jax.tree.map(lambda leaf: leaf[plan.prefix : plan.end], weights)


class _CycleForm(enum.Enum):
    """The form of the weights of one cycle, and where a layer finds its own in it."""

    # The stored tree, which has one row for all layers. It is no input of the scan.
    SHARED = enum.auto()
    # One tree, whose row i is the i-th layer of the cycle. All runs have one layer: an inner scan
    # cannot read some of the rows of a tree.
    TREE = enum.auto()
    # A list of one tree for each run, whose rows are the layers of the run.
    TREE_PER_RUN = enum.auto()


@dataclasses.dataclass(frozen=True)
class CycleScan:
    """A scan over repeats of a cycle of layers.

    A cycle consists of runs of like layers: GGG* has a run of 3 and a run of 1. A run of several
    layers is a scan inside of the scan over cycles, which hands out the rows of the run's tree.

    Weights are given as they are stored, with a leading dimension of layers: one tree for all
    layers of the cycle, or one for each run. Each cycle gets them in one of the forms above. In a
    cycle of one layer, its tree is that of the layer itself, without rows.
    """

    blueprint: Blueprint
    apply: ApplyLayer
    policy: RematPolicy
    num_repeats: int
    select: Callable[[Params], Params] | None = None  # from stored weights to a layer's

    def scan(
        self, weights: Params, carry: Carry, first: jax.Array | int = 0
    ) -> tuple[Carry, Scalars]:
        """Applies all repeats of the cycle.

        Args:
          weights: Of these layers, as they are stored.
          carry: What the first layer reads.
          first: Index of the first layer.

        Returns:
          What the last layer passes on, and scalars summed over layers.
        """
        plan = self.blueprint.plan
        is_shared = self._form == _CycleForm.SHARED
        starts = first + jnp.arange(0, self.num_repeats * plan.cycle, plan.cycle)

        def one_cycle(
            carry: Carry, weights_and_start: tuple[Any, jax.Array]
        ) -> tuple[Carry, list[Scalars]]:
            cycle_weights, start = weights_and_start
            if is_shared:
                cycle_weights = weights
            scalars = []
            for run, length in enumerate(plan.runs):
                carry, run_scalars = self._apply_run(run, cycle_weights, carry, start)
                scalars.append(run_scalars)
                start = start + length
            return carry, scalars

        by_cycle = None if is_shared else self._split_by_cycle(weights)
        carry, scalars = jax.lax.scan(one_cycle, carry, (by_cycle, starts))
        return carry, functools.reduce(add_scalars, jax.tree.map(sum_scalars, scalars))

    @property
    def _form(self) -> _CycleForm:
        """The form in which a cycle gets its weights."""
        blueprint = self.blueprint
        if blueprint.is_shared:
            return _CycleForm.SHARED
        if blueprint.is_stacked and max(blueprint.plan.runs) == 1:
            return _CycleForm.TREE
        return _CycleForm.TREE_PER_RUN

    def _split_by_cycle(self, weights: Params) -> CycleWeights:
        """Returns the weights of all cycles in their form, with a leading dimension of repeats."""
        if self.blueprint.plan.cycle > 1:
            weights = jax.tree.map(
                lambda leaf: leaf.reshape(self.num_repeats, -1, *leaf.shape[1:]), weights
            )
        return weights if self._form == _CycleForm.TREE else self._split_by_run(weights)

    def _split_by_run(self, weights: Params) -> list[Params]:
        """Splits weights [repeats, layers, ...] by run: outside of the loop, to save no slices."""
        runs = self.blueprint.plan.runs
        if not self.blueprint.is_stacked:
            return [weights[str(run)] for run in range(len(runs))]

        def take(start: int, end: int) -> Params:
            return jax.tree.map(lambda leaf: leaf[:, start:end], weights)

        ends = itertools.accumulate(runs)
        return [take(end - length, end) for length, end in zip(runs, ends, strict=True)]

    def _apply_run(
        self, run: int, cycle_weights: CycleWeights, carry: Carry, start: jax.Array
    ) -> tuple[Carry, Scalars]:
        """Applies the layers of one run, in one repeat of the cycle.

        Args:
          run: Index of the run in the cycle.
          cycle_weights: Those of this repeat, in their form.
          carry: What the first layer reads.
          start: Index of the first layer.
        """
        one_layer = self._layer_function(run)
        length = self.blueprint.plan.runs[run]
        has_tree = self._form == _CycleForm.TREE_PER_RUN
        weights = cycle_weights[run] if has_tree else cycle_weights
        if length == 1:
            carry, scalars = one_layer(carry, weights, start)
            return with_token_major_layout(carry), scalars

        is_shared = self._form == _CycleForm.SHARED

        def body(
            carry: Carry, weights_and_offset: tuple[CycleWeights, jax.Array]
        ) -> tuple[Carry, Scalars]:
            layer_weights, offset = weights_and_offset
            if is_shared:
                layer_weights = weights
            carry, scalars = one_layer(carry, layer_weights, start + offset)
            return with_token_major_layout(carry), scalars

        by_layer = None if is_shared else weights
        carry, scalars = jax.lax.scan(body, carry, (by_layer, jnp.arange(length)))
        return carry, jax.tree.map(sum_scalars, scalars)

    def _layer_function(
        self, run: int
    ) -> Callable[[Carry, Params, LayerIndex], tuple[Carry, Scalars]]:
        """Returns (carry, weights, index) -> (carry, scalars) of a run's layers, with remat."""
        plan = self.blueprint.plan
        graphdef = self.blueprint.graphdefs[plan.first_of(run)]
        row = self._row_of_layer(run)

        def one_layer(carry: Carry, weights: Params, index: LayerIndex) -> tuple[Carry, Scalars]:
            # Sliced in here, or the slices would be saved for the backward pass.
            if row is not None:
                weights = take_layer(weights, row)
            weights = keep_casts_in_loop(weights)
            if self.select is not None:
                weights = self.select(weights)
            return self.apply(nnx.merge(graphdef, weights), carry, index)

        in_scan = self.num_repeats > 1 or plan.runs[run] > 1  # XLA removes a loop of one iteration
        return apply_remat(one_layer, self.policy, in_scan=in_scan)

    def _row_of_layer(self, run: int) -> int | None:
        """Returns the row of a layer's weights in its tree; None if the tree is its own."""
        plan = self.blueprint.plan
        if self._form == _CycleForm.SHARED:
            return 0
        if plan.cycle == 1 or plan.runs[run] > 1:  # no rows, or the inner scan hands them out
            return None
        return run if self._form == _CycleForm.TREE else 0


def apply_unrolled(
    layers: nnx.Module,
    blueprint: Blueprint,
    carry: Carry,
    apply: ApplyLayerWithState,
    *,
    policy: RematPolicy = "none",
    states: Sequence[DecodeState] | None = None,
    sequential: bool = False,
) -> tuple[Carry, Scalars, tuple[DecodeState, ...]]:
    """Applies all layers one by one.

    Generation uses this, too: a loop would copy each layer's weights and state out of the stacked
    ones for every token, which takes as long as the matmuls.

    Args:
      layers: The module from `stack`.
      blueprint: From `stack`, too.
      carry: What the first layer reads.
      apply: Applies one layer.
      policy: Of rematerialization, for each layer.
      states: Decode state of each layer; None outside of generation.
      sequential: Whether the backward pass goes layer by layer on TPU, with the same result. This
        saves memory with dense connections (`SequentialWeights`).

    Returns:
      What the last layer passes on, scalars summed over layers, and each layer's state.
    """
    weights = weights_dict(layers)
    sequential_weights = None
    layer_weights = []
    if sequential and postpones_weight_gradients():
        sequential_weights = _sequential_weights(blueprint, weights)
    else:
        layer_weights = blueprint.layer_weights(weights)
    totals: Scalars = {}
    new_states = []
    for index, graphdef in enumerate(blueprint.graphdefs):

        def one_layer(
            weights: Params,
            carry: Carry,
            state: DecodeState,
            graphdef: nnx.GraphDef = graphdef,
            index: int = index,
        ) -> tuple[Carry, Scalars, DecodeState]:
            return apply(nnx.merge(graphdef, weights), carry, index, state)

        if sequential_weights is None:
            weights = layer_weights[index]
        else:
            weights, carry = sequential_weights.take(index, carry)
        state = None if states is None else states[index]
        function = apply_remat(one_layer, policy, in_scan=False)
        carry, scalars, new_state = function(weights, carry, state)
        totals = add_scalars(totals, scalars)
        new_states.append(new_state)
    return carry, totals, tuple(new_states)


def _sequential_weights(blueprint: Blueprint, weights: Params) -> SequentialWeights:
    """Returns the weights of all layers for a backward pass that goes layer by layer."""
    if blueprint.is_stacked and not blueprint.is_shared:
        return SequentialWeights(weights)
    layer_weights = blueprint.layer_weights(weights)
    return SequentialWeights(layer_weights[:1] if blueprint.is_shared else layer_weights)
