"""Export of the forward pass as one file for jax alone."""

import math
from collections.abc import Callable
from pathlib import Path

import flatbuffers  # noqa: F401 (jax serializes programs with it, and does not ask for it)
import jax
import jax.numpy as jnp
from jax import export

from MaxText.conversion.imported_run import atomic_target
from MaxText.conversion.weight_source import WeightSource, unflatten
from MaxText.errors import UserError
from MaxText.layers.batch import Batch
from MaxText.storage.atomic import sync_file

PLATFORMS = ("cpu", "cuda", "tpu")
# Weights are constants of the program, and the serializer uses 32-bit sizes.
MAX_BYTES = 2**31 - 2**24


def export_forward(weights: WeightSource, length: int) -> export.Exported:
    """Returns the program: int32 [b, length] -> float32 [b, length, vocab].

    Maps tokens to logits for any b. Computes in the configuration's dtype, float32 if it is auto.
    """
    model = weights.model
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
    parameters = weights.model.parameters.items()
    size = sum(spec.size * weights.formats[name].itemsize for name, spec in parameters)
    if size > MAX_BYTES:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB, and a program with embedded weights is "
            f"limited to {MAX_BYTES / 2**30:.1f} GiB. Export a folder with to=hf:FOLDER instead."
        )


def write(weights: WeightSource, length: int, target: Path, log: Callable[[str], None]) -> None:
    """Writes the program; it needs jax and flatbuffers alone."""
    program = export_forward(weights, length).serialize()
    with atomic_target(target) as partial:
        partial.write_bytes(program)
        sync_file(partial)
    size = math.ceil(target.stat().st_size / 2**20)
    log(f"Wrote {target} ({size:,} MiB), int32 [N, {length}] -> float32 [N, {length}, V]")
    log(f'Load it: jax.export.deserialize(bytearray(open("{target}", "rb").read()))')
