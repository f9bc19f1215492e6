"""Weighted sums over depth, the products of dense connections.

Legend: B sequences, T tokens, D emb_dim, C ways, S sources.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def mix(
    weights_BTCS: jax.Array,
    sources: Sequence[jax.Array],
    form: str,
    *,
    scales: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """y_c = sum_s weights[..., c, s] * scale_s * source_s for each way c.

    Args:
      weights_BTCS: float32; B and T may be 1, for weights that are the same everywhere.
      sources: x_BTD each.
      form: "sum" adds one source after another, "einsum" stacks them for one product.
      scales: float32 [D] of each source; None is 1.

    Returns:
      y_BTD for each way, in the format of the sources. Sums are float32.
    """
    dtype = sources[0].dtype
    floats = [source.astype(jnp.float32) for source in sources]
    if scales is not None:
        floats = [scale * x_BTD for scale, x_BTD in zip(scales, floats, strict=True)]
    if form == "einsum":
        shape = (*sources[0].shape[:2], *weights_BTCS.shape[2:])
        y_CBTD = jnp.einsum(
            "btcs,sbtd->cbtd", jnp.broadcast_to(weights_BTCS, shape), jnp.stack(floats)
        )
        return list(y_CBTD.astype(dtype))
    sums = []
    for way in range(weights_BTCS.shape[2]):
        total = sum(weights_BTCS[:, :, way, s, None] * x for s, x in enumerate(floats))
        assert isinstance(total, jax.Array)
        sums.append(total.astype(dtype))
    return sums
