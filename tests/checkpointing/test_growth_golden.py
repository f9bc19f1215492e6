"""Growth bit for bit as TokenFormer's own programs grow (tests/golden/tokenformer)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.layers.model import Model
from MaxText.training.state import TrainState
from tests.checkpointing.growing import by_name, grow_by, logits_of, program, save
from tests.layers.test_golden_tokenformer import GOLDEN, Golden, config_of, relative

CASES = [
    ("jax_a", {"growth_mode": "random"}, "params_grown_random"),
    ("jax_a", {"load_parameters_zero_init": True}, "params_grown_zero"),
    ("jax_b", {"growth_mode": "random"}, "params_grown_random"),
    ("jax_b", {"growth_mode": "zero"}, "params_grown_zero"),
    ("torch_a", {"growth_mode": "random"}, "params_grown"),
]


def larger(case, **keys):
    theirs = json.loads((GOLDEN / f"{case}.json").read_text())["grown_config"]
    sizes = {name: theirs[name] for name in theirs if name.endswith("slot_num")}
    return config_of(case, **sizes, **keys)


def small_run(folder, case, golden):
    config = config_of(case, async_checkpointing=False)
    params = jax.tree.map(jnp.asarray, golden.parameters("params_small"))
    return save(folder, config, TrainState(jnp.int32(1), params, ()))


def grown(tmp_path, case, golden, **keys):
    run = small_run(tmp_path / "small", case, golden)
    config = larger(case, load_parameters_path=str(run), **keys)
    made = program(config)
    params = jax.tree.map(jnp.asarray, golden.parameters("params_large_init"))
    fresh = TrainState(made.state.step, params, made.state.opt_state)
    return grow_by(tmp_path / "large", config, fresh)


@pytest.mark.parametrize(("case", "keys", "folder"), CASES)
def test_grown_parameters(tmp_path, case, keys, folder):
    golden = Golden(case)
    result = grown(tmp_path, case, golden, **keys)
    theirs = by_name(golden.parameters(folder))
    assert result.params.keys() == theirs.keys()
    for name, array in result.params.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert result.start.how == "growth"
    assert int(result.start.state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(result.start.state.opt_state))
    if case == "jax_b":  # untied: no table that the program rounds for its logits
        name = folder.removeprefix("params_")
        ours = logits_of(
            Model(result.settled.config.model), result.start.state.params, golden.batch
        )
        assert relative(ours, golden.arrays[f"{name}/logits"]) < 1e-5


@pytest.mark.parametrize("case", ["jax_a", "jax_b", "torch_a"])
def test_the_function_is_kept(tmp_path, case):
    golden = Golden(case)
    result = grown(tmp_path, case, golden)
    assert result.settled.config.model != larger(case).model or case == "jax_b"
    ours = logits_of(Model(result.settled.config.model), result.start.state.params, golden.batch)
    assert relative(ours, golden.logits) < 1e-5
    # New slots are not all zero: the values are fresh.
    fresh = by_name(golden.parameters("params_large_init"))
    for name, array in result.params.items():
        if name.endswith("values/kernel"):
            old = by_name(golden.parameters("params_small"))[name].shape[1]
            np.testing.assert_array_equal(array[:, old:], fresh[name][:, old:])
            assert np.all(np.any(array[:, old:], axis=-1))
