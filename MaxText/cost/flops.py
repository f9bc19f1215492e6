"""FLOPs per token, by formula, of the parts of a model; its cost table.

Counted: matmuls, 2 FLOPs per multiply-add. Lookups, norms, biases, rotary positions, softmax and
activation functions are not. Per token and over all layers, forward:

    query, key, value    2 L D H (N + 2 K)
    attention scores     2 L N H S             q k^T
    attention values     2 L N H S             probabilities times v
    attention gate       2 L D N H             with attention_output_gate
    attention output     2 L N H D
    feed-forward         2 L (A + 1) D F       A activations: 1 is plain, 2 is gated
    experts              2 L (A + 1) D F k     of k experts that a token visits
    router               2 L D E               with E experts
    dense connections    2 sum_i K_i (D + C_i S_i)
    depth aggregation    2 D sum_i C_i S_i     C_i streams, each a sum of S_i hidden states
    head                 2 D V                 tied or not

    Pattention, of n slots in projections and m in the feed-forward:
    query, key, value    2 L n (3 D + N H + 2 K H)
    attention output     2 L n (N H + D)
    feed-forward         4 L D m

Other mixers, heads and connections declare their FLOPs (`flops` of layers/part.py). Training takes
3 times as many: forward, and backward with respect to inputs and to weights.

S, the keys of a query, has two definitions: by the MFU rule (`average_keys_visible`), T without a
mask, (T+1)/2 under a causal mask (MaxText's rule: T/2), W - W^2/(2T) with a window of W tokens; and
as executed by the backend (`average_keys_computed`), masked products included. Executed FLOPs also
count rematerialization, unfilled expert capacity, and every expert on backends without ragged
matmuls (CPU, and GPU by default).

Legend: T tokens of a sequence, L layers, D emb_dim, N query heads, K key/value heads, H head_dim, F
mlp_dim, V vocab_size.
"""

import collections
import dataclasses
import functools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import lookup
from MaxText.formatting import WIDTH, byte_count, derived_quantities, format_table, share
from MaxText.layers.assembly.block_variants import block_class, mixer_class
from MaxText.layers.assembly.model import Model
from MaxText.layers.feed_forward.moe import expert_capacity
from MaxText.layers.head import head_and_layer
from MaxText.layers.part import Flops, Part
from MaxText.parallelism.logical_sharding import OBJECTIVE_LAYERS, ParamSpec
from MaxText.training.model_objective import objective_class, objective_config, own_layers
from MaxText.training.objective import abstract_loss_sums
from MaxText.value_types import PyTree

_TOKEN_TABLE = "token_embedder/embedding"
_AGGREGATION = "depth aggregation"
# Table rows in forward order. Token mixing and feed-forward declared by parts come between the two,
# rows of registered parts only come last.
_BEGINNING = ("token embedding", "position embedding", "query, key, value", "memories")
_END = (
    "attention gate",
    "attention output",
    "router",
    "feed-forward",
    "gates",
    "dense connections",
    _AGGREGATION,
    "norms",
    "head",
    "Head-QK",
)
MFU_RULE = (
    "MFU is the model's FLOP/s divided by the device's peak (PaLM, appendix B). It counts matmuls "
    "only, forward and backward, without recomputation; causal attention counts half (MaxText's "
    "rule; PaLM counts all of it)."
)


@dataclasses.dataclass(frozen=True)
class PartFlops:
    """A row of the table: a part of the model, over all layers.

    FLOPs are those of the forward pass, per token.
    """

    name: str
    parameters: int  # with biases; a tied head has none
    flops: float  # by the MFU rule
    hardware_flops: float  # by the backend
    backward: int = 2  # backward FLOPs per forward FLOP
    between_tokens: bool = False  # whether tokens are multiplied with tokens or with a state
    of_objective: bool = False  # whether an objective declares it: frozen models, further heads

    @property
    def training(self) -> float:
        """FLOPs per token of forward and backward pass, by the MFU rule."""
        return (1 + self.backward) * self.flops


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs per token, by part."""

    sequence_length: int
    parts: tuple[PartFlops, ...]
    recomputed: float | None  # repeated in the backward pass (remat); None if unknown

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass, by the MFU rule."""
        return sum(part.flops for part in self.parts)

    @property
    def per_token(self) -> float:
        """Training FLOPs by the MFU rule."""
        return sum(part.training for part in self.parts)

    @property
    def weights(self) -> float:
        """Training FLOPs between tokens and weights."""
        return sum(
            part.training
            for part in self.parts
            if not part.between_tokens and not part.of_objective and part.name != _AGGREGATION
        )

    @property
    def attention(self) -> float:
        """Training FLOPs between tokens and tokens."""
        return sum(part.training for part in self.parts if part.between_tokens)

    @property
    def aggregation(self) -> float:
        """Training FLOPs of sums over the outputs of earlier layers."""
        return 3 * sum(part.flops for part in self.parts if part.name == _AGGREGATION)

    @property
    def objective(self) -> float:
        """Training FLOPs that the objective declares, besides those of its weights."""
        return sum(part.training for part in self.parts if part.of_objective)

    @property
    def matmul_parameters(self) -> int:
        """Weights multiplied with a token; a tied table counts as the head."""
        return int(self.weights) // 6

    @property
    def executed_per_token(self) -> float | None:
        """Training FLOPs that the backend executes, with remat; None if unknown."""
        if self.recomputed is None:
            return None
        executed = sum((1 + part.backward) * part.hardware_flops for part in self.parts)
        return executed + self.recomputed

    def tflops(self, num_tokens: float) -> float:
        """Returns the training TFLOPs of `num_tokens` tokens, by the MFU rule."""
        return self.per_token * num_tokens / 1e12

    def line(self, num_tokens: float) -> str:
        """Returns MaxText's line for a step of this many tokens per device."""
        weights = 100 * self.weights / self.per_token
        aggregation = 100 * self.aggregation / self.per_token
        objective = 100 * self.objective / self.per_token
        attention = 100 - weights - aggregation - objective
        line = (
            f"Per train step: Total TFLOPs: {self.tflops(num_tokens):.2f} split as {weights:.2f}% "
            f"learnable weight flops and {attention:.2f}% attention flops"
        )
        if aggregation:
            line += f", and {aggregation:.2f}% depth aggregation"
        if objective:
            line += f", and {objective:.2f}% objective"
        return line


def count_flops(model: Model, sequence_length: int) -> FlopCount:
    """Counts FLOPs per token from abstract parameters: 2 per weight of each matmul.

    Args:
        model: its parameters may be abstract.
        sequence_length: T, on which products between tokens depend.
    """
    entries = list(_entries(model, sequence_length))
    entries += _further_head_passes(model, entries)
    parameters_by_row: collections.Counter[str] = collections.Counter()
    for spec in model.parameters.values():
        parameters_by_row[spec.row] += spec.size
    flops_by_row: dict[str, list[Flops]] = {}
    for entry in entries:
        flops_by_row.setdefault(entry.row, []).append(entry.flops)
    declared_entries = [entry for entry in entries if entry.is_declared]
    declared_rows = [entry.row for entry in declared_entries]
    objective_rows = [entry.row for entry in declared_entries if entry.owner == "objective"]
    layer_rows = [entry.row for entry in declared_entries if entry.owner == "layers"]
    row_names = [*_BEGINNING, *layer_rows, *_END, *declared_rows, *parameters_by_row]
    parts = []
    for name in dict.fromkeys(row_names):
        row_flops = flops_by_row.get(name, [])
        if row_flops or parameters_by_row[name]:
            part = PartFlops(
                name=name,
                parameters=parameters_by_row[name],
                flops=sum(flops.by_rule for flops in row_flops),
                hardware_flops=sum(flops.hardware_flops or 0 for flops in row_flops),
                backward=row_flops[-1].backward if row_flops else 2,
                between_tokens=name in declared_rows
                and name not in objective_rows
                and name != _AGGREGATION,
                of_objective=name in objective_rows,
            )
            parts.append(part)
    return FlopCount(sequence_length, tuple(parts), _recomputed(model.config, entries))


class _WeightFlops(NamedTuple):
    """Forward FLOPs per token of one weight, or declared by a part."""

    owner: str
    row: str
    flops: Flops  # `hardware_flops` is never None
    is_declared: bool = True


def _entries(model: Model, length: int) -> Iterator[_WeightFlops]:
    """Yields the FLOPs of each weight, then those that parts declare."""
    config = model.config
    for name, spec in model.parameters.items():
        if spec.num_input_dims:
            by_rule, executed = _of_weights(model, name, spec, length)
            flops = Flops(by_rule, executed, kept=0 if spec.is_recomputed else executed)
            yield _WeightFlops(spec.owner, spec.row, flops, is_declared=False)
    head, head_layer = head_and_layer(config)
    if head.reads_table(head.config_of(head_layer)):
        table = 2 * model.parameters[_TOKEN_TABLE].size
        yield _WeightFlops("head", "head", Flops(table, table), is_declared=False)
    for row in ("attention scores", "attention values"):
        yield _WeightFlops("layers", row, Flops(0.0, 0.0))
    for layer in (*config.layers, *own_layers(config)):
        feed_forward = lookup("feed_forward", layer.config.feed_forward.feed_forward_type)
        for branch, part in (("self_attention", mixer_class(layer)), ("mlp", feed_forward)):
            is_last = branch in block_class(layer).not_recomputed
            for entry in _declared("layers", part, layer, length):
                if is_last and not entry.flops.backward:
                    # Without a gradient, nothing is needed again.
                    not_recomputed = entry.flops._replace(kept=entry.flops.hardware_flops or 0.0)
                    entry = entry._replace(flops=not_recomputed)
                yield entry
    yield from _declared("connections", lookup("connection", config.connection), head_layer, length)
    yield from _declared("head", head, head_layer, length)
    objective = objective_class(config)
    if objective is not None:
        yield from _declared("objective", objective, head_layer, length)


def _further_head_passes(model: Model, entries: Sequence[_WeightFlops]) -> Iterator[_WeightFlops]:
    """Yields the FLOPs of the passes of the head that an objective causes besides the first one.

    They are those that it declares, and one more for a cross entropy that is reported and not
    minimized, which has no backward pass, and which the MFU rule does not count.
    """
    objective = objective_class(model.config)
    if objective is None:
        return
    of_head = [entry.flops for entry in entries if entry.owner == "head"]
    by_rule = sum(flops.by_rule for flops in of_head)
    executed = sum(flops.hardware_flops or 0.0 for flops in of_head)
    repeated = executed - sum(flops.kept for flops in of_head)
    if num_passes := objective.num_head_passes(objective_config(model.config)):
        in_chunks = model.config.objective.num_vocab_tiling > 1
        flops = Flops(
            by_rule=num_passes * by_rule,
            hardware_flops=num_passes * executed,
            recomputed=num_passes * repeated if in_chunks else 0.0,
        )
        yield _WeightFlops("objective", "further heads", flops)
    if abstract_loss_sums(model).nats is not None:
        flops = Flops(by_rule=0.0, hardware_flops=executed, backward=0)
        yield _WeightFlops("objective", "lm_loss", flops)


def _declared(
    owner: str, part: type[Part] | None, layer: LayerConfig, length: int
) -> Iterator[_WeightFlops]:
    if part is None:
        return
    for row, flops in part.flops(part.config_of(layer), layer.dimensions, length).items():
        executed = flops.by_rule if flops.hardware_flops is None else flops.hardware_flops
        yield _WeightFlops(owner, row, flops._replace(hardware_flops=executed))


def _of_weights(model: Model, name: str, spec: ParamSpec, length: int) -> tuple[float, float]:
    """Returns forward FLOPs per token of a weight: by the MFU rule, and executed."""
    config = model.config
    times = 1
    if config.block.share_layer_params and spec.owner == "layers":
        times = config.shape.dimensions.num_layers
    dense_flops = 2 * times * spec.size
    layer = model.layer_of(name)
    if spec.owner == OBJECTIVE_LAYERS:
        layer = next(iter(own_layers(config)), None)
    if "exp" not in spec.logical_axes or layer is None:
        return dense_flops, dense_flops
    experts = layer.config.mixture_of_experts
    visited_flops = dense_flops * experts.num_experts_per_tok / experts.num_experts
    if experts.capacity_factor < 0:
        return visited_flops, visited_flops
    group, capacity = expert_capacity(experts, length, experts.capacity_factor)
    return visited_flops, dense_flops * capacity / group


def _recomputed(config: ModelConfig, entries: Sequence[_WeightFlops]) -> float | None:
    """Returns FLOPs per token that remat repeats; None for policies that save some names."""
    policy = config.memory.remat_policy
    if policy not in ("none", "full"):
        return None
    owners = ("layers", "connections", OBJECTIVE_LAYERS) if policy == "full" else ()
    if config.objective.num_vocab_tiling > 1:
        owners += ("head", "objective")
    recomputed_flops = 0.0
    for entry in entries:
        recomputed_flops += entry.flops.recomputed
        if entry.owner == "objective" and entry.is_declared:
            continue  # an objective says itself what is recomputed, besides its weights
        if entry.owner in owners:
            recomputed_flops += (entry.flops.hardware_flops or 0.0) - entry.flops.kept
    return None if math.isnan(recomputed_flops) else recomputed_flops


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """The cost table of a model, in bytes of all devices together."""

    model: Model
    count: FlopCount
    optimizer_bytes: int | None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters in their own dtypes."""
        return sum(spec.size * spec.dtype.itemsize for spec in self.model.parameters.values())

    @property
    def training_bytes(self) -> int:
        """Parameters, gradients in the same dtypes, and optimizer state."""
        return 2 * self.parameter_bytes + (self.optimizer_bytes or 0)

    @functools.cached_property
    def _states(self) -> list[tuple[int, int]]:
        """Decode state bytes per token and per sequence, by layer, then the head.

        Zero for a bidirectional model: every new token changes all keys and values.
        """
        config = self.model.config
        length = self.count.sequence_length
        if not config.attention.causal:
            return [(0, 0)]
        itemsize = jnp.dtype(config.numerics.dtype).itemsize
        parts = [(mixer_class(layer), layer) for layer in config.layers]
        return [
            part.state_bytes(part.config_of(layer), layer.dimensions, length, itemsize)
            if part is not None
            else (0, 0)
            for part, layer in [*parts, head_and_layer(config)]
        ]

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """Decode state bytes that grow with each token, over all layers."""
        return sum(of_token for of_token, _ in self._states)

    @property
    def kv_cache_bytes(self) -> int:
        """Decode state bytes of one sequence of `sequence_length` tokens."""
        fixed = sum(fixed for _, fixed in self._states)
        return self.kv_cache_bytes_per_token * self.count.sequence_length + fixed

    def fields(self) -> dict[str, Any]:
        """Returns JSON values for the events of a run; FLOPs by the MFU rule."""
        count = self.count
        return {
            "mfu_rule": MFU_RULE,
            "sequence_length": count.sequence_length,
            "parts": [
                {
                    "name": part.name,
                    "parameters": part.parameters,
                    "forward_flops_per_token": part.flops,
                    "flops_per_token": part.training,
                }
                for part in count.parts
            ],
            "parameters": self.model.num_parameters,
            "forward_flops_per_token": count.forward,
            "flops_per_token": count.per_token,
            "executed_flops_per_token": count.executed_per_token,
            "bytes": {
                "parameters": self.parameter_bytes,
                "optimizer": self.optimizer_bytes,
                "gradients": self.parameter_bytes,
            },
            "kv_cache_bytes_per_token": self.kv_cache_bytes_per_token,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def describe(self) -> str:
        """Returns the table of parameters and FLOPs by part, and derived quantities."""
        count = self.count
        num_parameters = self.model.num_parameters
        is_tied = self.model.config.head.logits_via_embedding

        def row(name: str, parameters: int, flops: float, training: float) -> list[str]:
            parameter_cells = [f"{parameters:,}", share(parameters, num_parameters)]
            if is_tied and name == "head":
                parameter_cells = ["tied", ""]
            forward_share = share(flops, count.forward)
            return [name, *parameter_cells, f"{flops:,.0f}", f"{training:,.0f}", forward_share]

        rows = [row(part.name, part.parameters, part.flops, part.training) for part in count.parts]
        table = format_table(
            ["part", "parameters", "share", "FLOPs/token forward", "training", "share"],
            rows,
            row("total", num_parameters, count.forward, count.per_token),
            right=range(1, 6),
        )
        rule = textwrap.fill(MFU_RULE, WIDTH, subsequent_indent="    ")
        return "\n".join([table, rule, derived_quantities(self._totals())])

    def _totals(self) -> Iterator[tuple[str, str, str, Any]]:
        """Yields the rows below the table, as `derived_quantities` takes them."""
        count = self.count
        config = self.model.config
        if count.executed_per_token is not None:
            keys = f"remat_policy={config.memory.remat_policy}"
            if config.objective.num_vocab_tiling > 1:
                keys += f", num_vocab_tiling={config.objective.num_vocab_tiling}"
            yield f"executed FLOPs/token in training ({keys})", "", "", count.executed_per_token
        state = "" if self.optimizer_bytes is None else ", optimizer state"
        name = f"memory of parameters, gradients{state} (no activations)"
        yield name, "", "", byte_count(self.training_bytes)
        if not config.attention.causal:
            yield "KV cache", "", "", "none, attention is not causal"
            return
        yield "KV cache of a token", "", "", byte_count(self.kv_cache_bytes_per_token)
        name = f"KV cache of {count.sequence_length:,} tokens"
        yield name, "", "", byte_count(self.kv_cache_bytes)


def model_cost(
    model: Model, *, sequence_length: int, optimizer_state: PyTree | None = None
) -> ModelCost:
    """Returns the cost table of a model.

    Args:
        model: its parameters may be abstract.
        sequence_length: T, of the FLOPs and the KV cache.
        optimizer_state: arrays or their shapes; None leaves the optimizer out.
    """
    optimizer_bytes = None
    if optimizer_state is not None:
        leaves = jax.tree.leaves(optimizer_state)
        optimizer_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return ModelCost(model, count_flops(model, sequence_length), optimizer_bytes)
