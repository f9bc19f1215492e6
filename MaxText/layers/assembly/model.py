"""A model as an abstract parameter table and pure functions.

Parameters are a plain nested dict, merged into the module inside the trace for fast host dispatch.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import KeyPath

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.assembly.parametrization import depth_factors, init_factors, with_ratios
from MaxText.layers.dense import scaled
from MaxText.layers.params import AbstractRngs, Params
from MaxText.parallelism.logical_sharding import OBJECTIVE_LAYERS, ParamSpec
from MaxText.value_types import Tree

_TOP_LEVEL_HEAD = ("logits_dense", "head_qk")  # at the top level of checkpoints, not under head/


def _as_stored(tree: nnx.State | Params) -> Params:
    """Returns parameters as checkpoints hold them: some of the head at the top level."""
    head = dict(tree.get("head", {}))
    top_level = {name: head.pop(name) for name in _TOP_LEVEL_HEAD if name in head}
    stored = {name: tree[name] for name in tree if name != "head"}
    return stored | top_level | ({"head": head} if head else {})


def _declared(module: Any, path: Sequence[Any]) -> dict[str, Any]:
    """Returns what the parts around a parameter declare about it (layers/part.py).

    Args:
      module: The decoder.
      path: From the decoder to the parameter: attributes, keys and indices.
    """
    row = ""
    is_recomputed = False
    owner = path[0]
    for step in path:
        if step in getattr(type(module), "layer_attributes", ()):
            owner = OBJECTIVE_LAYERS
        rows = getattr(type(module), "rows", {})
        not_recomputed = getattr(type(module), "not_recomputed", None)
        row = row or (rows if isinstance(rows, str) else rows.get(step, ""))
        is_recomputed = is_recomputed or (not_recomputed is not None and step not in not_recomputed)
        is_container = isinstance(module, nnx.Dict | nnx.List)
        module = module[step] if is_container else getattr(module, step)
    return {"owner": owner, "row": row, "is_recomputed": is_recomputed}


class Model:
    """The decoder of a configuration, without values.

    Attributes:
      config: Of the model, with `auto` values resolved.
      blueprint: How layers are stored: which of them are stacked.
      abstract: Parameters as checkpoints hold them, with jax.ShapeDtypeStruct leaves.
      parameters: Metadata of each parameter, by names such as "layers/mlp/wo/kernel".
    """

    def __init__(self, config: ModelConfig):
        """Builds the decoder abstractly, in which no weight is drawn.

        Args:
          config: With `auto` values resolved (training/backend_defaults.py).
        """
        self.config = config  # with `auto` values resolved
        module = Decoder(config.with_multipliers, AbstractRngs())
        self.blueprint = module.blueprint  # which layers are stacked
        self._graphdef, state = nnx.split(module)
        for path, parameter in nnx.to_flat_state(state):
            parameter.set_metadata(**_declared(module, path))
        state = nnx.State(_as_stored(state))
        self.abstract: Params = nnx.to_pure_dict(state)  # jax.ShapeDtypeStruct
        self.parameters: dict[str, ParamSpec] = {}  # by names such as "layers/mlp/wo/kernel"
        for path, parameter in nnx.to_flat_state(state):
            name = "/".join(map(str, path))
            value = parameter.get_value()
            metadata = parameter.get_metadata()
            self.parameters[name] = ParamSpec(
                shape=value.shape,
                dtype=value.dtype,
                logical_axes=metadata["logical_axes"],
                num_input_dims=metadata["num_input_dims"],
                used_in=metadata["used_in"],
                owner=metadata["owner"],
                row=metadata["row"] or self.placed(name)[0].rpartition("/")[0],
                is_recomputed=metadata["is_recomputed"],
                update_rule=metadata["update_rule"],
                init_std=metadata["init_std"],
                is_readout=metadata["is_readout"],
            )
        # By what freshly drawn weights are multiplied, by name; none in standard form.
        self._init_factors: dict[str, float] = {}
        if not config.is_standard:
            base = Model(config.at_base_shape).parameters
            self.parameters = with_ratios(self.parameters, base, depth_factors(config))
            self._init_factors = init_factors(self.parameters, base)

    def stored(self, layer: int, name: str) -> tuple[str, int | None]:
        """Returns the stored array of a layer's parameter, and its row there.

        Args:
          layer: Index of the layer.
          name: Within the layer, such as "mlp/wo/kernel".

        Returns:
          The array's name, and None instead of a row if it belongs to this layer alone.
        """
        if self.blueprint.is_stacked:
            return f"layers/{name}", layer
        path, row = self.blueprint.plan.path(layer)
        return f"layers/{path}/{name}", row

    def placed(self, name: str) -> tuple[str, Sequence[int] | None]:
        """Returns a stored array's name within its layers, and the layer of each of its rows.

        None instead of layers for an array outside of them. The inverse of `stored`.
        """
        folder, _, within = name.partition("/")
        plan = self.blueprint.plan
        if folder != "layers":
            return name, None
        if self.blueprint.is_stacked:
            return within, range(1 if self.blueprint.is_shared else plan.num_layers)
        first, _, within = within.partition("/")
        if first != "cycle":
            return within, range(int(first), int(first) + 1)
        run, _, within = within.partition("/")
        return within, plan.layers_of(int(run))

    def layer_of(self, name: str) -> LayerConfig | None:
        """Returns the first layer of a parameter, or None."""
        layers = self.placed(name)[1]
        return None if layers is None else self.config.layers[layers[0]]

    @property
    def num_parameters(self) -> int:
        """Number of trained and frozen weights."""
        return sum(spec.size for spec in self.parameters.values())

    def initialize(self, key: jax.Array) -> Params:
        """Returns fresh parameters. Pure: call it under jit with output shardings."""
        state = nnx.state(Decoder(self.config.with_multipliers, nnx.Rngs(params=key)))
        params = _as_stored(nnx.to_pure_dict(state))
        if not self._init_factors:
            return params

        def scaled_leaf(path: KeyPath, leaf: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return scaled(leaf, self._init_factors.get(name, 1.0))

        return jax.tree_util.tree_map_with_path(scaled_leaf, params)

    def merge(self, parameters: Params) -> Decoder:
        """Returns the decoder with these parameters: stored ones, or from `unstack_params`.

        For use inside a trace.
        """
        layers = parameters["layers"]
        if isinstance(layers, tuple):  # from unstack_params
            parameters = parameters | {"layers": self.blueprint.join(layers)}
        head = dict(parameters.get("head", {}))
        head |= {name: parameters[name] for name in _TOP_LEVEL_HEAD if name in parameters}
        of_head = ("head", *_TOP_LEVEL_HEAD)
        body = {name: tree for name, tree in parameters.items() if name not in of_head}
        return nnx.merge(self._graphdef, body | {"head": head})

    def unstack_params(self, parameters: Params) -> Params:
        """Returns parameters for generation: an array per layer, as used.

        Decoding cannot afford to slice them for every token. Deletes the given arrays one by one,
        so that there is never a second copy of all.
        """

        def converted(path: KeyPath, leaf: jax.Array) -> jax.Array:
            """Returns a leaf in the dtype it is always read in, if that is narrower."""
            dtype = self.parameters["/".join(entry.key for entry in path)].used_in
            if dtype is None or dtype.itemsize >= leaf.dtype.itemsize:
                return leaf
            return replaced(leaf, leaf.astype(dtype))

        def unstacked(stacked: dict) -> list[dict]:
            """Returns the trees of the layers of a stacked tree."""
            leaves, structure = jax.tree.flatten(stacked)
            rows = [replaced(leaf, [leaf[i] for i in range(len(leaf))]) for leaf in leaves]
            return [jax.tree.unflatten(structure, row) for row in zip(*rows, strict=True)]

        def replaced(array: jax.Array, replacement: Tree) -> Tree:
            """Deletes an array once its replacement is computed."""
            jax.block_until_ready(replacement)
            array.delete()
            return replacement

        parameters = jax.tree_util.tree_map_with_path(converted, parameters)
        layers = tuple(self.blueprint.layer_weights(parameters["layers"], unstacked))
        return parameters | {"layers": layers}
