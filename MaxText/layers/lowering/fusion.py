"""Arrays that XLA is to write once instead of computing them again in each user."""

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def compute_once(tree: Tree) -> Tree:
    """Returns a tree whose arrays are written to memory, for every backend.

    For the weighted sums over layer outputs in dense connections, and their gradients: without a
    barrier XLA recomputes a sum inside each operation that reads it.

    Compiled ahead of time with libtpu 0.0.42 for v5p, gradient of 4 sums of 8 outputs, 4 x 2048
    tokens of width 1024 in bfloat16, each read by 3 products: 2.40 instead of 2.57 GiB are read and
    written, and the compiler estimates 1.72 instead of 1.78 ms. On CPU (jaxlib 0.10.2, MUDDFormer
    of 6 layers of width 256) the compiled gradient has the same FLOPs, bytes and temporaries with
    and without it. Not measured on a GPU.
    """
    return jax.lax.optimization_barrier(tree)
