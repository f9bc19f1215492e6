"""How many floating point operations a token needs, by formula, for every part of a model.

Counted: products of matrices, 2 operations per multiply-add. Looking up tables, norms, biases,
rotary positions, softmax and activation functions do not count. Per token and over all layers,
forward:

    token embedding      0                     looked up
    position embedding   0                     looked up
    query, key, value    2 L D H (N + 2 K)
    attention scores     2 L N H S             q k^T
    attention values     2 L N H S             probabilities times v
    attention output     2 L N H D
    feed-forward         2 L (A + 1) D F       A activations: 1 is plain, 2 is gated
    dense connections    2 sum_i K_i (D + C_i S_i)
    sums over depth      2 D sum_i C_i S_i     C_i ways, each a sum of S_i hidden states
    norms                0
    head                 2 D V                 tied or not

Layers of linear attention and of none, experts, Head-QK and static SGU differ from these rows:

    linear attention     2 H^2 (K + N)         per layer, in place of scores and values
    experts              2 (A + 1) D F k       per layer, of k experts that a token visits
    router               2 D E                 per layer with E experts
    Head-QK              4 D I + 2 I S         I head_qk_dim
    static SGU           D S                   per layer, S of a window; no gradient: training is
                                               forward alone

Weights that all layers share are multiplied L times.

With Pattention these depend on the slots, n of the projections and m of the feed-forward. Where
N H = K H = D and m = 4 n, a layer has 16 D n weights.

    query, key, value    2 L n (3 D + N H + 2 K H)
    attention output     2 L n (N H + D)
    feed-forward         4 L D m

Dense connections (MUDDFormer) make C_i S_i weights after layer i by two products with K_i hidden
units between, none where the weights are fixed. Their sums are counted as the products of weights
with hidden states that they are, as probabilities times v are, in whichever form they are
computed. MUDDFormer's paper (Xiao et al. 2025) counts the same, but for the second product and the
rounding of K_i: (L + 3) / D / (3 + T / 4 D) of the layers' own operations.

Training takes 3 times as many: forward, and backward with respect to inputs and to weights. With
P weights that a token is multiplied with, that is 6 P + 12 L N H S, and 6 D sum_i C_i S_i.

S, the keys that a query counts, has two readings:

- by the rule of MFU (`keys_by_rule`): T without a mask, T/2 under a causal mask (MaxText's rule;
  exactly (T+1)/2), W - W^2/(2T) under a causal mask with a window of W tokens; and M more where
  there are M learned keys;
- as the backend computes it (`keys_multiplied`), masked products included.

Experts with a capacity execute every place they have, filled or not. Without one the count is of
the rows that tokens have; a backend that has no products of ragged rows (CPU, and GPU as JAX is set
by default) multiplies each row with every expert. Linear attention executes the squares of its
chunks as well.

`FlopCount.per_token` goes by the rule, `FlopCount.executed_per_token` by what is computed, with
what rematerialisation computes again. tests/monitoring/test_flops.py holds the latter against
XLA's own count, within 5 %, and against the products of the traced program, exactly.

Legend: T tokens of a sequence, L layers, D emb_dim, N query heads, K key/value heads, H head_dim,
F mlp_dim, V vocab_size.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from MaxText.configuration.layer_sections import Attention, AttentionKind
from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.layers import flash_attention
from MaxText.layers.attention_core import MAX_BLOCKS, window_blocks
from MaxText.layers.flash_attention import TILE
from MaxText.layers.mixture_of_experts import places
from MaxText.layers.model import Model
from MaxText.layers.static_sgu import sgu_blocks
from MaxText.layers.weights import ParameterInfo

_TOKEN_TABLE = "token_embedder/embedding"
_SGU, _POINTING = "static SGU", "Head-QK scores"
_BETWEEN_TOKENS = ("attention scores", "attention values", _SGU, _POINTING)
_DEPTH_SUMS = "sums over depth"
# Parts in the order of the forward pass, and how the names of their parameters look; attention
# between tokens and sums over depth have none. A parameter that no row knows is a part with the
# name of its folder, which comes last, so a new part is counted whether or not it has a row.
_PARTS: tuple[tuple[str, str | None], ...] = (
    ("token embedding", r"^token_embedder/"),
    ("position embedding", r"^position_embedder/"),
    ("query, key, value", r"/self_attention/(query|key|value)/"),
    ("memories", r"/self_attention/memory_(key|value)$"),
    *((name, None) for name in _BETWEEN_TOKENS[:3]),
    ("attention output", r"/self_attention/out/"),
    ("router", r"/mlp/gate/"),
    ("feed-forward", r"/(macaron_)?mlp/"),
    ("gates", r"_gate/scale$"),
    ("dense connections", r"^connections/"),
    (_DEPTH_SUMS, None),
    ("norms", r"norm(_[qkv])?/"),
    ("head", r"^logits_dense/"),
    ("Head-QK", r"^head_qk/"),
    (_POINTING, None),
)
# Products whose results only the residual stream takes: nothing in the backward pass of their
# layer reads them, so remat_policy=full does not compute them again. Gates read them all.
_NOT_AGAIN = {
    "sequential": r"/mlp/(wo|values)/",
    "parallel": r"/mlp/(wo|values)/|/self_attention/out/(kernel|values)",
}
# Whose products every policy keeps (layers/connections.py).
_KEPT = r"connections/after/\d+/wi/kernel"


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the model, over all layers.

    Attributes:
      name: a row of the table above, or the folder of its parameters.
      parameters: numbers it holds, biases included. A tied head holds none.
      flops: forward operations per token, by the rule of MFU.
      executed: forward operations per token, as the backend computes them.
      backward: operations of the backward pass for each forward one.
    """

    name: str
    parameters: int
    flops: float
    executed: float
    backward: int = 2

    @property
    def training(self) -> float:
        """Operations of training, by the rule of MFU."""
        return (1 + self.backward) * self.flops


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Operations on one token, part by part.

    Attributes:
      sequence_length: tokens of a sequence.
      parts: in the order of the forward pass.
      recomputed: forward operations per token that the backward pass executes again; None where
        that is not known (remat policies between none and full, dense_kept_sums).
    """

    sequence_length: int
    parts: tuple[Part, ...]
    recomputed: float | None

    @property
    def forward(self) -> float:
        """Operations of the forward pass."""
        return sum(part.flops for part in self.parts)

    @property
    def per_token(self) -> float:
        """Operations of training, by the rule of MFU."""
        return sum(part.training for part in self.parts)

    @property
    def weights(self) -> float:
        """Operations of training that multiply tokens with weights."""
        others = (*_BETWEEN_TOKENS, _DEPTH_SUMS)
        return sum(part.training for part in self.parts if part.name not in others)

    @property
    def attention(self) -> float:
        """Operations of training that multiply tokens with tokens."""
        return sum(part.training for part in self.parts if part.name in _BETWEEN_TOKENS)

    @property
    def depth_sums(self) -> float:
        """Operations of training that sum hidden states over depth."""
        return 3 * sum(part.flops for part in self.parts if part.name == _DEPTH_SUMS)

    @property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied with; a tied table counts as the head."""
        return int(self.weights) // 6

    @property
    def executed_forward(self) -> float:
        """Operations of the forward pass as the backend computes them."""
        return sum(part.executed for part in self.parts)

    @property
    def executed_per_token(self) -> float | None:
        """Operations of training as they are executed; None where that is not known."""
        if self.recomputed is None:
            return None
        return sum((1 + part.backward) * part.executed for part in self.parts) + self.recomputed

    def tflops(self, num_tokens: float) -> float:
        """1e12 operations of training on this many tokens."""
        return self.per_token * num_tokens / 1e12

    def line(self, num_tokens: float) -> str:
        """MaxText's line for a step of this many tokens on a device."""
        weights, sums = (100 * flops / self.per_token for flops in (self.weights, self.depth_sums))
        return (
            f"Per train step: Total TFLOPs: {self.tflops(num_tokens):.2f} split as {weights:.2f}% "
            f"learnable weight flops and {100 - weights - sums:.2f}% attention flops"
        ) + (f", and {sums:.2f}% sums over depth" if sums else "")


def count_flops(model: Model, sequence_length: int) -> FlopCount:
    """Counts a model from its abstract parameters.

    Every parameter marked as a matrix of a product (`num_in_dims`) takes 2 operations per weight.

    Args:
      sequence_length: tokens of a sequence.
    """
    section = model.section
    held: collections.Counter[str] = collections.Counter()
    products: collections.Counter[str] = collections.Counter()
    executed: collections.Counter[str] = collections.Counter()
    for name, info in model.parameters.items():
        part = _part_of(name)
        held[part] += info.size
        if info.num_in_dims:
            by_rule, computed = _of_weights(section, name, info, sequence_length)
            products[part] += by_rule  # type: ignore[assignment]
            executed[part] += computed  # type: ignore[assignment]
    if section.head.logits_via_embedding:
        table = 2 * model.parameters[_TOKEN_TABLE].size
        products["head"] += table
        executed["head"] += table
    between = _between_tokens(section, sequence_length)
    sums = float(sum(_depth_sums(model).values()))
    parts = []
    for name in dict.fromkeys([*(name for name, _ in _PARTS), *held]):
        if name in between:
            backward = 0 if name == _SGU else 2
            parts.append(Part(name, 0, *between[name], backward))
        elif name == _DEPTH_SUMS:
            parts += [Part(name, 0, sums, sums)] if sums else []
        elif held[name] or products[name]:
            parts.append(Part(name, held[name], products[name], executed[name]))
    return FlopCount(sequence_length, tuple(parts), _recomputed(model, parts, sequence_length))


def _of_weights(
    section: ModelSection, name: str, info: ParameterInfo, length: int
) -> tuple[float, float]:
    """Forward operations on a token of one matrix of all layers: by the rule, and executed."""
    times = 1
    if section.block.share_parameters and name.startswith("layers/"):
        times = section.shape.dimensions.num_layers
    whole = 2 * times * info.size
    experts = section.mixture_of_experts
    if "/experts/" not in name:
        return whole, whole
    visited = whole * experts.num_experts_per_tok / experts.num_experts
    if experts.capacity_factor < 0:
        return visited, visited
    group, capacity = places(experts, length, experts.capacity_factor)
    return visited, whole * capacity / group


def _between_tokens(section: ModelSection, length: int) -> dict[str, tuple[float, float]]:
    """Part -> forward operations on a token over all layers: by the rule, and executed."""
    d, attention = section.shape.dimensions, section.attention
    per_key = 2 * d.num_query_heads * d.head_dim
    scores, values = (0.0, 0.0), (0.0, 0.0)
    for kind in section.attention_kinds:
        if kind == "none":
            continue
        if kind == "linear":
            more = _linear(section, length)
        else:
            window = attention.sliding_window_size if kind == "local" else None
            memories = attention.num_mem_kv if kind == "global" else 0
            keys = keys_by_rule(length, causal=attention.causal, window=window) + memories
            multiplied = keys_multiplied(attention, length, kind) + memories
            more = ((per_key * keys, per_key * multiplied),) * 2
        scores = (scores[0] + more[0][0], scores[1] + more[0][1])
        values = (values[0] + more[1][0], values[1] + more[1][1])
    found = {"attention scores": scores, "attention values": values}
    if attention.static_sgu:
        kernel = attention.static_sgu_kernel
        rows, num_blocks = sgu_blocks(kernel, length)
        layers = sum(kind != "none" for kind in section.attention_kinds)
        found[_SGU] = (
            layers * d.emb_dim * keys_by_rule(length, causal=True, window=kernel + 1),
            layers * d.emb_dim * num_blocks * rows * (kernel + rows) / length,
        )
    if section.head.head_qk:
        width = 2 * section.head.head_qk_dim
        found[_POINTING] = (width * keys_by_rule(length, causal=True), float(width * length))
    return found


def _linear(section: ModelSection, length: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """What a layer of linear attention has in place of scores and values.

    By the rule a token is added to the state, k v^T, and reads it, q S. Executed are the chunks'
    squares and the sum of keys as well.
    """
    d = section.shape.dimensions
    N, K, H = d.num_query_heads, d.num_kv_heads, d.head_dim
    adds, reads = 2.0 * K * H * H, 2.0 * N * H * H
    if not section.attention.causal:
        return (adds, adds), (reads, reads)
    chunk = min(section.attention.linear_attention_chunk, length)
    filled = -(-length // chunk) * chunk / length
    square, counts = 2.0 * N * H * chunk, 2.0 * N * H
    return (adds, filled * (square + counts + adds)), (reads, filled * (square + reads))


def keys_by_rule(length: int, *, causal: bool, window: int | None = None) -> float:
    """Keys that a query counts on average, by the rule of MFU.

    Args:
      length: T, tokens of a sequence.
      causal: whether a token sees only earlier ones.
      window: keys a query may see, itself included; None is all of them.
    """
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def keys_multiplied(section: Attention, length: int, kind: AttentionKind = "global") -> float:
    """Keys that a query is multiplied with on average, those masked afterwards included.

    attention=dot_product multiplies the whole square, flash the blocks that its kernel on TPU does
    not skip. The others take query rows in blocks, each
    with the keys up to its last row; without a causal mask that is the whole square, too. With a
    window, blocks are about as long as it is, each with those beside it.

    Args:
      kind: global or local.
    """
    if section.attention == "flash" and length % TILE == 0:
        window = section.sliding_window_size if kind == "local" else None
        return flash_attention.keys_multiplied(length, causal=section.causal, window=window)
    if kind == "local":
        rows = window_blocks(section.sliding_window_size, length, causal=section.causal)
        if rows is None:
            return float(length)
        return -(-length // rows) * rows * rows * (2 if section.causal else 3) / length
    block = query_block(section, length)
    ends = ((start, min(start + block, length)) for start in range(0, length, block))
    return sum((end - start) * end for start, end in ends) / length


def query_block(section: Attention, length: int) -> int:
    """Query rows that are multiplied at once, as attention_core.softmax_attention chooses them."""
    if section.attention == "dot_product" or not section.causal:
        return length
    return min(max(section.attention_block_size, -(-length // MAX_BLOCKS)), length)


def _part_of(name: str) -> str:
    for part, pattern in _PARTS:
        if pattern is not None and re.search(pattern, name):
            return part
    return re.sub(r"^layers/(\d+/)?", "", name.rpartition("/")[0])


def _depth_sums(model: Model) -> dict[int, int]:
    """Number of layers before a sum over depth -> its forward operations on a token, 2 C S D."""
    sizes = {}
    for name, info in model.parameters.items():
        # One of the two may be missing; both end in [C, S].
        if match := re.match(r"connections/after/(\d+)/(static|wo/kernel)$", name):
            sizes[int(match[1])] = info.shape[-2:]
    emb_dim = model.section.shape.dimensions.emb_dim
    return {depth: 2 * math.prod(size) * emb_dim for depth, size in sizes.items()}


def _recomputed(model: Model, parts: Iterable[Part], length: int) -> float | None:
    """What the backward pass executes again: the layers by policy, the head when it is in chunks.

    Chunks of the head keep no logits (training/objective.py), and those of linear attention no
    scores (layers/linear_attention.py).
    """
    section = model.section
    policy, chunks = section.memory.remat_policy, section.objective.num_vocab_tiling
    executed = {part.name: part.executed for part in parts}
    again = 0.0
    if chunks > 1:
        again += executed["head"] + executed.get(_POINTING, 0.0)
        if section.head.head_qk:
            again += 2 * model.parameters["head_qk/query/kernel"].size
    if section.attention.causal and length > section.attention.linear_attention_chunk:
        # The state after a chunk was kept: adding to it is not done again.
        d = section.shape.dimensions
        chunk = section.attention.linear_attention_chunk
        adds = 2.0 * d.num_kv_heads * d.head_dim**2 * -(-length // chunk) * chunk / length
        of_a_layer = sum(executed for _, executed in _linear(section, length)) - adds
        again += section.attention_kinds.count("linear") * of_a_layer
    if section.attention.attention == "flash" and length % TILE == 0:
        # Both kernels of the backward pass make scores and the gradient of probabilities.
        d = section.shape.dimensions
        keys = sum(
            keys_multiplied(section.attention, length, kind) for kind in section.softmax_kinds
        )
        again += 3 * 2 * d.num_query_heads * d.head_dim * keys
    if policy == "none":
        return again
    if policy != "full" or section.dense_connections.dense_kept_sums:
        return None
    parallel, gated = section.block.block_arrangement == "parallel", section.block.use_rezero
    for name, info in model.parameters.items():
        if not (name.startswith(("layers/", "connections/")) and info.num_in_dims):
            continue
        if re.fullmatch(_KEPT, name):
            continue
        if gated or not re.search(_NOT_AGAIN[section.block.block_arrangement], name):
            again += _of_weights(section, name, info, length)[1]
    again += executed["attention scores"] + executed["attention values"]
    if not parallel or gated:
        again += executed.get(_SGU, 0.0)
    sums = _depth_sums(model)
    if section.dense_connections.mudd_postnorm == "none":
        # Nothing in its own backward pass reads the sum after the last layer.
        sums.pop(section.shape.dimensions.num_layers, None)
    return again + sum(sums.values())
