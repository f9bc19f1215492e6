"""Softmax attention from projected queries, keys and values.

Legend: B sequences, T query tokens, S key tokens, K key/value heads, G query heads per key/value
head, N = K * G query heads, H head_dim.
"""

import jax
import jax.numpy as jnp

from MaxText.layers.dropout import dropout

# Unrolled query blocks cost compile time; past this many they grow instead.
MAX_BLOCKS = 16


def softmax_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
    block_size: int | None = None,
    soft_cap: float = 0.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    precision: str | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(H), within segments and, if causal, not to later tokens) v.

    Query head n reads key/value head n // G. Scores, softmax and its sums are float32.

    Args:
      causal: whether a token attends to itself and earlier tokens only.
      segments_BT: tokens attend only to tokens with the same number; None is one segment.
      block_size: query rows of a block. A block multiplies only the keys up to its last row, so
        that about half the products of the full square are skipped. None is one block, as is
        attention that is not causal.

    Returns:
      [B, T, N, H] in the format of `q_BTNH`.
    """
    length = q_BTNH.shape[1]
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    block = length
    if block_size is not None and causal:
        block = max(block_size, -(-length // MAX_BLOCKS))
    places = jnp.arange(length)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        if causal:
            mask = (places[start:end, None] >= places[None, :end])[None]
        else:
            mask = jnp.ones((1, length, length), bool)
        if segments_BT is not None:
            mask = mask & (segments_BT[:, start:end, None] == segments_BT[:, None, :end])
        o_BTNH = _attend(
            q_BTNH[:, start:end],
            k_BKSH[:, :, :end],
            v_BKSH[:, :, :end],
            mask,
            soft_cap=soft_cap,
            dropout_rate=dropout_rate,
            dropout_key=None if dropout_key is None else jax.random.fold_in(dropout_key, start),
            precision=precision,
        )
        outputs.append(o_BTNH)
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def attend_to_slots(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions_BT: jax.Array,
    *,
    soft_cap: float = 0.0,
    precision: str | None = None,
) -> jax.Array:
    """Causal attention of new tokens to keys and values that are kept by position.

    Args:
      keys: [B, K, S, H], or [K, S, H] for one row (KeyValueCache).
      values: as keys.
      positions_BT: place of each query; it attends to slots 0..place.

    Returns:
      [B, T, N, H] in the format of `q_BTNH`.
    """
    mask_BTS = positions_BT[:, :, None] >= jnp.arange(keys.shape[-2])
    return _attend(q_BTNH, keys, values, mask_BTS, soft_cap=soft_cap, precision=precision)


def _attend(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask_BTS: jax.Array,
    *,
    soft_cap: float,
    precision: str | None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Attention where the mask allows it; the mask's first dimension may be 1.

    Inside, R are the rows of all query heads of a group, and a single sequence may lack B.
    """
    batch, length, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = keys.shape[-3]
    group = num_heads // num_kv_heads
    # One matrix for a group: its products have plain shapes, which make the CPU backend fast.
    q_BKRH = (
        (q_BTNH * head_dim**-0.5)
        .reshape(batch, length, num_kv_heads, group, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(*keys.shape[:-2], group * length, head_dim)
    )
    scores_BKRS = jnp.einsum(
        "...rh,...sh->...rs",
        q_BKRH,
        keys,
        preferred_element_type=jnp.float32,
        precision=precision,
    )
    if soft_cap:
        scores_BKRS = soft_cap * jnp.tanh(scores_BKRS / soft_cap)
    mask_BKRS = jnp.tile(mask_BTS, (1, group, 1))[:, None]
    if keys.ndim == 3:
        mask_BKRS = mask_BKRS[0]
    probabilities = jax.nn.softmax(jnp.where(mask_BKRS, scores_BKRS, -jnp.inf), axis=-1)
    probabilities = dropout(probabilities, dropout_rate, dropout_key).astype(values.dtype)
    o_BKRH = jnp.einsum("...rs,...sh->...rh", probabilities, values, precision=precision)
    o_BKGTH = o_BKRH.reshape(batch, num_kv_heads, group, length, head_dim)
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, head_dim)
