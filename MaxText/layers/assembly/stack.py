"""Construction and storage of a stack of layers; layer_loops.py applies it.

Layers whose parameters have the same shapes are stored as one, with a leading `layers` dimension.
Otherwise runs of like layers in a repeated cycle (config/layer_plan.py) are stacked as
`layers/cycle/<run>`, and other layers are stored as `layers/<number>`. Checkpoints do not depend on
whether layers are scanned or unrolled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.layer_plan import LayerPlan
from MaxText.errors import UserError
from MaxText.layers.lowering import unrolled_layers
from MaxText.layers.params import AbstractRngs, Params

MakeLayer = Callable[[int, nnx.Rngs], Any]  # layer index -> layer


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The structure of a model's layers, and how they are stored."""

    plan: LayerPlan
    graphdefs: tuple[Any, ...]  # each layer's graph definition (nnx.split)
    is_stacked: bool  # whether one tree of stacked arrays holds all layers
    is_shared: bool  # whether all layers share their weights

    def layer_weights(
        self, weights: Params, unstack: Callable[[Params], list[Params]] = unrolled_layers.unstack
    ) -> list[Params]:
        """Returns each layer's weights.

        Args:
          weights: Those of all layers, as they are stored.
          unstack: Splits a stacked tree into those of its layers.
        """
        indices = range(self.plan.num_layers)
        if self.is_stacked:
            rows = unstack(weights)
            return [rows[index % len(rows)] for index in indices]
        cycles = {run: unstack(stacked) for run, stacked in weights.get("cycle", {}).items()}
        layers = []
        for index in indices:
            run_and_row = self.plan.cycled(index)
            if run_and_row is None:
                layers.append(weights[str(index)])
            else:
                run, row = run_and_row
                layers.append(cycles[str(run)][row])
        return layers

    def join(self, layers: Sequence[Params]) -> Params:
        """Returns all layers' weights as they are stored, for use inside a trace.

        The inverse of `layer_weights`. XLA reads slices of the result from its inputs: nothing is
        copied unless a loop reads it.
        """

        def stacked(layers: Sequence[Params]) -> Params:
            """Stacks the weights of layers along a new first dimension."""
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

        if self.is_stacked:
            return stacked(layers[:1] if self.is_shared else layers)
        plan = self.plan
        joined: Params = {str(index): layers[index] for index in plan.singles()}
        if plan.repeats:
            joined["cycle"] = {
                str(run): stacked([layers[index] for index in plan.layers_of(run)])
                for run in range(len(plan.runs))
            }
        return joined


def stack(
    make_layer: MakeLayer, plan: LayerPlan, rngs: nnx.Rngs, *, shared: bool = False
) -> tuple[Any, Blueprint]:
    """Builds all layers as one module, and its blueprint.

    Args:
      make_layer: Builds the layer at an index. Layers that `plan` takes for the same kind of layer
        are built from the first of them.
      plan: Which layers repeat.
      rngs: Draws the weights; `AbstractRngs` draws only their shapes.
      shared: Whether all layers share the weights of one.

    Returns:
      A layer whose parameters are stacked, or an nnx.Dict as the module's docstring says if shapes
      differ; and the blueprint.
    """
    kinds = [_first_of_kind(plan, index) for index in range(plan.num_layers)]
    abstract = {index: make_layer(index, AbstractRngs()) for index in dict.fromkeys(kinds)}
    graphdefs = {index: nnx.graphdef(layer) for index, layer in abstract.items()}
    shapes = [_shapes(layer) for layer in abstract.values()]
    is_stacked = all(layer_shapes == shapes[0] for layer_shapes in shapes)
    assert is_stacked or not shared, "layers that share parameters have different ones"
    blueprint = Blueprint(plan, tuple(graphdefs[kind] for kind in kinds), is_stacked, shared)
    num_stored = 1 if shared else plan.num_layers
    draws = not isinstance(rngs, AbstractRngs)
    keys = jax.random.split(rngs.params(), num_stored) if draws else None

    def build_stacked(kind: int, indices: Sequence[int]) -> Any:
        """Builds the layers at `indices` as one of `kind`, weights with a leading axis `layers`."""
        if keys is None:
            weights = _add_dimension(weights_dict(abstract[kind]), len(indices))
        else:
            weights = _draw_stacked(make_layer, kind, keys[jnp.asarray(indices)])
        layers = nnx.merge(graphdefs[kind], weights)
        for _, parameter in nnx.to_flat_state(nnx.state(layers)):
            axes = parameter.get_metadata()["logical_axes"]
            parameter.set_metadata(logical_axes=("layers", *axes))
        return layers

    if is_stacked:
        return build_stacked(0, range(num_stored)), blueprint
    layers = {
        str(index): abstract[index] if keys is None else make_layer(index, _rngs(keys[index]))
        for index in plan.singles()
    }
    if plan.repeats:
        cycle = {}
        for run in range(len(plan.runs)):
            indices = plan.layers_of(run)
            cycle[str(run)] = build_stacked(indices[0], indices)
        layers["cycle"] = nnx.Dict(cycle)
    return nnx.Dict(layers), blueprint


def _first_of_kind(plan: LayerPlan, index: int) -> int:
    """Returns the first layer of the cycle's run that a layer belongs to, or the layer itself."""
    run_and_row = plan.cycled(index)
    return index if run_and_row is None else plan.first_of(run_and_row[0])


def _rngs(key: jax.Array) -> nnx.Rngs:
    """Returns RNG streams whose weights are drawn from a key."""
    return nnx.Rngs(params=key)


def _draw_stacked(make_layer: MakeLayer, index: int, keys: jax.Array) -> Params:
    """Returns weights of as many layers as there are keys, all built as layer `index`.

    One vmap over keys: drawn one by one, deep models take seconds to compile.
    """

    def draw(key: jax.Array) -> Params:
        return weights_dict(make_layer(index, _rngs(key)))

    return jax.vmap(draw)(keys)


def _add_dimension(shapes: Params, size: int) -> Params:
    """Returns shapes with a leading dimension."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), shapes)


def _shapes(layer: Any) -> list[Any]:
    """Returns what layers have in common whose weights are stored as one: paths, shapes, ..."""
    flat = nnx.to_flat_state(nnx.state(layer))
    for path, parameter in flat:
        if "logical_axes" not in parameter.get_metadata():
            raise UserError(
                f"the weight {'/'.join(map(str, path))} of a layer has no logical axes: declare it "
                "by Dense or MaxText.layers.params.param, not as an nnx.Param"
            )
    return [
        (
            path,
            parameter.shape,
            parameter.dtype,
            parameter.get_metadata()["logical_axes"],
            parameter.get_metadata()["update_rule"],
        )
        for path, parameter in flat
    ]


def weights_dict(layers: Any) -> Params:
    """Returns the parameters of a module as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(layers))
