"""Variants of attention as hooks, and what they compute by definition.

`IDEAS` has a row for each: arguments of AttentionSpec, and a function from the plain scores
[N, T, S] of one document to its weights. Both read the same parameters. Positions are those in the
document; B sequences, N query heads, T queries, S keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

N = 4
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
TABLE = np.random.default_rng(7).normal(size=(N, 4)).astype(np.float32)
PREFIX = 3
CHUNK = 4


@dataclasses.dataclass(frozen=True)
class Idea:
    """A variant of attention.

    Attributes:
      spec: Arguments of AttentionSpec, made from its parameter.
      weights: (scores [N, T, S], mask [T, S], parameter) -> weights [N, T, S], for one document.
      parameter: Learned, or None.
      mask: (i, j) -> whether query i sees key j; causal by default.
    """

    spec: Callable[[Any], dict[str, Any]]
    weights: Callable[[Any, Any, Any], Any]
    parameter: Any = None
    mask: Callable[[Any, Any], Any] = lambda i, j: j <= i


def softmax(scores, mask, _=None):
    scores = jnp.where(mask, scores, -jnp.inf)
    return jax.nn.softmax(scores, -1)


def sink_weights(scores, mask, sinks_N):
    sinks = jnp.broadcast_to(jnp.asarray(sinks_N)[:, None, None], (*scores.shape[:2], 1))
    masked = jnp.where(mask, scores, -jnp.inf)
    return jax.nn.softmax(jnp.concatenate([masked, sinks], -1), -1)[..., :-1]


def distance_bucket(q_pos, k_pos):
    return jnp.minimum(jnp.abs(q_pos - k_pos), TABLE.shape[1] - 1)


def table_scores(table_N4):
    """T5's bias (Raffel et al. 2020): a learned number by head and distance."""
    return {
        "score_hook": lambda scores, q_pos, k_pos, head: (
            scores + table_N4[head, distance_bucket(q_pos, k_pos)]
        )
    }


def table_weights(scores, mask, table_N4):
    i, j = jnp.indices(scores.shape[1:])
    return softmax(scores + table_N4[:, distance_bucket(i, j)], mask)


def sigmoid_spec(bias_N):
    return {
        "score_hook": lambda scores, q_pos, k_pos, head: scores + bias_N[head],
        "weights_hook": lambda scores, mask: jax.nn.sigmoid(scores),
        "weights_scope": "score",
    }


def softpick(scores, mask):
    """relu(e^x - 1) / sum |e^x - 1| (Zuhri et al. 2025), in the form that does not overflow."""
    largest = jnp.maximum(jnp.max(scores, -1, keepdims=True, where=mask, initial=0.0), 0.0)
    shifted = jnp.exp(scores - largest) - jnp.exp(-largest)
    total = jnp.sum(jnp.abs(shifted), -1, keepdims=True, where=mask)
    return jax.nn.relu(shifted) / (total + 1e-8 * jnp.exp(-largest))


def softpick_weights(scores, mask, _):
    shifted = jnp.where(mask, jnp.exp(scores) - 1, 0.0)
    return jax.nn.relu(shifted) / (jnp.abs(shifted).sum(-1, keepdims=True) + 1e-8)


def selective(scores, mask):
    """Head 0 selects what later tokens forget (Leviathan et al. 2024, arXiv 2410.02703)."""
    rows, columns = jnp.indices(scores.shape[-2:])
    allowed = mask & (rows != columns)
    selected = jnp.where(allowed, jax.nn.relu(jnp.where(allowed, scores[:, :1], 0.0)), 0.0)
    forgotten = jnp.cumsum(selected, axis=-2) - selected  # by earlier queries
    return jax.nn.softmax(jnp.where(mask, scores - forgotten, -jnp.inf), axis=-1)


def selective_weights(scores, mask, _):
    _, length, _ = scores.shape
    forgotten = [jnp.zeros(length)]
    for t in range(length - 1):
        selected = jnp.where(jnp.arange(length) < t, jax.nn.relu(scores[0, t]), 0.0)
        forgotten.append(forgotten[-1] + selected)
    return softmax(scores - jnp.stack(forgotten), mask)


IDEAS: dict[str, Idea] = {
    "sinks": Idea(lambda sinks_N: {"sinks_N": sinks_N}, sink_weights, SINKS),
    "sinks, exact on CPU": Idea(
        lambda sinks_N: {"sinks_N": sinks_N, "precision": "highest"}, sink_weights, SINKS
    ),
    "sinks, soft cap, ALiBi": Idea(
        lambda sinks_N: {
            "sinks_N": sinks_N,
            "soft_cap": 2.0,
            "slopes_N": jnp.asarray([0.5, 0.25, 0.1, 0.05]),
        },
        lambda scores, mask, sinks_N: sink_weights(
            2 * jnp.tanh(scores / 2)
            - jnp.asarray([0.5, 0.25, 0.1, 0.05])[:, None, None]
            * jnp.abs(jnp.subtract(*jnp.indices(scores.shape[1:]))),
            mask,
            sinks_N,
        ),
        SINKS,
    ),
    "bias by distance": Idea(table_scores, table_weights, TABLE),
    "sigmoid": Idea(
        sigmoid_spec,
        lambda scores, mask, bias_N: jnp.where(
            mask, jax.nn.sigmoid(scores + bias_N[:, None, None]), 0.0
        ),
        np.float32([-1.0, -2.0, 0.0, 0.5]),
    ),
    "softpick": Idea(
        lambda _: {"weights_hook": softpick, "weights_scope": "query"}, softpick_weights
    ),
    "selective": Idea(
        lambda _: {"weights_hook": selective, "weights_scope": "sequence"}, selective_weights
    ),
    "prefix": Idea(
        lambda _: {
            "causal": False,
            "mask_hook": lambda q_pos, k_pos: (k_pos <= q_pos) | (k_pos < PREFIX),
        },
        softmax,
        mask=lambda i, j: (j <= i) | (j < PREFIX),
    ),
    "chunks": Idea(
        lambda _: {
            "window": CHUNK,
            "mask_hook": lambda q_pos, k_pos: q_pos // CHUNK == k_pos // CHUNK,
        },
        softmax,
        mask=lambda i, j: (j <= i) & (i // CHUNK == j // CHUNK),
    ),
    "sinks in a window": Idea(
        lambda sinks_N: {"sinks_N": sinks_N, "window": 3},
        sink_weights,
        SINKS,
        mask=lambda i, j: (j <= i) & (j > i - 3),
    ),
    "bias by distance in a window": Idea(
        lambda table_N4: table_scores(table_N4) | {"window": 3},
        table_weights,
        TABLE,
        mask=lambda i, j: (j <= i) & (j > i - 3),
    ),
}


def by_definition(idea: Idea, q, k, v, parameter, segments):
    """Attention of each document alone, [B, T, N, H]; q, k and v may have fewer value heads."""
    group, value_group = N // k.shape[2], N // v.shape[2]
    rows = []
    for row, documents in enumerate(np.asarray(segments)):
        outputs = []
        for document in dict.fromkeys(documents.tolist()):
            tokens = np.flatnonzero(documents == document)
            keys, values = (
                jnp.repeat(x[row, tokens], size, axis=1)
                for x, size in ((k, group), (v, value_group))
            )
            scores = jnp.einsum("tnh,snh->nts", q[row, tokens], keys) * q.shape[-1] ** -0.5
            mask = idea.mask(*np.indices(scores.shape[1:]))
            weights = jnp.where(mask, idea.weights(scores, mask, parameter), 0.0)
            outputs.append(jnp.einsum("nts,snh->tnh", weights, values))
        rows.append(jnp.concatenate(outputs))
    return jnp.stack(rows)
