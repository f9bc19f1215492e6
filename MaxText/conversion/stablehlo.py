"""Export of the forward pass as one file for jax alone."""

import math
from collections.abc import Callable
from pathlib import Path

import flatbuffers  # noqa: F401 (jax serializes programs with it, and does not ask for it)
import jax
import jax.numpy as jnp
from jax import export

from MaxText.conversion.weight_source import WeightSource, num_bytes, unflatten
from MaxText.errors import UserError
from MaxText.layers.batch import Batch
from MaxText.layers.model import Model
from MaxText.storage.atomic import atomic_rename, temporary_name
from MaxText.training.backend_defaults import resolve_auto

PLATFORMS = ("cpu", "cuda", "tpu")
# Weights are constants of the program, and the serializer uses 32-bit sizes.
MAX_BYTES = 2**31 - 2**24


def export_forward(weights: WeightSource, length: int) -> export.Exported:
    """Returns the program: int32 [b, length] -> float32 [b, length, vocab].

    Maps tokens to logits for any b. Computes in the configuration's dtype, float32 if it is auto.
    """
    config, _ = resolve_auto(weights.config.model, "cpu")
    model = Model(config)
    params = unflatten({name: jnp.asarray(weights.read(name)) for name in model.parameters})

    def forward(tokens_BT: jax.Array) -> jax.Array:
        decoder = model.merge(params)
        batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape))
        return decoder(batch)

    (batch_size,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return export.export(jax.jit(forward), platforms=PLATFORMS)(shape)


def check_size(weights: WeightSource) -> None:
    """Refuses weights too large for constants of a program."""
    size = sum(num_bytes(weights).values())
    if size > MAX_BYTES:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB, and a program with embedded weights is "
            f"limited to {MAX_BYTES / 2**30:.1f} GiB. Export a folder with to=hf:FOLDER instead."
        )


def peak_bytes(weights: WeightSource) -> int:
    """Returns peak memory: weights as arrays, as constants, and as file."""
    return 4 * sum(num_bytes(weights).values())


def write(weights: WeightSource, length: int, target: Path, log: Callable[[str], None]) -> None:
    """Writes the program; it needs jax and flatbuffers alone."""
    partial = temporary_name(target)
    program = export_forward(weights, length).serialize()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(program)
        atomic_rename(partial, target)
    except OSError as error:
        raise UserError(f"to={target} cannot be written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
    size = math.ceil(target.stat().st_size / 2**20)
    log(f"Wrote {target} ({size:,} MiB), int32 [N, {length}] -> float32 [N, {length}, V]")
    log(f'Load it: jax.export.deserialize(bytearray(open("{target}", "rb").read()))')
