"""convert.py grow: a larger model as a run that others start from."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing import description
from MaxText.configuration.loading import configure
from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.saved import flat
from MaxText.conversion import request
from MaxText.conversion.converting import convert
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.run_checkpoint import RunWeights
from MaxText.errors import UserError
from MaxText.monitoring.lineage import line_of
from MaxText.monitoring.run_facts import emit_start
from tests.checkpointing.growing import (
    by_name,
    config_of,
    grow,
    grow_by,
    logits_of,
    program,
    save,
    stored_in,
)
from tests.conversion.small_folders import random, write
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
    lines = []
    convert(request.read(["grow", f"from={small}", f"to={target}", *arguments]), lines.append)
    return lines


def params_of(run):
    weights = RunWeights(str(run))
    return {name: weights.read(name) for name in weights.model.parameters}


def test_the_run_that_is_written(small, tmp_path):
    folder, config, state = small
    target = tmp_path / "large"
    lines = made(folder, target, "slot_num=10")
    assert lines[0] == (
        f"Growth from {stored_in(folder)}: slots 6 -> 10 (attention), 24 -> 40 (feed-forward); "
        "growth_mode=function_preserving"
    )
    assert any(f"load_parameters_path={target}" in line for line in lines)
    assert (target / "tokenizer" / "tokenizer.json").read_text() == "{}"

    weights = RunWeights(str(target))
    assert description.describe(weights.stored).checksums.keys() == {
        f"params/{name}" for name in weights.formats
    }
    assert weights.config.model.pattention.zoom_dim == 6
    (parent,) = weights.metadata["lineage"]
    assert (parent["how"], parent["tokens"], parent["flops"]) == ("growth", 70.0, 7e3)
    assert weights.metadata["spent"] == {"tokens": 0, "flops": 0.0}
    # The same function, by the keys that were written and by those of the checkpoint.
    written = configure(target / "config.yml", dataset_type="synthetic")
    assert written.model.pattention == weights.config.model.pattention
    batch = random_batch(config, 4)
    before = logits_of(program(config).model, state.params, batch)
    result = grow_by(
        tmp_path / "run",
        config_of(slot_num=10, load_parameters_path=str(target)),
    )
    # The zoom is taken over although nobody says it again.
    assert result.settled.config.model.pattention.zoom_dim == 6
    after = logits_of(result.program.model, result.start.state.params, batch)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
    assert result.start.how == "parameters"
    # The growth is known to the run: in its lineage, which every checkpoint keeps, and its events.
    lineage = line_of(result.start)
    assert [ancestor.how for ancestor in lineage] == ["growth", "parameters"]
    assert lineage[-1].growth == lineage[0].growth == result.settled.record
    rows = []
    events = SimpleNamespace(lost=0, emit=lambda kind, **facts: rows.append((kind, facts)))
    emit_start(events, result.start, {})
    assert [kind for kind, _ in rows if kind != "config_change"] == ["start", "growth"]
    facts = rows[-1][1]
    assert (facts["from"], facts["through"]) == (str(stored_in(folder)), str(stored_in(target)))
    assert facts["slots"] == "6 -> 10 (attention), 24 -> 40 (feed-forward)"
    assert facts["zoom_dim"] == 6


@pytest.mark.parametrize("mode", ["function_preserving", "random", "zero"])
def test_the_same_numbers_as_a_run_that_grows(small, tmp_path, mode):
    folder, _, _ = small
    made(folder, tmp_path / "large", "slot_num=10", f"growth_mode={mode}")
    grown = grow(tmp_path / "run", folder, slot_num=10, growth_mode=mode)
    written = params_of(tmp_path / "large")
    for name, array in grown.params.items():
        # Both are drawn by the same seed, in programs that are compiled apart.
        np.testing.assert_allclose(written[name], array, rtol=1e-6, err_msg=name)


def test_depth_and_fewer_slots(small, tmp_path):
    folder, _, state = small
    made(
        folder, tmp_path / "a", "base_num_decoder_layers=3", "slot_num=4", "growth_mode=random",
        "growth_allow_shrinking=true",
    )  # fmt: skip
    name = "layers/self_attention/out/keys/kernel"
    expected = by_name(state.params)[name][[0, 0, 1]][..., :4]
    np.testing.assert_array_equal(params_of(tmp_path / "a")[name], expected)


def test_slots_that_convert_added_are_known_to_training(small, tmp_path):
    folder, _, _ = small
    made(folder, tmp_path / "large", "slot_num=10")
    result = grow(
        tmp_path / "run", tmp_path / "large", slot_num=10, growth_old_slots_learning_rate=0
    )
    assert result.settled.old_slots["layers/mlp/keys/kernel"] == 24
    before = result.params["layers/mlp/values/kernel"]
    batch = random_batch(result.settled.config, 4)
    after = by_name(result.program.step(result.start.state, batch)[0].params)
    after = after["layers/mlp/values/kernel"]
    np.testing.assert_array_equal(after[:, :24], before[:, :24])
    assert np.any(after[:, 24:] != before[:, 24:])  # by weight decay alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "how large"),
        (["slot_num=6"], "has these slots and layers already"),
        (["slot_num=4"], "growth_allow_shrinking=true"),
        (["slot_num=10", "growth_moments=reused"], "is about the training that follows"),
        (["slot_num=10", "--verify"], "has no part in grow"),
        (["slot_num=10", "dtype=float32", "max_shard_size=1GB"], "has no effect on grow"),
        (["slot_num=10", "growth_mod=zero"], "growth_mode"),
    ],
)
def test_what_is_refused(small, tmp_path, arguments, message):
    with pytest.raises((UserError, ConfigurationError), match=message):
        made(small[0], tmp_path / "large", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grow", "from=a", "to=hf:b", "slot_num=2"], "grow makes a run of a run"),
        (["grow", "from=maxtext:a", "to=b", "slot_num=2"], "grow makes a run of a run"),
        (["grwo", "from=a", "to=b"], "Did you mean grow?"),
        (["from=a", "to=b", "slot_num=2"], "convert.py grow makes a larger model"),
    ],
)
def test_command_lines(arguments, message):
    with pytest.raises(UserError) as caught:
        request.read(arguments)
    assert message in str(caught.value)


def test_a_run_without_configuration(small, tmp_path):
    _, config, state = small
    run = save(tmp_path / "small", config, state, {"config": {}})
    with pytest.raises(UserError, match=r"convert.py grow CONFIG\.yml from="):
        made(run, tmp_path / "large", "slot_num=10")
    assert json.loads((stored_in(run).folder / "metadata" / "metadata").read_text())["config"] == {}


def test_a_folder_of_hugging_face_becomes_deeper(tmp_path):
    folder = write(tmp_path / "hf", *random("qwen3"))
    weights = FolderWeights(folder)
    depth = weights.config.model.shape.base_num_decoder_layers
    layers = f"base_num_decoder_layers={2 * depth}"
    made(f"hf:{folder}", tmp_path / "deep", layers, "growth_mode=random")
    deep = params_of(tmp_path / "deep")
    for name in weights.model.parameters:
        array = weights.read(name)
        expected = array.repeat(2, axis=0) if name.startswith("layers/") else array
        np.testing.assert_array_equal(deep[name], expected, err_msg=name)
    # A run of the same keys grows to the same parameters.
    keys = weights.keys | {"base_num_decoder_layers": 2 * depth, "growth_mode": "random"}
    config = configure(
        dataset_type="synthetic",
        steps=10,
        dtype="float32",
        scan_layers=True,
        remat_policy="none",
        load_parameters_path=f"hf:{folder}",
        **keys,
    )
    grown = grow_by(tmp_path / "run", config)
    for name, array in grown.params.items():
        np.testing.assert_array_equal(array, deep[name].astype(array.dtype), err_msg=name)
    assert grown.start.source == f"parameters grown from {folder}"
    wider = configure(**{**flat(config), "base_mlp_dim": 48})
    with pytest.raises(UserError, match=r"(?s)other shape layers/mlp.*to=RUN writes a config\.yml"):
        grow_by(tmp_path / "wider", wider)
