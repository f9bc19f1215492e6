"""Compares an exported checkpoint in transformers with our model."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config import schema
from MaxText.config.schema import Config
from MaxText.conversion.family import Family
from MaxText.conversion.hf_config import absent_in_transformers
from MaxText.conversion.weight_source import WeightSource, abstract_model, unflatten
from MaxText.errors import UserError
from MaxText.layers.batch import Batch

# Relative to the largest logit. Both use float32, in another order; measured: 2e-6 for GPT-2 sizes.
LOGITS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-4
_ROWS, _LENGTH = 2, 64


def check_possible(family: Family, config: Config) -> None:
    """Refuses an impossible verification before any work is done."""
    if absent := absent_in_transformers(family, config):
        raise UserError(
            f"--verify compares with transformers, which has no {absent}. Remove --verify."
        )
    try:
        import torch  # pyright: ignore[reportMissingImports]  # noqa: F401
        import transformers  # pyright: ignore[reportMissingImports]  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--verify needs torch and transformers ({error}): pip install '.[torch]'."
        ) from error


def verify(
    weights: WeightSource, folder: Path, shown: str, log: Callable[[str], None], dtype: str = ""
) -> None:
    """Compares logits and loss of random tokens; UserError if they differ.

    With `dtype`, our tensors are rounded to it like the exported ones.
    """
    config = weights.config.model
    length = min(_LENGTH, config.shape.max_target_length)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, config.shape.vocab_size, (_ROWS, length)).astype(np.int32)
    expected, actual = _their_logits(folder, tokens), _our_logits(weights, tokens, dtype)
    difference, largest = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
    our_loss, their_loss = _loss(actual, tokens), _loss(expected, tokens)
    line = (
        f"logits differ by at most {difference:.2g} (largest logit {largest:.3g}), loss "
        f"{our_loss:.6f} here and {their_loss:.6f} in transformers"
    )
    is_close = difference <= LOGITS_TOLERANCE * max(1.0, largest)
    if not (is_close and abs(our_loss - their_loss) <= LOSS_TOLERANCE * their_loss):
        raise UserError(
            f"{shown} gives different results in transformers: {line}. Nothing was written. "
            "Please report this with the folder's config.json."
        )
    log(f"Verified: {line}")


def _our_logits(weights: WeightSource, tokens: np.ndarray, dtype: str) -> np.ndarray:
    exact = {"dtype": "float32", "matmul_precision": "highest"}
    model = abstract_model(schema.unflatten(schema.flatten(weights.config) | exact))
    formats = {name: dtype or weights.formats[name] for name in model.parameters}
    params = unflatten({name: weights.read(name).astype(kind) for name, kind in formats.items()})

    @jax.jit
    def run(params, tokens_BT):
        decoder = model.merge(jax.tree.map(lambda x: x.astype(jnp.float32), params))
        batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape))
        return decoder(batch)

    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(run(params, tokens))


def _their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def _loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    scores = logits[:, :-1].astype(np.float64)
    chosen = np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return float((np.logaddexp.reduce(scores, axis=-1) - chosen).mean())
