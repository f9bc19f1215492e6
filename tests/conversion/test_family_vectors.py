"""Families of transformers: numbers of tiny random models, and their folders there and back.

tests/golden/families/README.md says what the vectors hold.
"""

import json
import math
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file

from MaxText.config.loading import load_config
from MaxText.conversion.hf_config import config_from_hf, find_family, resolve_family
from MaxText.conversion.hf_import import HFWeights
from MaxText.training.objective import loss_sums
from tests.conversion.golden_models import of_family_vectors
from tests.conversion.running import model_in_run, parameters_in_run, run
from tests.conversion.small_folders import same_bits
from tests.golden.families.make import CASES
from tests.layers.test_golden import TRANSFORMERS, close, close_gradients

# In config.json of transformers, and no part of the model.
NOT_OF_MODEL = {"transformers_version", "initializer_range", "use_cache", "attention_dropout"}
# What is written in other words: the factor of sines and cosines instead of what it comes from, the
# base that `alpha` means, and nothing for a length without effect.
_MINISTRAL3 = CASES["ministral3"]["rope_parameters"]
_MSCALES = {"mscale", "mscale_all_dim"}
_HUNYUAN = CASES["hunyuan_v1_dense"]["rope_parameters"]
REWRITTEN: dict[str, dict[str, Any]] = {
    "ministral3": {
        "rope_parameters": {
            **{name: value for name, value in _MINISTRAL3.items() if name not in _MSCALES},
            "attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        }
    },
    "hunyuan_v1_dense": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _HUNYUAN["rope_theta"] * _HUNYUAN["alpha"] ** (8 / 6),
        }
    },
    "phi3": {"original_max_position_embeddings": None},
    "phi3-window": {"original_max_position_embeddings": None},
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_transformers(case, tmp_path):
    golden = of_family_vectors(case)
    reference, folder = tmp_path / "source", tmp_path / "run"
    golden.store(reference, golden.parameters)
    run(f"from=hf:{reference}", f"to={folder}")
    keys = ("scan_layers=false", "remat_policy=none")
    model, params = model_in_run(folder, *keys), parameters_in_run(folder)

    @jax.jit
    def numbers(params, batch):
        def loss(params):
            decoder = model.merge(params)
            total = loss_sums(decoder, batch, model.config.objective).total
            return total / batch.loss_mask_BT.sum(), decoder(batch)

        (loss_value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, loss_value, gradients

    logits, loss, gradients = numbers(params, golden.batch)
    close(logits, golden.logits, TRANSFORMERS.logits)
    close(loss, golden.loss, TRANSFORMERS.loss)
    wanted = golden.converted(tmp_path / "gradients", golden.gradients)
    close_gradients(gradients, wanted, TRANSFORMERS.gradients)

    run(f"from={folder}", f"to=hf:{tmp_path / 'out'}")
    same_bits(load_file(tmp_path / "out" / "model.safetensors"), golden.parameters)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = {name: value for name, value in golden.config_json.items() if name not in NOT_OF_MODEL}
    written = {name: exported.get(name) for name in stored}
    assert written == stored | REWRITTEN.get(case, {})
    again, given = HFWeights(tmp_path / "out"), HFWeights(reference)
    assert (again.keys, again.family) == (given.keys, given.family)


# Cases whose parts a family holds that comes first; others are exported as their own.
NARROWER = {
    "ernie4_5": "llama",
    "seed_oss": "llama",
    "phi3-window": "mistral",
    "phi3-short": "llama",
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_exported_as_the_narrowest_family(case):
    config_json = of_family_vectors(case).config_json
    family = resolve_family(config_json, "here")
    keys = config_from_hf(family, config_json, "here", {})
    narrowest = find_family(load_config(**keys), "")
    assert narrowest.model_type == NARROWER.get(case, family.model_type)
