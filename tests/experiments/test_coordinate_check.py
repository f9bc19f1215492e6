"""coord_check.py: flat under mup, sloped under standard, for the styles of all families."""

import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.errors import UserError
from MaxText.experiments import coordinate_check
from MaxText.experiments.coordinate_check import CheckPlan, Quantity, check_size, fit_slope

FAMILIES = {
    "gpt2": {},
    "llama2": {"use_qk_norm": True},
    "gpt_neox": {},
    "tokenformer": {"slot_num": 512},
    "muddformer": {"mlp_dim_multiple": 8},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_mlp_dim": 1024},
}
SIZES = {
    "base_emb_dim": 512,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "head_dim": 64,
    "base_mlp_dim": 1024,
    "base_num_decoder_layers": 2,
    "dataset_type": "synthetic",
    "steps": 3,
    "learning_rate": 0.01,
    # As in muP: with init_std 0.02 at width 64, activations after three steps are products of three
    # updates, and vary between seeds by more than between widths.
    "weight_init": "fan_in",
}


def config_of(family, parametrization, **keys):
    keys = SIZES | FAMILIES[family] | {"parametrization": parametrization} | keys
    if "slot_num" in keys:
        del keys["base_mlp_dim"]
    return load_config(decoder_block="llama2" if family == "experts" else family, **keys)


def plan_of(*widths, depths=(), seeds=2, tolerance=0.1):
    return CheckPlan(widths, depths, range(seeds), num_steps=3, tolerance=tolerance)


def failures(config, plan, size="width"):
    quantities = check_size(config, plan, size, lambda line: None)
    assert len(quantities) > 8
    return [quantity.label for quantity in quantities if not quantity.passes(plan.tolerance)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    # Fewer and narrower models than by default, so a wider tolerance.
    plan = plan_of(64, 128, 256, seeds=5, tolerance=0.15)
    assert not failures(config_of(family, "mup"), plan)
    quantities = check_size(config_of(family, "standard"), plan_of(64, 256), "width", print)
    slopes = {quantity.label: quantity.slope() for quantity in quantities}
    assert any(
        slope.low > 0.15
        for label, slope in slopes.items()
        if label.startswith("change of layers/*")
    )


@pytest.mark.slow
def test_depth():
    plan = plan_of(64, depths=(2, 4, 8), tolerance=0.2)
    assert not failures(config_of("llama2", "completep"), plan, "depth")
    quantities = check_size(config_of("llama2", "standard"), plan, "depth", print)
    assert any(quantity.slope().low > 0.2 for quantity in quantities)


def test_widths_differ_in_all_sizes():
    plan = plan_of(16, 32)
    configs = coordinate_check.models_of(config_of("experts", "mup"), plan, "width")
    sizes = [
        (
            config.model.shape.dimensions.emb_dim,
            config.model.shape.dimensions.num_query_heads,
            config.model.shape.dimensions.head_dim,
            config.model.mixture_of_experts.moe_mlp_dim,
        )
        for config in configs.values()
    ]
    assert sizes == [(16, 2, 8, 32), (32, 4, 8, 64)]
    assert [config.model.depth_ratio for config in configs.values()] == [1, 1]
    base_shapes = [config.model.at_base_shape.shape for config in configs.values()]
    assert base_shapes[0] == base_shapes[1]
    config = config_of("llama2", "mup", layer_pattern="AB", layer_kinds={"A": {}, "B": {}})
    with pytest.raises(UserError, match=r"depth 3: layer_pattern=AB"):
        coordinate_check.models_of(config, plan_of(16, 32, depths=(2, 3)), "depth")


@pytest.mark.parametrize(
    ("num_kv_heads", "expected"),
    [
        (8, [(2, 2), (4, 4), (16, 16)]),
        (4, [(2, 1), (4, 2), (16, 8)]),
        # Two heads at the smallest width: no four of them can share one.
        (2, [(2, 1), (4, 2), (16, 8)]),
    ],
)
def test_as_many_heads_share_a_kv_head_at_all_widths(num_kv_heads, expected):
    config = config_of("llama2", "mup", base_num_kv_heads=num_kv_heads)
    configs = coordinate_check.models_of(config, plan_of(16, 32, 128), "width")
    dimensions = [config.model.shape.dimensions for config in configs.values()]
    assert [(sizes.num_query_heads, sizes.num_kv_heads) for sizes in dimensions] == expected


@pytest.mark.parametrize("mixer", ["gated_delta_net", "kda"])
def test_heads_of_delta_rules_grow_with_the_width(mixer):
    heads = {"linear_num_key_heads": 2} if mixer == "gated_delta_net" else {}
    config = config_of("llama2", "mup", mixer=mixer, linear_num_value_heads=2, **heads)
    configs = coordinate_check.models_of(config, plan_of(256, 512, 1024), "width")
    heads = [config.model.recurrent.linear_num_value_heads for config in configs.values()]
    assert heads == [1, 2, 4]


def test_slopes_are_those_of_least_squares():
    x, y = np.log([64, 64, 128, 256]), np.log([2.0, 2.2, 3.9, 8.0])
    slope = fit_slope(x, y)
    design = np.stack([x, np.ones(4)], 1)
    solution, residual, *_ = np.linalg.lstsq(design, y)
    error = np.sqrt(residual[0] / 2 * np.linalg.inv(design.T @ design)[0, 0])
    np.testing.assert_allclose(slope.slope, solution[0])
    np.testing.assert_allclose(slope.high - slope.slope, 4.302653 * error, rtol=1e-6)  # t, 2 df


@pytest.mark.parametrize(
    ("name", "is_change", "growth", "passes"),
    [
        ("layers/*/output", True, 1.0, True),
        ("layers/*/output", True, 2.0, False),
        ("layers/*/output", True, 0.5, False),
        ("head/output", True, 0.5, True),
        ("layers/*/self_attention/scores", False, 2.0, False),
        ("layers/*/output", True, np.nan, False),
    ],
)
def test_verdict(name, is_change, growth, passes):
    rms = {64: [1.0, 1.01], 128: [growth, growth * 1.01]}
    quantity = Quantity(name, is_change, rms)
    assert quantity.passes(0.05) == passes
    assert not quantity.is_uncertain(0.05)


def test_wide_intervals_do_not_pass():
    noisy = Quantity("layers/*/output", True, {64: [1.0, 1.5], 128: [1.5, 1.0]})
    assert noisy.slope().slope == pytest.approx(0.0)
    assert not noisy.passes(0.05)
    assert noisy.is_uncertain(0.05)
    assert noisy.passes(5.0)
    # Logits may shrink, but not for certain.
    shrinking = Quantity("head/output", False, {64: [1.0, 1.5], 128: [0.1, 0.15]})
    assert shrinking.passes(0.05)


def test_check_of_one_model(tmp_path):
    """The whole program on a tiny model, whose changes grow under standard."""
    lines = []
    config = config_of("llama2", "standard", vocab_size=32, base_num_decoder_layers=1)
    assert not coordinate_check.run_check(config, plan_of(16, 64), tmp_path, lines.append)
    assert (tmp_path / "coordinates_width.png").stat().st_size > 1000
    assert lines[-1].startswith("FAILED: ")
    assert any("change of layers/*/output" in line for line in lines)
