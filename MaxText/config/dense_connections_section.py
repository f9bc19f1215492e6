"""Keys of dense connections: what layers read besides the last output."""

from collections.abc import Iterable
from typing import Any, Literal

from MaxText.config.keys import Count, Natural, Section, key
from MaxText.config.layer_sections import Activation

_DENSE: dict[str, Iterable[Any]] = {"dense_conn": [True]}
_DYNAMIC = _DENSE | {"dense_dynamic": [True]}
Way = Literal["q", "k", "v", "r"]


class DenseConnections(Section):
    """Weighted sums over all earlier hidden states, as the input of a layer.

    MUDDFormer (Xiao et al. 2025, arXiv 2502.12170) and, with fixed weights and one stream,
    DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622).
    """

    ONLY_IF = _DENSE

    dense_conn: bool = key(
        False,
        "Layers read weighted sums of the embedding and of the outputs of all layers before them "
        "(MUDDFormer) instead of the last output alone.",
    )
    dense_ways: tuple[Way, ...] = key(
        ("q", "k", "v", "r"),
        "Inputs of a layer that have a sum of their own: of queries, keys, values and the residual "
        "stream. One that is left out reads the sum of r, or the last output where r is left out, "
        "too.",
    )
    dense_dynamic: bool = key(True, "Weights that depend on the last output, token by token.")
    dense_static: bool = key(True, "Learned weights that are the same everywhere.")
    dense_sources: Literal["all", "dilated", "window", "list"] = key(
        "all",
        "What is summed, besides the last output. dilated: every dense_dilation-th output, counted "
        "back from it. window: the last dense_window outputs and the embedding. list: those of "
        "dense_source_list.",
    )
    dense_dilation: Count = key(
        2, "Outputs from one source to the next.", unit="layers",
        only_if={"dense_sources": ["dilated"]},
    )  # fmt: skip
    dense_window: Count = key(
        8, "Outputs that are summed, besides the embedding.", unit="layers",
        only_if={"dense_sources": ["window"]},
    )  # fmt: skip
    dense_source_list: tuple[int, ...] = key(
        (),
        "0 is the embedding, n the output of the n-th layer; those that are not there yet are left "
        "out.",
        only_if={"dense_sources": ["list"]},
    )
    dense_period: Count = key(
        1, "A sum after every so many layers; the others read the last output.", unit="layers"
    )
    dense_after_layers: tuple[int, ...] | None = key(
        None,
        "Layers, counted from 1, that have a sum after them; null is what dense_period says.",
        only_if={"dense_period": [1]},
    )
    mudd_prenorm: bool = key(
        False, "Add to the last output a sum of normalised outputs, with a learned scale for each."
    )
    mudd_postnorm: Literal["none", "residual", "all"] = key(
        "none",
        "Add to the last output a sum that is normalised, with a learned scale that starts at "
        "0.001: on the way r alone (MUDDFormer's JAX code) or on each way (its paper).",
    )
    dense_activation: Activation = key(
        "gelu",
        "Between the two products that make the weights. gelu as MUDDFormer's JAX code; gelu_erf "
        "as the released models.",
        only_if=_DYNAMIC,
    )
    dense_hidden_rounding: Literal["none", "ceil", "reference"] = key(
        "reference",
        "Hidden width between these products, ways * sources: as it is, or in multiples of 64, "
        "upwards. reference adds 64 where it is one already, as MUDDFormer's code.",
        only_if=_DYNAMIC,
    )
    dense_last_expand: Count = key(
        4, "Multiplies that width after the last layer, where there is one way.", only_if=_DYNAMIC
    )
    dense_first_norms: Literal["one", "each"] = key(
        "each",
        "Norms before the first layer's queries, keys and values, which all read the embedding: "
        "one (the released models) or one each (MUDDFormer's JAX code), as in later layers.",
    )
    dense_mixing: Literal["auto", "sum", "kernel"] = key(
        "auto", "How the sums are computed. No effect on the result."
    )
    dense_kept_sums: Natural = key(
        0,
        "Sums, counted back from the last layer's, whose results are kept for the backward pass "
        "instead of made again. Each takes a hidden state's memory for each way, and spares a read "
        "of its sources (docs/explanation/dense_connections.md). No effect on the result.",
    )

    @property
    def mixes_attention_inputs(self) -> bool:
        """Whether queries, keys or values have an input of their own."""
        return self.dense_conn and any(way in self.dense_ways for way in "qkv")

    @property
    def adds(self) -> bool:
        """Whether sums are added to the last output instead of replacing it."""
        return self.mudd_prenorm or self.mudd_postnorm != "none"

    def stands_after(self, depth: int) -> bool:
        """Returns whether there is an aggregation after `depth` layers."""
        if not self.dense_conn:
            return False
        if self.dense_after_layers is not None:
            return depth in self.dense_after_layers
        return depth % self.dense_period == 0

    def sources(self, depth: int) -> tuple[int, ...]:
        """Returns the sources after `depth` layers: 0 is the embedding, n the output of layer n."""
        if self.dense_sources == "dilated":
            chosen = set(range(depth, -1, -self.dense_dilation))
        elif self.dense_sources == "window":
            chosen = {0, *range(max(depth + 1 - self.dense_window, 0), depth + 1)}
        elif self.dense_sources == "list":
            chosen = {source for source in self.dense_source_list if source <= depth}
        else:
            chosen = set(range(depth + 1))
        return tuple(sorted(chosen | {depth}))
