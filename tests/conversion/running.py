"""convert.py's work inside this process, and the models that it leaves."""

import jax.numpy as jnp

from MaxText.config.loading import load
from MaxText.conversion import conversion_request
from MaxText.conversion.converting import convert
from MaxText.conversion.stored_arrays import RunWeights
from MaxText.conversion.weight_source import model_of, nested
from MaxText.run.growing import grow

EXACT = ("dtype=float32", "matmul_precision=highest", "logits_dot_in_fp32=true")


def run(*arguments):
    """What the program prints."""
    lines = []
    asked = conversion_request.read(arguments)
    (grow if asked.grow else convert)(asked, lines.append)
    return "\n".join(lines)


def names(folder):
    """Of everything in a folder."""
    return sorted(path.name for path in folder.iterdir())


def model_in_run(folder, *keys):
    """The model of a run by its own config.yml and keys on top, all in float32."""
    return model_of(load([f"{folder}/config.yml", *EXACT, *keys]).config)


def parameters_in_run(folder):
    """The parameters of a run as a tree."""
    weights = RunWeights(str(folder))
    return nested({name: jnp.asarray(weights.read(name)) for name in weights.model.parameters})
