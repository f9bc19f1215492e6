"""convert.py's work inside this process, and the models that it leaves."""

import jax.numpy as jnp

from MaxText.config.loading import load
from MaxText.conversion.convert import convert
from MaxText.conversion.request import parse_arguments
from MaxText.conversion.weight_source import RunWeights, unflatten
from MaxText.run.grow import grow
from MaxText.training.backend_defaults import abstract_model

EXACT = ("dtype=float32", "matmul_precision=highest", "logits_dot_in_fp32=true")


def run(*arguments):
    """What the program prints."""
    lines = []
    asked = parse_arguments(arguments)
    (grow if asked.grow else convert)(asked, lines.append)
    return "\n".join(lines)


def names(folder):
    """Of everything in a folder."""
    return sorted(path.name for path in folder.iterdir())


def model_in_run(folder, *keys):
    """The model of a run by its own config.yml and keys on top, all in float32."""
    return abstract_model(load([f"{folder}/config.yml", *EXACT, *keys]).config.model)


def parameters_in_run(folder):
    """The parameters of a run as a tree."""
    weights = RunWeights(str(folder))
    return unflatten({name: jnp.asarray(weights.read(name)) for name in weights.model.parameters})
