"""What `log_layer_metrics` reports about a layer's softmax attention.

No kernel keeps the scores of a layer, and all of them would cost as much as attention itself. So
the metrics are those of a sample: some queries of each sequence (`num_sampled_queries`), evenly
spaced and the last one among them, with all of their keys.

Legend: B sequences, T tokens, Q sampled queries, S keys, N query heads, K key heads, G query heads
of a key head, H head_dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from MaxText.layers.attention.attention_core import (
    AttentionSpec,
    PersistentKV,
    TokenPairs,
    masked_scores,
    prepend_memories,
)
from MaxText.layers.part_scalars import Metric, Scalars

_MOST_QUERIES = 16
_MOST_SCORES = 2**17  # of a sequence and a head: less queries of longer sequences


def num_sampled_queries(length: int) -> int:
    """Returns Q, of a sequence of `length` tokens: 16, or less of more than 8,192 tokens."""
    return max(1, min(_MOST_QUERIES, length, _MOST_SCORES // length))


def attention_metrics(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    spec: AttentionSpec,
    *,
    segments_BT: jax.Array | None = None,
    persistent_kv: PersistentKV | None = None,
) -> Scalars:
    """Returns metrics of the scores of sampled queries, without gradients.

      attention_entropy     entropy of the probabilities of a query in a head, in nats: at most the
                            logarithm of the number of its keys. Mean over queries and heads; none
                            if `weights` of the part replaces the softmax
      attention_max_logit   largest score, of the tokens that go through a layer together (a
                            microbatch)

    Scores are those that the softmax reads: scaled, soft-capped, changed by positions and `score`.
    Memories count as keys, and so does the sink of a head.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys of the same tokens.
      spec: Computation and masking of scores.
      segments_BT: Document of each token; 0 is padding, which does not count. None is one document.
      persistent_kv: Learned keys and values that every query sees.
    """
    batch, length, num_heads, _ = q_BTNH.shape
    num_queries = num_sampled_queries(length)
    stride = length // num_queries

    def sampled(x_BT: jax.Array) -> jax.Array:
        return x_BT[:, length - 1 - (num_queries - 1) * stride :: stride]

    k_BKSH = k_BSKH.transpose(0, 2, 1, 3)
    pos_BT = spec.token_positions(segments_BT, length)
    mask_BQS = spec.mask(sampled(pos_BT), pos_BT)
    weight_BQ = jnp.ones((batch, num_queries), jnp.float32)
    if segments_BT is not None:
        segments_BQ = sampled(segments_BT)
        mask_BQS = mask_BQS & (segments_BQ[:, :, None] == segments_BT[:, None, :])
        weight_BQ = (segments_BQ > 0).astype(jnp.float32)
    pairs = TokenPairs(mask_BTS=mask_BQS, q_pos_BT=sampled(pos_BT), k_pos_BS=pos_BT)
    if persistent_kv is not None:
        k_BKSH = prepend_memories(persistent_kv[0], k_BKSH)
        pairs = pairs.with_memories(len(persistent_kv[0]))
    # All queries are scaled, as for the TPU kernel, then sampled: the projection has one result. A
    # second one without the scale takes 0.9 % of a compiled step of llama3.2-1b.
    q_BTNH = q_BTNH * spec.scale_for(q_BTNH.shape[-1])
    q_BQNH, k_BKSH = jax.lax.stop_gradient((sampled(q_BTNH), k_BKSH))
    scored_spec = dataclasses.replace(spec, scale=1.0)
    scores_BKRS = jax.lax.stop_gradient(masked_scores(q_BQNH, k_BKSH, scored_spec, pairs))
    scores_BNQS = scores_BKRS.reshape(batch, num_heads, num_queries, -1)
    if spec.sinks_N is not None:
        sinks_N = jax.lax.stop_gradient(spec.sinks_N).astype(jnp.float32)
        sinks_BNQ1 = jnp.broadcast_to(sinks_N[:, None, None], (*scores_BNQS.shape[:-1], 1))
        scores_BNQS = jnp.concatenate([scores_BNQS, sinks_BNQ1], axis=-1)
    weight = weight_BQ.sum()
    counted_BNQS = jnp.where(weight_BQ[:, None, :, None] > 0, scores_BNQS, -jnp.inf)
    # Finite for a microbatch of padding alone, whose weight is 0.
    largest = jnp.where(weight > 0, counted_BNQS.max(), 0)
    metrics: Scalars = {"attention_max_logit": Metric(weight * largest, weight)}
    if spec.weights_hook is None:
        log_normalizer_BNQ1 = jax.nn.logsumexp(scores_BNQS, axis=-1, keepdims=True)
        log_p_BNQS = scores_BNQS - log_normalizer_BNQ1
        # A masked key has the probability 0, and 0 log 0 is 0.
        terms_BNQS = jnp.where(scores_BNQS > -jnp.inf, jnp.exp(log_p_BNQS) * log_p_BNQS, 0)
        entropy_BQ = -terms_BNQS.sum(-1).mean(1)
        metrics["attention_entropy"] = Metric((weight_BQ * entropy_BQ).sum(), weight)
    return metrics
