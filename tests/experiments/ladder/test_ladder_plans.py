"""Plans of ladders: sizes, batches, learning rates, and what is refused before anything runs."""

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.schema import flatten
from MaxText.errors import UserError
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.ladder.ladder_plan import plan_lines, solve_rungs
from MaxText.experiments.ladder.learning_rate_sweep import (
    RateOptimum,
    combine_rungs,
    factors_of_round,
    find_optimum,
)
from MaxText.experiments.ladder.rung_sizes import Size, resize
from MaxText.experiments.ladder.rungs import batch_factor, plan_rungs
from MaxText.experiments.machine_shares import split_machine
from MaxText.experiments.solver import cost
from MaxText.experiments.variants import expand_variants

LADDER = (
    "ladder=5",
    "from=1.6e10",
    "to=1.6e12",
    "per_device_batch_size=1",
    "timings=0",
    "head_dim=8",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
)


def planned(*arguments: str):
    """The request, the solved rungs and the issues of a command line."""
    request, problems = parse_args(arguments)
    assert not problems
    variants = expand_variants(request)
    rungs, issues = plan_rungs(request, variants, num_devices=1)
    solved, more_issues = solve_rungs(request, variants, rungs, num_devices=1, hardware=None)
    return request, solved, [*issues, *more_issues]


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ("ladder=4 from=1e13 to=1e16", "ladder=4.*at least 5", "ladder=6 from=1e[+]13 to=1e[+]16"),
        ("ladder=6 from=1e13 to=2e14", "span of compute of at least 30", "from=2e[+]12 to=2e[+]14"),
        ("ladder=6 to=1e16", "from: the FLOPs", "from=1e13"),
        ("ladder=6 from=1e13 to=1e16 match=params", "match=params", "remove match="),
        ("ladder=6 from=1e13 to=1e16 budget=1e9", "budget=", "remove budget="),
        ("from=1e13 to=1e16", "from, to: .*ladder= is missing", "ladder=6"),
        ("lr_sweep=2", "lr_sweep: .*ladder= is missing", "ladder=6"),
        ("ladder=6 from=1e13 to=1e16 sizes=depth aspect=8", "aspect: with sizes=depth", "one"),
        ("sizes=sizes.yml from=1e13", "from: the file", "remove from=, or add ladder=5"),
        ("sizes=sizes.yml ladder=5 from=1e13", "between from= and to=", "ladder=5 from=1e13"),
        ("sizes=sizes.yml ladder=2 from=1e9 to=1e9", "between from= and to=", "ladder=5"),
        (
            "sizes=sizes.yml ladder=2 from=1e9 to=2e9 tokens_per_parameter=9",
            "tokens_per_parameter: .*the FLOPs and the size decide",
            "remove tokens_per_parameter=",
        ),
    ],
)
def test_options_that_make_no_ladder_are_refused(configs, arguments, message, remedy):
    Path("sizes.yml").write_text("[]")
    _, issues = parse_args(arguments.split())
    assert len(issues) == 1
    text = "\n".join(issues[0].lines())
    assert re.search(message, text), text
    assert re.search(remedy, text), text


def test_a_ladder_may_have_one_arm_and_has_two_seeds(configs):
    request, problems = parse_args(["a.yml", *LADDER])
    assert not problems
    assert request.seeds == (0, 1)
    assert [variant.label for variant in expand_variants(request)] == ["a"]


def test_rungs_have_equal_flops_and_one_shape_for_all_arms(configs):
    request, rungs, issues = planned("a.yml", "b.yml", *LADDER)
    assert not issues
    for index, solved in enumerate(rungs):
        compute = solved.rung.compute
        assert 1 / 1.5 <= compute / (1.6e10 * 100 ** (index / 4)) <= 1.5
        sizes = {Size.of(variant.config) for variant in solved.rung.variants}
        assert len(sizes) == 1
        (size,) = sizes
        assert size.width % 8 == 0
        assert 1 / 1.5 <= size.width / size.depth / 16 <= 1.5  # a.yml: width 32, 2 layers
        for label in ("a", "b"):
            total = solved.planned[label].total("flops")
            assert total == pytest.approx(compute, rel=request.tolerance)
        baseline = solved.planned["a"]
        ratio = baseline.total("tokens") / baseline.stages[-1].parameters
        assert ratio == pytest.approx(20, rel=request.tolerance)
        assert size.depth >= 2
    parameters = [solved.planned["a"].stages[-1].parameters for solved in rungs]
    assert parameters == sorted(parameters)
    text = "\n".join(plan_lines(request, rungs, 1))
    assert "20 runs of" in text
    assert "Power: such a ladder calls a speed-up of" in text


def test_resizing_keeps_the_width_of_heads_and_proportions(configs):
    request, _ = parse_args(["c.yml", *LADDER, "base_num_kv_heads=2"])
    (variant,) = expand_variants(request)
    resized = resize(variant, Size(width=96, depth=5))
    assert resized is not None
    assert len(resized.stages) == 2
    for stage in resized.stages:
        keys = flatten(stage)
        assert keys["base_emb_dim"] == 96
        assert keys["base_num_decoder_layers"] == 5
        assert keys["base_mlp_dim"] == 192
        assert (keys["base_num_query_heads"], keys["base_num_kv_heads"]) == (12, 6)
        assert keys["head_dim"] == 8
    # The cost of a stage does not change with the keys that stay.
    assert cost(resized.config, 1).parameters > cost(variant.config, 1).parameters


def test_batches_and_learning_rates_follow_their_rules(configs):
    arguments = ("a.yml", "opt_type=adamw", "batch_exponent=0.5", *LADDER)
    _, rungs, issues = planned(*arguments)
    assert not issues
    start = rungs[0].planned["a"].total("tokens")
    factors = []
    for solved in rungs:
        config = solved.rung.variants[0].config
        factor = config.batch.per_device_batch_size
        growth = solved.planned["a"].total("tokens") / start
        # Whole sequences, and from 4 on three binary digits.
        assert abs(factor - growth**0.5) <= max(0.5, growth**0.5 / 8) * 1.02
        assert factor == int(factor)
        rate = 1e-2 * (32 / Size.of(config).width) * factor**0.5 * growth**-0.3
        assert flatten(config)["learning_rate"] == pytest.approx(rate, rel=0.02)
        # The same validation text at every rung.
        assert flatten(config)["eval_per_device_batch_size"] == 1
        factors.append(factor)
    assert factors[-1] > factors[0] == 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("per_device_batch_size=8", [1.0, 1.25, 1.5, 2.0, 2.5, 5.0, 10.0]),
        ("per_device_batch_size=6", [1.0, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0]),
        ("per_device_batch_size=0.5", [1.0, 1.0, 1.0, 2.0, 2.0, 5.0, 10.0]),
        (
            "per_device_batch_size=8 enable_rampup_batch_size=true per_device_batch_size_start=4 "
            "per_device_batch_size_increment=2",
            [1.0, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0],
        ),
    ],
)
def test_batches_follow_a_power_law_and_stay_whole(configs, sizes, expected):
    request, problems = parse_args(["a.yml", "batch_exponent=1", *LADDER[:3], *sizes.split()])
    assert not problems
    variants = expand_variants(request)
    growths = (1.0, 1.2, 1.4, 1.9, 2.45, 4.9, 9.6)
    assert [batch_factor(request, variants, growth) for growth in growths] == expected


def test_listed_sizes_set_keys_of_all_arms(configs):
    widths = (16, 32, 48, 64, 96)
    lines = [f"- {{base_emb_dim: {w}, base_num_query_heads: {w // 16}}}" for w in widths]
    lines[-1] = lines[-1].replace("}", ", learning_rate: 0.5}")
    Path("sizes.yml").write_text("\n".join(lines).replace("16}", "16, base_num_kv_heads: 1}"))
    arguments = ("base_num_kv_heads=1", "per_device_batch_size=1", "timings=0")
    _, rungs, issues = planned("a.yml", "b.yml", "sizes=sizes.yml", *arguments)
    assert not issues
    assert [Size.of(solved.rung.variants[1].config).width for solved in rungs] == list(widths)
    for solved in rungs:
        planned_run = solved.planned["a"]
        ratio = planned_run.total("tokens") / planned_run.stages[-1].parameters
        assert ratio == pytest.approx(20, rel=0.02)
    assert flatten(rungs[-1].rung.variants[0].config)["learning_rate"] == 0.5
    Path("sizes.yml").write_text("- {base_emb_width: 16}")
    with pytest.raises(UserError, match=r"rung 1: unknown key base_emb_width; nearest:.*emb"):
        planned("a.yml", "sizes=sizes.yml")
    Path("sizes.yml").write_text("- {base_num_decoder_layers: 1}\n- {base_num_decoder_layers: 2}")
    _, rungs, issues = planned("a.yml", "sizes=sizes.yml")
    assert not rungs
    assert "2 rungs: an interval needs at least 5" in remedies(issues)
    assert "a law needs 30" in remedies(issues)


def test_every_size_is_planned_at_every_compute(configs):
    widths = (16, 24, 32, 40, 48)
    lines = [f"- {{base_emb_dim: {width}}}" for width in widths]
    Path("sizes.yml").write_text("\n".join(lines))
    grid = ("ladder=2", "from=2e9", "to=8e9", "per_device_batch_size=2")
    request, rungs, issues = planned("a.yml", "b.yml", "sizes=sizes.yml", *grid)
    assert not issues
    computes = [solved.rung.compute for solved in rungs]
    assert computes == pytest.approx([2e9] * 5 + [8e9] * 5)
    sizes = [Size.of(solved.rung.variants[1].config).width for solved in rungs]
    assert sizes == [*widths, *widths]
    for solved in rungs:
        for label in ("a", "b"):
            total = solved.planned[label].total("flops")
            assert total == pytest.approx(solved.rung.compute, rel=request.tolerance)
    text = "\n".join(plan_lines(request, rungs, 1))
    assert "grid of 10 rungs" in text
    assert "10 pairs of parameters and tokens are too few" in text
    assert "Power" not in text
    Path("sizes.yml").write_text("\n".join(lines[:1:-1]))
    _, rungs, issues = planned("a.yml", "sizes=sizes.yml", *grid)
    assert not rungs
    assert "3 sizes: a parabola needs at least 5" in remedies(issues)
    assert "do not ascend" in remedies(issues)


def remedies(issues) -> str:
    return "\n".join(line for issue in issues for line in issue.lines())


def test_all_problems_of_a_plan_are_told_at_once_with_plans_that_work(configs):
    Path("d.yml").write_text("base_config: b.yml\nlearning_rate: 0.5\n")
    arguments = ["a.yml", "d.yml", *LADDER, "warmup_steps=20000"]
    _, _, issues = planned(*arguments)
    text = remedies(issues)
    assert "differ outside of the model in learning_rate: 0.01 (a); 0.5 (d)" in text
    assert "tune=learning_rate" in text
    assert "within its warm-up of 20,000 steps" in text
    assert "warmup_steps=-1" in text
    _, _, issues = planned("a.yml", "b.yml", *LADDER, "warmup_steps=-1")
    assert not issues
    _, _, issues = planned("a.yml", *LADDER, "warmup_steps=8000", "per_device_batch_size=4")
    (batch,) = set(re.findall(r"per_device_batch_size=\S+(?=,)", remedies(issues[:1])))
    _, _, issues = planned("a.yml", *LADDER, "warmup_steps=8000", batch)
    assert not issues


def test_a_ladder_below_the_smallest_size_names_the_nearest_that_works(configs):
    _, rungs, issues = planned("a.yml", "ladder=5", "from=1e9", "to=1e11", *LADDER[3:])
    assert not rungs
    text = remedies(issues)
    assert "rung 1: the nearest size to 1e+09 FLOPs, width " in text
    options = re.findall(r"(?:from|to)=[^\s,]+", text)[:2]
    _, rungs, _ = planned("a.yml", "ladder=5", *options, *LADDER[3:])
    assert len(rungs) == 5


def test_the_optimum_of_a_sweep_is_that_of_a_parabola():
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    losses = {f: 3.0 + 0.1 * math.log(f / 1.3) ** 2 for f in factors}
    optimum = find_optimum(losses)
    assert optimum.edge == 0
    assert optimum.factor == pytest.approx(1.3)
    # Beside a run that diverged, what was tried.
    assert find_optimum(losses | {2.0: None, 4.0: None}) == RateOptimum(1.0, 0)
    rising = {f: 3.0 + f for f in factors}
    assert find_optimum(rising) == RateOptimum(0.25, -1)
    assert factors_of_round(1, rising) == [0.125, 0.0625]
    assert not factors_of_round(1, losses)
    with pytest.raises(UserError, match=r"smallest one, 0.25 times"):
        factors_of_round(3, rising)
    with pytest.raises(UserError, match=r"diverged.*smaller learning_rate"):
        find_optimum(dict.fromkeys(factors))
    assert combine_rungs([RateOptimum(1.0, 0), RateOptimum(4.0, 0)]) == pytest.approx(2.0)


def test_an_optimum_is_nearer_to_the_best_factor_than_to_one_that_is_worse():
    # Measured with AdamW: the parabola through all five has its minimum below 0.25.
    losses = {0.25: 4.6454, 0.5: 4.5463, 1.0: 4.7352, 2.0: 4.6410, 4.0: 5.0906}
    x = np.log([0.25, 0.5, 1.0])
    curvature, slope, _ = np.polyfit(x, [4.6454, 4.5463, 4.7352], 2)
    expected = math.exp(-slope / (2 * curvature))
    assert 0.5 / math.sqrt(2) < expected < 0.5
    assert find_optimum(losses).factor == pytest.approx(expected)
    assert find_optimum(dict.fromkeys(losses, 4.0)) == RateOptimum(0.25, -1)


def test_a_machine_is_split_into_equal_shares(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 4})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [share.cores for share in split_machine(2, "cpu", 1)] == [(0, 1), (2, 3)]
    gpus = [share.environment["CUDA_VISIBLE_DEVICES"] for share in split_machine(2, "gpu", 4)]
    assert gpus == ["0,1", "2,3"]
    for jobs, platform, message in (
        (6, "cpu", "jobs=6.*5 cores"),
        (3, "gpu", "does not divide the 4 GPUs"),
        (2, "tpu", "cannot share its TPUs"),
    ):
        with pytest.raises(UserError, match=message):
            split_machine(jobs, platform, 4)
