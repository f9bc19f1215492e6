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

from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.configuration.registry import lookup
from MaxText.layers.arrangements import mixer_of
from MaxText.layers.head import head_of
from MaxText.layers.mixture_of_experts import places
from MaxText.layers.model import Model
from MaxText.layers.part import Flops
from MaxText.parallelism.constraints import ParameterInfo

_TOKEN_TABLE = "token_embedder/embedding"
_BETWEEN_TOKENS = ("attention scores", "attention values", "static SGU")
_DEPTH_SUMS = "sums over depth"
# Parts in the order of the forward pass, and how the names of their parameters look; attention
# between tokens and sums over depth have none. A parameter that no row knows is a part with the
# name of its folder, which comes last, so a new part is counted whether or not it has a row.
_PARTS: tuple[tuple[str, str | None], ...] = (
    ("token embedding", r"^token_embedder/"),
    ("position embedding", r"^position_embedder/"),
    ("query, key, value", r"/self_attention/(query|key|value)/"),
    ("memories", r"/self_attention/memory_(key|value)$"),
    *((name, None) for name in _BETWEEN_TOKENS),
    ("attention output", r"/self_attention/out/"),
    ("router", r"/mlp/gate/"),
    ("feed-forward", r"/(macaron_)?mlp/"),
    ("gates", r"_gate/scale$"),
    ("dense connections", r"^connections/"),
    (_DEPTH_SUMS, None),
    ("norms", r"norm(_[qkv])?/"),
    ("head", r"^(logits_dense|head)/"),
    ("Head-QK", r"^head_qk/"),
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
      between_tokens: whether tokens are multiplied with tokens or with a state.
    """

    name: str
    parameters: int
    flops: float
    executed: float
    backward: int = 2
    between_tokens: bool = False

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
        return sum(
            part.training
            for part in self.parts
            if not part.between_tokens and part.name != _DEPTH_SUMS
        )

    @property
    def attention(self) -> float:
        """Operations of training that multiply tokens with tokens."""
        return sum(part.training for part in self.parts if part.between_tokens)

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
            by_rule, computed = _of_weights(model, name, info, sequence_length)
            products[part] += by_rule  # type: ignore[assignment]
            executed[part] += computed  # type: ignore[assignment]
    head, layer = head_of(section)
    if head.reads_table(head.keys_of(layer)):
        table = 2 * model.parameters[_TOKEN_TABLE].size
        products["head"] += table
        executed["head"] += table
    between = _between_tokens(section, sequence_length)
    of_head = _summed([head.flops(head.keys_of(layer), layer.dimensions, sequence_length)])
    known = [name for name, _ in _PARTS]
    place = known.index(_BETWEEN_TOKENS[1]) + 1
    known[place:place] = [name for name in between if name not in known]
    sums = float(sum(_depth_sums(model).values()))
    parts = []
    for name in dict.fromkeys([*known, *of_head, *held]):
        if one := between.get(name) or of_head.get(name):
            computed = one.executed or 0.0
            parts.append(Part(name, 0, one.by_rule, computed, one.backward, True))
        elif name == _DEPTH_SUMS:
            parts += [Part(name, 0, sums, sums)] if sums else []
        elif held[name] or products[name]:
            parts.append(Part(name, held[name], products[name], executed[name]))
    recomputed = _recomputed(model, parts, between, of_head, sequence_length)
    return FlopCount(sequence_length, tuple(parts), recomputed)


def _of_weights(model: Model, name: str, info: ParameterInfo, length: int) -> tuple[float, float]:
    """Forward operations on a token of one matrix of all layers: by the rule, and executed."""
    section, times = model.section, 1
    if section.block.share_parameters and name.startswith("layers/"):
        times = section.shape.dimensions.num_layers
    whole = 2 * times * info.size
    if "exp" not in info.logical_axes or (layer := model.layer_of(name)) is None:
        return whole, whole
    experts = layer.section.mixture_of_experts
    visited = whole * experts.num_experts_per_tok / experts.num_experts
    if experts.capacity_factor < 0:
        return visited, visited
    group, capacity = places(experts, length, experts.capacity_factor)
    return visited, whole * capacity / group


def _between_tokens(section: ModelSection, length: int) -> dict[str, Flops]:
    """Row -> forward operations on a token over all layers, besides those of weights."""
    rows = [{"attention scores": Flops(0.0), "attention values": Flops(0.0)}]
    for layer in section.layers:
        if (mixer := mixer_of(layer)) is not None:
            rows.append(mixer.flops(mixer.keys_of(layer), layer.dimensions, length))
        own = lookup("feed_forward", layer.section.feed_forward.feed_forward_type)
        rows.append(own.flops(own.keys_of(layer), layer.dimensions, length))
    return _summed(rows)


def _summed(rows: Iterable[dict[str, Flops]]) -> dict[str, Flops]:
    found: dict[str, Flops] = {}
    for name, more in (item for of_part in rows for item in of_part.items()):
        one = found.get(name, Flops(0.0))
        executed = more.by_rule if more.executed is None else more.executed
        found[name] = Flops(
            one.by_rule + more.by_rule,
            (one.executed or 0.0) + executed,
            one.recomputed + more.recomputed,
            more.backward,
        )
    return found


def _part_of(name: str) -> str:
    for part, pattern in _PARTS:
        if pattern is not None and re.search(pattern, name):
            return part
    return re.sub(r"^layers/(\d+/|cycle/\d+/)?", "", name.rpartition("/")[0])


def _depth_sums(model: Model) -> dict[int, int]:
    """Number of layers before a sum over depth -> its forward operations on a token, 2 C S D."""
    sizes = {}
    for name, info in model.parameters.items():
        # One of the two may be missing; both end in [C, S].
        if match := re.match(r"connections/after/(\d+)/(static|wo/kernel)$", name):
            sizes[int(match[1])] = info.shape[-2:]
    emb_dim = model.section.shape.dimensions.emb_dim
    return {depth: 2 * math.prod(size) * emb_dim for depth, size in sizes.items()}


def _recomputed(
    model: Model,
    parts: Iterable[Part],
    between: dict[str, Flops],
    of_head: dict[str, Flops],
    length: int,
) -> float | None:
    """What the backward pass executes again: the layers by policy, the head when it is in chunks.

    Chunks of the head keep no logits (training/objective.py).
    """
    section = model.section
    policy, chunks = section.memory.remat_policy, section.objective.num_vocab_tiling
    executed = {part.name: part.executed for part in parts}
    again = sum(one.recomputed for one in between.values())
    if chunks > 1:
        again += sum(executed.get(name, 0.0) for name in ("head", "Head-QK", *of_head))
        for name, info in model.parameters.items():
            if info.num_in_dims and name.startswith(head_of(section)[0].weights_of_state):
                again -= 2 * info.size
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
            again += _of_weights(model, name, info, length)[1]
    for one in between.values():
        # Nothing reads the sums of static SGU again where only the residual stream takes them.
        if one.backward or not parallel or gated:
            again += one.executed or 0.0
    sums = _depth_sums(model)
    if section.dense_connections.mudd_postnorm == "none":
        # Nothing in its own backward pass reads the sum after the last layer.
        sums.pop(section.shape.dimensions.num_layers, None)
    return again + sum(sums.values())
