"""Functions that JAX cannot batch, inside of the vmap over pipeline stages."""

from collections.abc import Callable, Sequence

import jax


def unbatched_on_one_stage(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function for vmap over pipeline stages that runs without a batch dimension.

    Works around: JAX cannot batch the masks of cuDNN's attention. Under jax.shard_map each device
    has one stage, so that the dimension of the vmap is 1 and can be dropped. Gradients work only
    outside of the vmap, as in layers/assembly/pipeline.py.

    Args:
      function: A function of arrays that returns one array.
    """
    on_stage = jax.custom_batching.custom_vmap(function)

    @on_stage.def_vmap
    def _(
        num_stages: int, is_batched: Sequence[bool], *arrays: jax.Array | None
    ) -> tuple[jax.Array, bool]:
        assert num_stages == 1, num_stages
        stage_arrays = jax.tree.map(
            lambda x, batched: x[0] if batched else x, arrays, tuple(is_batched)
        )
        return function(*stage_arrays)[None], True

    return on_stage
