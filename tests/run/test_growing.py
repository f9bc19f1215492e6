"""convert.py grow: a larger model as a run that others start from."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.weight_source import RunWeights
from MaxText.errors import UserError
from MaxText.run.restore import Lineage
from tests.conversion.running import parameters_in_run, run
from tests.conversion.small_folders import random, write
from tests.growth.growing import by_name, config_of, grow_by, logits_of, program, save, stored_in
from tests.refusals import refused
from tests.small_models import random_batch


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run whose only checkpoint holds fresh parameters of 6 slots, and a tokenizer."""
    config = config_of()
    state = dataclasses.replace(program(config).state, step=jnp.int32(1))
    spent = {"spent": {"tokens": 70.0, "flops": 7e3}, "lineage": []}
    folder = save(tmp_path_factory.mktemp("small"), config, state, spent)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder, config, state


def made(small, target, *arguments):
    """Converts as a command line: lines."""
    return run("grow", f"from={small}", f"to={target}", *arguments).splitlines()


def params_of(folder):
    return by_name(parameters_in_run(folder))


def test_the_run_that_is_written(small, tmp_path):
    folder, config, state = small
    target = tmp_path / "large"
    lines = made(folder, target, "slot_num=10")
    for words in (str(stored_in(folder)), "6 -> 10", "24 -> 40", "growth.mode=function_preserving"):
        assert words in lines[0]
    assert any(f"load_parameters_path={target}" in line for line in lines)
    assert (target / "tokenizer" / "tokenizer.json").read_text() == "{}"

    weights = RunWeights(str(target))
    assert weights.stored.metadata.checksums.keys() == {
        f"params/{name}" for name in weights.formats
    }
    assert weights.config.model.pattention.zoom_dim == 6
    (parent,) = weights.metadata["lineage"]
    assert (parent["how"], parent["tokens"], parent["flops"]) == ("growth", 70.0, 7e3)
    assert weights.metadata["spent"] == {"tokens": 0, "flops": 0.0}
    # The same function, by the keys that were written and by those of the checkpoint.
    written = load_config(target / "config.yml", dataset_type="synthetic")
    assert written.model.pattention == weights.config.model.pattention
    batch = random_batch(config, 4)
    before = logits_of(program(config).model, state.params, batch)
    result = grow_by(tmp_path / "run", config_of(slot_num=10, load_parameters_path=str(target)))
    # The zoom is taken over although no key says it again, and slots that are new are known.
    assert result.resolved.existing_slots["layers/mlp/keys/kernel"] == 24
    assert result.resolved.config.model.pattention.zoom_dim == 6
    after = logits_of(result.program.model, result.start.state.params, batch)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
    assert result.start.how == "parameters"
    # The growth is known to the run: in its lineage, which every checkpoint keeps.
    lineage = Lineage.of(result.start, stats=None).ancestors
    assert [ancestor["how"] for ancestor in lineage] == ["growth", "parameters"]
    assert lineage[-1]["growth"] == lineage[0]["growth"] == result.resolved.record


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "slot_num"),
        (["slot_num=6"], "slots"),
        (["slot_num=4"], "growth.allow_truncation=true"),
        (["slot_num=10", "growth.opt_state=reused"], "growth.opt_state"),
        (["slot_num=10", "--verify"], "--verify"),
        (["slot_num=10", "dtype=float32", "max_shard_size=1GB"], "dtype=float32"),
        (["slot_num=10", "growth_mod=zero"], "growth.mode"),
    ],
)
def test_what_is_refused(small, tmp_path, arguments, problem):
    with pytest.raises((UserError, ConfigurationError), match=problem):
        made(small[0], tmp_path / "large", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_run_without_configuration(small, tmp_path):
    _, config, state = small
    source = save(tmp_path / "small", config, state, {"config": {}})
    refused(r"CONFIG\.yml from=", made, source, tmp_path / "large", "slot_num=10")
    assert stored_in(source).try_metadata()["config"] == {}


def test_a_folder_of_hugging_face_becomes_deeper(tmp_path):
    folder = write(tmp_path / "hf", *random("qwen3"))
    weights = HFWeights(folder)
    depth = weights.config.model.shape.base_num_decoder_layers
    layers = f"base_num_decoder_layers={2 * depth}"
    made(f"hf:{folder}", tmp_path / "deep", layers, "growth.mode=random")
    deep = params_of(tmp_path / "deep")
    for name in weights.model.parameters:
        array = weights.read(name)
        expected = array.repeat(2, axis=0) if name.startswith("layers/") else array
        np.testing.assert_array_equal(deep[name], expected, err_msg=name)
    # A run of the same keys grows to the same parameters.
    keys = weights.keys | {"base_num_decoder_layers": 2 * depth, "growth.mode": "random"}
    keys |= {"dataset_type": "synthetic", "steps": 10, "load_parameters_path": f"hf:{folder}"}
    config = load_config(dtype="float32", scan_layers=True, remat_policy="none", **keys)
    grown = grow_by(tmp_path / "run", config)
    for name, array in grown.params.items():
        np.testing.assert_array_equal(array, deep[name].astype(array.dtype), err_msg=name)
    assert grown.start.source == f"parameters grown from {folder}"
    wider = load_config(**{**flatten(config), "base_mlp_dim": 48})
    refused(r"(?s)other shape layers/mlp.*config\.yml", grow_by, tmp_path / "wider", wider)
