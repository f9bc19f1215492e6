"""convert.py's work inside this process, and the models that it leaves."""

from MaxText.configuration.loading import load
from MaxText.conversion import request
from MaxText.conversion.converting import convert
from MaxText.conversion.run_checkpoint import RunWeights
from MaxText.conversion.weights import model_of, nested


def run(*arguments):
    """What the program prints."""
    lines = []
    convert(request.read(arguments), lines.append)
    return "\n".join(lines)


def names(folder):
    """Of everything in a folder."""
    return sorted(path.name for path in folder.iterdir())


def model_of_run(folder):
    """Model and parameters of the run in a folder, by its own config.yml, all in float32."""
    exact = ["dtype=float32", "matmul_precision=highest", "logits_dot_in_fp32=true"]
    model = model_of(load([f"{folder}/config.yml", *exact]).config)
    weights = RunWeights(folder)
    assert weights.model.parameters.keys() == model.parameters.keys()
    return model, nested({name: weights.read(name) for name in model.parameters})
