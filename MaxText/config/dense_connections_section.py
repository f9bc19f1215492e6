"""Keys of dense connections."""

from typing import Literal

from MaxText.config.keys import Count, Natural, Options, Section, key, options
from MaxText.config.layer_sections import Activation

_DENSE = {"dense_conn": True}
_DYNAMIC = _DENSE | {"dense_dynamic": True}
Way = Literal["q", "k", "v", "r"]


class DenseSelection(Options):
    """Numbers of dense_sparsity."""

    dilation: Count = key(2, unit="layers", only_if={"dense_sparsity": "dilated"})
    """Distance between summed outputs."""
    window: Count = key(8, unit="layers", only_if={"dense_sparsity": "window"})
    """Number of summed outputs besides the embedding."""
    outputs: tuple[int, ...] = key((), only_if={"dense_sparsity": "list"})
    """Summed outputs: 0 is the embedding, n the output of the n-th layer. Outputs of later layers
    are skipped."""


class DenseConfig(Section):
    """Weighted sums of all previous hidden states as layer inputs.

    MUDDFormer (Xiao et al. 2025, arXiv 2502.12170) and, with fixed weights and one stream,
    DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622).
    """

    ONLY_IF = _DENSE

    dense_conn: bool = key(False)
    """Dense connections (MUDDFormer): layers read weighted sums of the embedding and all previous
    layer outputs instead of the last output alone."""
    dense_streams: tuple[Way, ...] = key(("q", "k", "v", "r"))
    """Streams with their own depth-wise sum: any of q, k, v, r. A missing stream uses the sum of r,
    or the last output if r is missing."""
    dense_dynamic: bool = key(True, "Weights that depend on the last output, token by token.")
    dense_static: bool = key(True, "Learned weights that are the same for all tokens.")
    dense_sparsity: Literal["all", "dilated", "window", "list"] = key("all")
    """Outputs that are summed besides the last one. dilated: every dilation-th, counted back from
    it. window: the last outputs and the embedding. list: those of dense_selection."""
    dense_selection: DenseSelection = options(DenseSelection)
    dense_period: Count = key(1, unit="layers")
    """Layers from one sum to the next; other layers read the last output."""
    dense_target_layers: tuple[int, ...] | None = key(None, only_if={"dense_period": 1})
    """Layers, counted from 1, that are followed by a sum; null follows dense_period."""
    mudd_prenorm: bool = key(False)
    """Add a sum of normalized outputs, each with a learned scale, to the last output."""
    mudd_postnorm: Literal["none", "residual", "all"] = key("none")
    """Add a normalized sum, with a learned scale that starts at 0.001, to the last output: on
    stream r only (MUDDFormer's JAX code) or on all streams (its paper)."""
    dynamic_dense_act_cls: Activation = key("gelu", only_if=_DYNAMIC)
    """Activation between the two matmuls that compute dynamic weights. gelu as in MUDDFormer's JAX
    code; gelu_erf as in the released models."""
    dynamic_dense_hidden_round: Literal["none", "ceil", "reference"] = key(
        "reference", only_if=_DYNAMIC
    )
    """Hidden width of dynamic weights, streams * sources: unchanged, or rounded up to a multiple of
    64. reference always adds 64 to a multiple of 64, as MUDDFormer's code does."""
    dynamic_dense_last_layer_expand: Count = key(4, only_if=_DYNAMIC)
    """Factor of that width after the last layer, which has one stream."""
    dense_first_layer_norms: Literal["one", "each"] = key("each")
    """Norms of the first layer's queries, keys and values, which all read the embedding: one (the
    released models), or one each as in later layers (MUDDFormer's JAX code)."""
    dense_aggregation_impl: Literal["auto", "sum", "kernel"] = key("auto")
    """Implementation of the sums. Does not change the result."""
    dense_saved_aggregates: Natural = key(0)
    """Sums, counted back from the last layer's, whose results are saved for the backward pass
    instead of recomputed. Each takes a hidden state's memory for each way, and spares a read of its
    sources (docs/explanation/dense_connections.md). No effect on the result."""

    @property
    def mixes_attention_inputs(self) -> bool:
        """Whether queries, keys or values have separate inputs."""
        return self.dense_conn and any(way in self.dense_streams for way in "qkv")

    @property
    def adds(self) -> bool:
        """Whether sums are added to the last output instead of replacing it."""
        return self.mudd_prenorm or self.mudd_postnorm != "none"

    def stands_after(self, depth: int) -> bool:
        if not self.dense_conn:
            return False
        if self.dense_target_layers is not None:
            return depth in self.dense_target_layers
        return depth % self.dense_period == 0

    def sources(self, depth: int) -> tuple[int, ...]:
        """Returns the sources after `depth` layers: 0 is the embedding."""
        if self.dense_sparsity == "dilated":
            chosen = set(range(depth, -1, -self.dense_selection.dilation))
        elif self.dense_sparsity == "window":
            chosen = {0, *range(max(depth + 1 - self.dense_selection.window, 0), depth + 1)}
        elif self.dense_sparsity == "list":
            chosen = {source for source in self.dense_selection.outputs if source <= depth}
        else:
            chosen = set(range(depth + 1))
        return tuple(sorted(chosen | {depth}))
