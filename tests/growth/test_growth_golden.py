"""Growth bit for bit as TokenFormer's own programs grow (tests/golden/tokenformer)."""

import jax
import numpy as np
import pytest

from MaxText.config.loading import load
from MaxText.layers.assembly.model import Model
from MaxText.training.state import TrainState
from tests.conversion.golden_models import below, of_tokenformer
from tests.conversion.running import EXACT, parameters_in_run, run
from tests.growth.growing import by_name, grow_by, logits_of, program


def grown(folder, case, *keys):
    """(the large golden model, the run that grew to its size with golden new slots)."""
    small, large = of_tokenformer(case), of_tokenformer(case, "large")
    for golden, name in ((small, "small"), (large, "fresh")):
        path = golden.store(folder / f"their_{name}", golden.parameters)
        run(*golden.arguments, f"from={golden.source}:{path}", f"to={folder / name}")
    more = (
        "scan_layers=true",
        "remat_policy=none",
        "dataset_type=synthetic",
        f"load_parameters_path={folder / 'small'}",
    )
    config = load([f"{folder / 'fresh'}/config.yml", *EXACT, *more, *keys]).config
    state = program(config).random_state(steps=0)
    fresh = TrainState(state.step, parameters_in_run(folder / "fresh"), state.opt_state)
    return large, grow_by(folder / "run", config, fresh)


def check_logits(result, batch, wanted):
    actual = logits_of(Model(result.resolved.config.model), result.start.state.params, batch)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("case", "key", "folder"),
    [
        ("jax_a", "load_parameters_zero_init=true", "grown_zero"),
        pytest.param("jax_b", "growth.mode=random", "grown_random", marks=pytest.mark.slow),
        ("torch_a", "growth.mode=random", "grown"),
    ],
)
def test_grown_parameters(tmp_path, case, key, folder):
    large, result = grown(tmp_path, case, key)
    prefix = f"params_{folder}/" + ("params/" if large.source == "maxtext" else "")
    wanted = by_name(large.converted(tmp_path / "source", below(large.arrays, prefix)))
    assert result.params.keys() == wanted.keys()
    for name, array in result.params.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    assert result.start.how == "growth"
    assert int(result.start.state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(result.start.state.opt_state))
    if case == "jax_b":  # untied: no table that the program rounds for its logits
        check_logits(result, large.batch, large.arrays[f"{folder}/logits"])


@pytest.mark.parametrize("case", ["jax_a", "torch_a"])
def test_function_preserving_growth(tmp_path, case):
    large, result = grown(tmp_path, case)
    check_logits(result, large.batch, large.logits)
    # New slots are not all zero: the values are fresh.
    fresh, small = (by_name(parameters_in_run(tmp_path / name)) for name in ("fresh", "small"))
    for name, array in result.params.items():
        if name.endswith("values/kernel"):
            old = small[name].shape[1]
            np.testing.assert_array_equal(array[:, old:], fresh[name][:, old:])
            assert np.all(np.any(array[:, old:], axis=-1))
