"""Hooks: functions that training calls every n steps, here for the rank of the token embedding.

    python MaxText/train.py configs/quickstart.yml run_name=ranks \
        import_modules=[examples/embedding_rank.py] hooks=[embedding_rank]

The stable rank of a matrix W, ||W||_F^2 / ||W||_2^2, is at least 1 and at most its rank
(Rudelson and Vershynin 2007, https://arxiv.org/abs/math/0503442). It says over how many directions
the embeddings of tokens spread, and needs no threshold, as the rank of measured numbers does.
"""

import json

import jax
import jax.numpy as jnp

from MaxText.run.hooks import StepInfo, hook


@jax.jit
def stable_rank(matrix: jax.Array) -> jax.Array:
    """Returns the stable rank of a matrix, a float32 scalar.

    Args:
      matrix: [M, N], on one device or sharded over several.
    """
    # The eigenvalues of the smaller Gram matrix are the squared singular values.
    matrix = matrix.astype(jnp.float32)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    gram = jnp.matmul(matrix, matrix.T, precision="highest")
    return jnp.trace(gram) / jnp.linalg.eigvalsh(gram)[-1]


@hook(every=100)
def embedding_rank(info: StepInfo) -> None:
    """Appends a line of JSON to embedding_rank.jsonl in the run folder, and prints it.

    A step may occur twice in the file: once before and once after a rollback or a resume.
    """
    # Every process of a run computes, because the embedding may be sharded over all of them.
    rank = float(stable_rank(info.params["token_embedder"]["embedding"]))
    if jax.process_index() == 0:
        row = {"step": info.step, "loss": info.metrics["loss"], "stable_rank": rank}
        with (info.run_folder / "embedding_rank.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
        print(f"step {info.step}: stable rank of the token embedding {rank:.1f}")
