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
  exactly (T+1)/2), W - W^2/(2T) under a causal mask with a window of W tokens;
- as the backend computes it (`keys_multiplied`), masked products included.

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

from MaxText.configuration.layer_sections import Attention
from MaxText.layers.attention_core import MAX_BLOCKS
from MaxText.layers.model import Model

_TOKEN_TABLE = "token_embedder/embedding"
_BETWEEN_TOKENS = ("attention scores", "attention values")
_DEPTH_SUMS = "sums over depth"
# Parts in the order of the forward pass, and how the names of their parameters look; attention
# between tokens and sums over depth have none. A parameter that no row knows is a part with the
# name of its folder, which comes last, so a new part is counted whether or not it has a row.
_PARTS: tuple[tuple[str, str | None], ...] = (
    ("token embedding", r"^token_embedder/"),
    ("position embedding", r"^position_embedder/"),
    ("query, key, value", r"/self_attention/(query|key|value)/"),
    *((name, None) for name in _BETWEEN_TOKENS),
    ("attention output", r"/self_attention/out/"),
    ("feed-forward", r"/mlp/"),
    ("dense connections", r"^connections/"),
    (_DEPTH_SUMS, None),
    ("norms", r"norm(_[qkv])?/"),
    ("head", r"^logits_dense/"),
)
# Products whose results only the residual stream takes: nothing in the backward pass of their
# layer reads them, so remat_policy=full does not compute them again.
_NOT_AGAIN = {
    "sequential": r"/mlp/(wo|values)/",
    "parallel": r"/mlp/(wo|values)/|/self_attention/out/(kernel|values)",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the model, over all layers.

    Attributes:
      name: a row of the table above, or the folder of its parameters.
      parameters: numbers it holds, biases included. A tied head holds none.
      flops: forward operations per token, by the rule of MFU.
      executed: forward operations per token, as the backend computes them.
    """

    name: str
    parameters: int
    flops: float
    executed: float


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Operations on one token, part by part.

    Attributes:
      sequence_length: tokens of a sequence.
      parts: in the order of the forward pass.
      recomputed: forward operations per token that the backward pass executes again; None where
        that is not known (remat policies between none and full).
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
        return 3 * self.forward

    @property
    def weights(self) -> float:
        """Operations of training that multiply tokens with weights."""
        others = (*_BETWEEN_TOKENS, _DEPTH_SUMS)
        return 3 * sum(part.flops for part in self.parts if part.name not in others)

    @property
    def attention(self) -> float:
        """Operations of training that multiply tokens with tokens."""
        return 3 * sum(part.flops for part in self.parts if part.name in _BETWEEN_TOKENS)

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
        return None if self.recomputed is None else 3 * self.executed_forward + self.recomputed

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
    for name, info in model.parameters.items():
        part = _part_of(name)
        held[part] += info.size
        if info.num_in_dims:
            products[part] += 2 * info.size
    if section.head.logits_via_embedding:
        products["head"] += 2 * model.parameters[_TOKEN_TABLE].size
    d, attention = section.shape.dimensions, section.attention
    sums = float(sum(_depth_sums(model).values()))
    per_key = 2 * d.num_layers * d.num_query_heads * d.head_dim
    by_rule = per_key * keys_by_rule(sequence_length, causal=attention.causal)
    computed = per_key * keys_multiplied(attention, sequence_length)
    parts = []
    for name in dict.fromkeys([*(name for name, _ in _PARTS), *held]):
        if name in _BETWEEN_TOKENS:
            parts.append(Part(name, 0, by_rule, computed))
        elif name == _DEPTH_SUMS:
            parts += [Part(name, 0, sums, sums)] if sums else []
        elif held[name] or products[name]:
            parts.append(Part(name, held[name], products[name], products[name]))
    return FlopCount(sequence_length, tuple(parts), _recomputed(model, parts))


def keys_by_rule(length: int, *, causal: bool, window: int | None = None) -> float:
    """Keys that a query counts on average, by the rule of MFU.

    Args:
      length: T, tokens of a sequence.
      causal: whether a token sees only earlier ones.
      window: keys a query may see, itself included; None is all of them.
    """
    visible = min(window or length, length)
    return visible - visible**2 / (2 * length) if causal else float(visible)


def keys_multiplied(section: Attention, length: int) -> float:
    """Keys that a query is multiplied with on average, those masked afterwards included.

    attention=dot_product multiplies the whole square. The others take query rows in blocks, each
    with the keys up to its last row; without a causal mask that is the whole square, too.
    """
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


def _recomputed(model: Model, parts: Iterable[Part]) -> float | None:
    """What the backward pass executes again: the layers by policy, the head when it is in chunks.

    Chunks of the head keep no logits (training/objective.py).
    """
    section = model.section
    policy, chunks = section.memory.remat_policy, section.objective.num_vocab_tiling
    executed = {part.name: part.executed for part in parts}
    head = executed["head"] if chunks > 1 else 0.0
    if policy == "none":
        return head
    if policy != "full":
        return None
    not_again = _NOT_AGAIN[section.block.block_arrangement]
    weights = sum(
        info.size
        for name, info in model.parameters.items()
        if name.startswith(("layers/", "connections/"))
        and info.num_in_dims
        and not re.search(not_again, name)
    )
    sums = _depth_sums(model)
    if section.dense_connections.mudd_postnorm == "none":
        # Nothing in its own backward pass reads the sum after the last layer.
        sums.pop(section.shape.dimensions.num_layers, None)
    between_tokens = sum(executed[name] for name in _BETWEEN_TOKENS)
    return head + 2 * weights + between_tokens + sum(sums.values())
