"""Runs that start from a Hugging Face checkpoint."""

import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.schema import flatten
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.conversion.hf_import import HFWeights
from MaxText.errors import UserError
from MaxText.inference import checkpoint_config
from tests.checkpointing.small_state import start as start_run
from tests.conversion.running import run as convert
from tests.conversion.small_folders import muddformer, random, tokenformer, write
from tests.growth.growing import by_name, program


def start(folder, path, config):
    """Starts a run: (Start, lines)."""
    made, section = program(config), CheckpointingConfig(load_parameters_path=path)
    return start_run(folder, section, made.abstract, flatten(config), made.random_state)


def config_of(weights, **keys):
    training = {"dataset_type": "synthetic", "dtype": "float32", "scan_layers": True}
    return load_config(**(weights.keys | training | {"remat_policy": "none", "steps": 10} | keys))


@pytest.mark.parametrize("prefix", ["hf:", ""])
def test_the_parameters_are_those_of_the_folder(prefix, tmp_path):
    folder = write(tmp_path / "hf", *random("qwen3", "bfloat16"))
    weights = HFWeights(folder)
    config = config_of(weights, rope_max_timescale=20_000.0)
    result, lines = start(tmp_path / "run", f"{prefix}{folder}", config)
    for name, found in by_name(result.state.params).items():
        # Stored in bfloat16, trained in float32: every number is kept.
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, weights.read(name).astype(np.float32))
    assert (result.first_step, result.how, result.folder) == (0, "parameters", str(folder))
    assert result.changes == {"rope_max_timescale": ("10000.0", "20000.0")}
    assert any("bfloat16 -> float32" in line for line in lines)


def test_layers_that_differ(tmp_path):
    folder = write(tmp_path / "hf", *muddformer("muddformer", "bfloat16"))
    weights = HFWeights(folder)
    result, _ = start(tmp_path / "run", str(folder), config_of(weights, scan_layers=False))
    params = by_name(result.state.params)
    for name in ("layers/1/mlp/wo/kernel", "connections/after/2/wi/kernel"):
        np.testing.assert_array_equal(params[name], weights.read(name).astype(np.float32))
    keys = {"dense_first_layer_norms": "each", "dynamic_dense_last_layer_expand": 1}
    config = config_of(weights, scan_layers=False, **keys)
    with pytest.raises(UserError) as caught:
        start(tmp_path / "other", str(folder), config)
    for words in ("dense_first_layer_norms: one -> each", "last_layer_expand: 4 -> 1"):
        assert words in str(caught.value)


def test_a_folder_of_another_model(tmp_path):
    folder = write(tmp_path / "hf", *random("qwen3"))
    config = config_of(HFWeights(folder), base_mlp_dim=48, use_qk_norm=False)
    with pytest.raises(UserError) as caught:
        start(tmp_path / "run", f"hf:{folder}", config)
    for words in ("base_mlp_dim: 24 -> 48", "use_qk_norm: true -> false", f"from=hf:{folder}"):
        assert words in str(caught.value)


def test_an_imported_folder_is_no_run_to_resume(tmp_path):
    folder = write(tmp_path / "hf", *random("qwen3"))
    convert(f"from=hf:{folder}", f"to={tmp_path / 'imported'}")
    config = config_of(HFWeights(folder))
    with pytest.raises(UserError, match=r"load_parameters_path=.*/im"):
        start(tmp_path / "imported", "", config)
    result, _ = start(tmp_path / "run", str(tmp_path / "imported"), config)
    assert result.how == "parameters"


def test_a_window_is_measured_against_the_run(tmp_path):
    config_json, tensors = random("mistral")
    folder = write(tmp_path / "hf", config_json | {"sliding_window": 16}, tensors)
    weights = HFWeights(folder, {"max_target_length": 16})
    _, lines = start(tmp_path / "a", f"hf:{folder}", config_of(weights))
    assert "mixer" not in "\n".join(lines)
    _, lines = start(tmp_path / "b", f"hf:{folder}", config_of(weights, max_target_length=32))
    assert "mixer: local_attention -> attention" in "\n".join(lines)


def test_programs_find_the_model_in_a_folder(tmp_path):
    slots = {"qkv_slot_num": 12, "proj_slot_num": 12, "ffn_slot_num": 44}
    folder = write(tmp_path / "hf", *tokenformer(**slots))
    path = f"load_parameters_path=hf:{folder}"
    model = checkpoint_config.load([path], "decode.py").config.model
    places = [model.pattention.num_slots(place, 16) for place in ("qkv", "proj", "ffn")]
    assert places == [12, 12, 44]
    assert (model.shape.vocab_size, model.position.rotary_pct) == (40, 0.25)
    assert model.pattention.score_norm_epsilon == 0
    # train.py takes it from such a folder only: a run's path is weights for the model asked for.
    taken, other = (
        checkpoint_config.for_training([given, "dataset_type=synthetic"], "train.py").config.model
        for given in (path, "load_parameters_path=run")
    )
    assert (taken.shape, taken.pattention) == (model.shape, model.pattention)
    assert other.shape != model.shape


def test_weights_that_are_not_finite(tmp_path, monkeypatch):
    config_json, tensors = random("qwen3")
    folder = write(tmp_path / "hf", config_json, tensors)
    config = config_of(HFWeights(folder))
    # As a diverged run would leave them.
    with monkeypatch.context() as patch:
        patch.setattr("MaxText.conversion.hf_import.require_finite", lambda *arguments: None)
        tensors["model.norm.weight"][3] = np.inf
        write(folder, config_json, tensors)
        convert(f"from=hf:{folder}", f"to={tmp_path / 'run'}")
    for path, problem in {
        f"hf:{folder}": r"model\.safetensors: model\.norm\.weight has 0 NaN and 1 infinite",
        str(tmp_path / "run"): r"load_parameters_path=.*/0.*: decoder_norm/scale has NaN or inf",
    }.items():
        with pytest.raises(UserError, match=problem):
            start(tmp_path / "new", path, config)
