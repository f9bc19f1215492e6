"""Weights from checkpoints of MaxText and programs derived from it.

The tree is params/params/decoder/..., or with one `params`. Scanned layers are one array whose
second dimension is the layer (param_scan_axis=1); unrolled layers are `layers_0`, `layers_1` and so
on. Names follow AI-Hypercomputer/maxtext, and for slots and dense connections the JAX programs of
TokenFormer and MUDDFormer.
"""

import math
from typing import NamedTuple

import numpy as np
from etils import epath

from MaxText.checkpointing.checkpoint_files import ITEMS_FILES, list_dir
from MaxText.config.schema import Config
from MaxText.conversion.weight_source import (
    LazyCheckpointReader,
    WeightSource,
    check_arrays,
    common_format,
)
from MaxText.errors import UserError
from MaxText.storage.paths import check_checkpoint_path, parse_path

_MUDDFORMER_ITEMS = "state"
_ITEMS = ("items", _MUDDFORMER_ITEMS, "default")  # MaxText, MUDDFormer's program, older MaxText

# normalization_type -> our part of a layer -> MaxText's. Llama's block names the pre-MLP norm after
# what precedes it; the gpt3 block (LayerNorm) has it inside the MLP.
_LAYER_NAMES = {
    "rms_norm": {"pre_mlp_layer_norm": "post_self_attention_layer_norm"},
    "layer_norm": {
        "pre_self_attention_layer_norm": "pre_self_attention_norm",
        "pre_mlp_layer_norm": "mlp/mlp_layer_norm",
    },
}
# Index within the shared array, [D, 3, n], or [3, n] for biases.
_SHARED_SLOTS = {
    f"self_attention/{part}/keys": index for index, part in enumerate(("query", "key", "value"))
}
# Slots, without /kernel or /bias.
_SLOT_NAMES = dict.fromkeys(_SHARED_SLOTS, "self_attention/qkv_key_slot") | {
    "self_attention/query/values": "self_attention/q_value_slot",
    "self_attention/key/values": "self_attention/k_value_slot",
    "self_attention/value/values": "self_attention/v_value_slot",
    "self_attention/out/keys": "self_attention/proj_key_slot",
    "self_attention/out/values": "self_attention/proj_value_slot",
    "mlp/keys": "mlp/wi",
    "mlp/values": "mlp/wo",
}
# connections/after/{layer + 1}/... -> names of the layer in MUDDFormer's program.
_CONNECTION_NAMES = {
    "norm/scale": "decoder/layers_{layer}/pre_dense_proj1_norm/scale",
    "wi/kernel": "decoder/layers_{layer}/dynamic_dense_conn1/kernel",
    "wo/kernel": "decoder/layers_{layer}/dynamic_dense_conn2/kernel",
    "static": "decoder/layers_{layer}/dense_proj2.bias",
    "post_norms/r/scale": "decoder/mudd_postnorm_{layer}/scale",
}
# Scales of the embedding and of each layer's output: rows of one array here.
_SOURCE_NORM = "connections/source_norm/scale"
_SOURCE_NORM_NAMES = ("decoder/mudd_prenorm/scale", "decoder/mudd_prenorm_{layer}/scale")
_LAYER_AXIS = 1  # param_scan_axis of scanned layers

_ROTARY = {"query", "key", "query_norm", "key_norm"}  # affected by the rotary embedding


class _ArrayLocation(NamedTuple):
    """Where MaxText's tree has a parameter."""

    paths: list[str]  # one, or several to stack along a new first dimension
    shape: tuple[int, ...]  # of the array at each path
    is_stack: bool = False
    is_scanned: bool = False  # whether it holds all layers, along _LAYER_AXIS


class MaxTextWeights(WeightSource):
    """Weights of a MaxText checkpoint.

    Attributes:
      query_scaling: Where 1/sqrt(head_dim) is applied. MaxText's Llama and Mistral fold it into the
        query weights ("weights"); its gpt3, Qwen3 and other programs scale the scores ("model").
    """

    def __init__(self, path: str, config: Config, query_scaling: str = ""):
        """Reads names and shapes of a run, its checkpoints, a step or its items.

        An empty `query_scaling` is "model" with LayerNorm (gpt3), with query and key norms, whose
        scale would undo a factor in the weights, and for MUDDFormer's folder layout, else
        "weights". Raises UserError for a missing checkpoint, unexpected arrays, or parts that
        MaxText stores differently.
        """
        _check_parts(config, query_scaling)
        super().__init__(config)
        self._layer_names = _LAYER_NAMES[config.model.block.normalization_type]
        folder_path = parse_path(path, "from")
        if "://" not in path:
            folder_path = folder_path.absolute()  # required by Orbax
        check_checkpoint_path(folder_path, "from")
        self.description = self.folder = _find_items(folder_path, path)
        in_model = (
            config.model.block.normalization_type == "layer_norm"
            or config.model.attention.use_qk_norm
            or self.folder.name == _MUDDFORMER_ITEMS
        )
        self.query_scaling = query_scaling or ("model" if in_model else "weights")
        self._arrays = LazyCheckpointReader(self.folder)
        self._locations = self._match()
        self.formats = {
            name: common_format(self._arrays.leaves[path].dtype.name for path in location.paths)
            for name, location in self._locations.items()
        }

    def _match(self) -> dict[str, _ArrayLocation]:
        """Returns the location of each parameter; UserError if the arrays do not fit."""
        leaves = self._arrays.leaves
        stored_params = {path: leaf for path, leaf in leaves.items() if path.startswith("params/")}
        is_nested = any(path.startswith("params/params/") for path in stored_params)
        prefix = "params/params/" if is_nested else "params/"
        is_unrolled = any(path.startswith(f"{prefix}decoder/layers_") for path in stored_params)
        locations = {
            name: self._location(name, prefix, is_unrolled) for name in self.model.parameters
        }
        check_arrays(
            stored_params,
            {path: location.shape for location in locations.values() for path in location.paths},
            f"{self.folder} does not match the configuration",
            "Use the configuration that the checkpoint was trained with, in MaxText's key names: "
            "convert.py CONFIG.yml from=maxtext:..., or model_name=NAME. Known are MaxText's "
            "llama2, mistral, gpt3 and qwen3 blocks, with separate projections (fused_qkv and "
            "fused_mlp off), TokenFormer's and MUDDFormer's.",
        )
        return locations

    def _location(self, name: str, prefix: str, is_unrolled: bool) -> _ArrayLocation:
        """Returns the location of a parameter.

        Args:
          prefix: Of all paths in the checkpoint.
          is_unrolled: Whether layers are `layers_0`, `layers_1` and so on.
        """
        param = self.model.parameters[name]
        num_layers = self.model.config.shape.dimensions.num_layers
        within, layers = self.model.placed(name)
        is_stack = name == _SOURCE_NORM or "layers" in param.logical_axes
        shape = param.shape[1:] if is_stack else param.shape
        if name == _SOURCE_NORM:
            first, later = _SOURCE_NORM_NAMES
            names = [first, *(later.format(layer=i) for i in range(num_layers))]
        elif name.startswith("connections/after/"):
            depth, within = name.removeprefix("connections/after/").split("/", 1)
            names = [_CONNECTION_NAMES[within].format(layer=int(depth) - 1)]
        elif layers is None:
            names = [name if name.startswith("token_embedder/") else f"decoder/{name}"]
        else:
            names = [f"decoder/layers_{i}/{self._layer_name(within)}" for i in layers]
            if _slots_of(within) in _SHARED_SLOTS:
                shape = (*shape[:-1], len(_SHARED_SLOTS), shape[-1])
            if is_stack and not is_unrolled and len(layers) == num_layers:
                path = f"{prefix}decoder/layers/{self._layer_name(within)}"
                shape = (*shape[:_LAYER_AXIS], num_layers, *shape[_LAYER_AXIS:])
                return _ArrayLocation([path], shape, is_scanned=True)
        return _ArrayLocation([prefix + name for name in names], shape, is_stack)

    def _layer_name(self, within: str) -> str:
        """Returns MaxText's name of a parameter within a layer."""
        slots = _SLOT_NAMES.get(_slots_of(within))
        if slots:
            return f"{slots}/{within.rpartition('/')[2]}"
        part, _, name_in_part = within.partition("/")
        return f"{self._layer_names.get(part, part)}/{name_in_part}"

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked; UserError for damage."""
        location = self._locations[name]
        parts = [self._arrays.read(path) for path in location.paths]
        array = np.stack(parts) if location.is_stack else parts[0]
        if location.is_scanned:
            array = np.moveaxis(array, _LAYER_AXIS, 0)
        name_in_layer, _ = self.model.placed(name)
        slots_index = _SHARED_SLOTS.get(_slots_of(name_in_layer))
        if slots_index is not None:
            array = array[..., slots_index, :]
        is_rotary = not _ROTARY.isdisjoint(name.split("/"))
        if self.config.model.position.rope_type == "llama3.1" and is_rotary:
            # MaxText pairs dimensions 2i and 2i + 1, this program i and i + H/2.
            array = np.concatenate([array[..., 0::2], array[..., 1::2]], axis=-1)
        if "/query/" in name and self.query_scaling == "weights":
            # Exact if head_dim is a power of 4, otherwise rounded once.
            factor = math.sqrt(self.model.config.shape.dimensions.head_dim)
            array = (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)
        return np.ascontiguousarray(array, self.formats[name])


def _slots_of(within: str) -> str:
    """Strips /kernel or /bias from a name within a layer, as in _SLOT_NAMES."""
    return within.rpartition("/")[0]


def _check_parts(config: Config, query_scaling: str) -> None:
    """Refuses models that MaxText stores in another way than `MaxTextWeights` reads."""
    model = config.model
    if model.attention.attention_projections == "pattention":
        if query_scaling == "weights":
            raise UserError(
                "query_scaling=weights: TokenFormer's JAX program divides the scores, and queries "
                "from slots have no weights that could hold the factor. Leave query_scaling out."
            )
        if model.position.position_embedding == "rotary":
            raise UserError(
                "position_embedding=rotary: TokenFormer's JAX program has no rotary positions. "
                "Use the configuration that the checkpoint was trained with, for example "
                "decoder_block=tokenformer."
            )
    block = model.block
    centered = model.block.normalization_zero_centered
    if model.embedding.scale_embedding or (centered and block.normalization_type == "rms_norm"):
        raise UserError(
            "MaxText's Gemma blocks cannot be read: their checkpoints hold 1 + scale and the token "
            "table times sqrt(emb_dim), and undoing that would change bits. Start from Gemma's own "
            "folder: from=hf:..."
        )
    if block.normalization_type == "layer_norm" and not centered:
        raise UserError(
            "normalization_zero_centered=false: MaxText's gpt3 block, the one with LayerNorm, "
            "stores scales of norms as their difference from 1. Add "
            "normalization_zero_centered=true."
        )
    if model.position.position_embedding == "rotary" and model.position.rope_type == "yarn":
        raise UserError(
            "rope_type=yarn: MaxText pairs dimensions by its key rope_interleave, which a "
            "checkpoint does not tell. Export it there to Hugging Face, and import the folder."
        )
    dense = model.dense_connections
    if not dense.dense_conn:
        return
    if dense.dense_streams != ("q", "k", "v", "r") or dense.mudd_postnorm == "all":
        raise UserError(
            "MUDDFormer's JAX program has dense connections for q, k, v and r, in this order, and "
            "normalizes only r. Use the configuration that the checkpoint was trained with, for "
            "example decoder_block=muddformer_prepost."
        )
    if block.normalization_layer_epsilon != 1e-6:
        raise UserError(
            f"normalization_layer_epsilon={block.normalization_layer_epsilon:g}: MUDDFormer's JAX "
            "program always uses 1e-6 in the norms of dense connections, and all norms share one "
            "epsilon here."
        )


def _find_items(path: epath.Path, shown_path: str) -> epath.Path:
    """Returns the folder of arrays of a run, its newest checkpoint, a step or its items.

    Args:
      shown_path: The path as the user wrote it, for the message.

    Raises:
      UserError: If there is none.
    """
    for folder in (path, path / "checkpoints"):
        steps = [child for child in list_dir(folder) if child.name.isdigit()]
        for step in (folder, *sorted(steps, key=lambda child: -int(child.name))):
            for items in (step, *(step / name for name in _ITEMS)):
                if any((items / name).exists() for name in ITEMS_FILES):
                    return items
    raise UserError(
        f"from=maxtext:{shown_path}: no checkpoint there. Looked for a run "
        "(<run>/checkpoints/<step>/items), its checkpoints, a step folder, or its items."
    )
