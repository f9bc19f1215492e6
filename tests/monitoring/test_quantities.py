"""Sizes of a run: tokens and operations of updates, and how they are printed."""

import math

import pytest

from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage
from MaxText.layers.model import Model
from MaxText.monitoring.flops import count_flops
from MaxText.monitoring.peak_flops import PeakFlops
from MaxText.monitoring.quantities import Quantities
from tests.small_models import tiny_config

WINDOW = 16
# Short rows first, then whole windows, then more of them.
STAGES = BatchPlan((Stage(0, 4, 8), Stage(3, 4, WINDOW), Stage(5, 6, WINDOW)), WINDOW)
CONSTANT = BatchPlan.constant(4, WINDOW)


def quantities(plan, num_updates=8, num_devices=2, **keys):
    config = tiny_config(**keys)
    peak = PeakFlops(1.0, "a data sheet")
    return Quantities(Model(config.model), config.batch, plan, num_devices, num_updates, peak)


@pytest.mark.parametrize("plan", [CONSTANT, STAGES], ids=["constant", "stages"])
def test_sums_over_updates(plan):
    ours = quantities(plan)
    tokens, flops = 0, 0.0
    for step in range(8):
        assert ours.tokens_before(step) == tokens
        assert ours.flops_before(step) == flops
        tokens += ours.tokens(step)
        per_token = count_flops(ours.model, plan.at(step).length).per_token
        assert ours.tflops_per_device(step) == per_token * ours.tokens_per_device(step) / 1e12
        flops += ours.tokens(step) * per_token
    assert ours.tokens_of_run == ours.tokens_before(8) == tokens
    assert ours.flops_of_run == ours.flops_before(8) == flops


def test_tokens_by_hand():
    ours = quantities(STAGES)
    assert [ours.tokens_before(step) for step in (0, 1, 3, 5, 6)] == [0, 64, 192, 320, 416]
    assert ours.tokens_per_device(6) == 48
    # Rows of half the length have half the attention.
    short, whole = ours.flops(0), ours.flops(3)
    assert whole.weights == short.weights
    assert whole.attention == 2 * short.attention


@pytest.mark.parametrize(
    ("keys", "formula"),
    [
        ({}, "+ 6 x layers x heads x head_dim x length = 6 x {P} + 6 x 3 x 4 x 8 x 16"),
        (
            {"mlm_training": True},
            "+ 12 x layers x heads x head_dim x length = 6 x {P} + 12 x 3 x 4 x 8 x 16",
        ),
    ],
    ids=["causal", "both directions"],
)
def test_the_printed_formula_gives_the_printed_number(keys, formula):
    ours = quantities(CONSTANT, **keys)
    lines = " ".join(ours.describe().split())
    count = ours.flops(0)
    P = count.matmul_parameters
    # A layer of 32 x (4 + 2 x 2 + 4) x 8 and 3 x 32 x 64, three times, and the head.
    assert P == 3 * (32 * 96 + 3 * 32 * 64) + 32 * 64
    numbers = formula.format(P=P)
    assert f"FLOPs per token = 6 x matmul parameters {numbers} = {count.per_token:,.0f}" in lines
    summands = numbers.partition("= ")[2].split(" + ")
    by_hand = sum(math.prod(map(int, summand.split(" x "))) for summand in summands)
    assert by_hand == count.per_token


def test_layers_that_differ_have_no_formula_of_their_sizes():
    keys = {"attention_types": [[["global", "local", "linear"], 1]], "head_qk": True}
    ours = quantities(CONSTANT, **keys)
    count = ours.flops(0)
    numbers = f"6 x {count.matmul_parameters} + {count.attention:.0f} = {count.per_token:,.0f}"
    assert f"by kind of layer = {numbers}" in " ".join(ours.describe().split())
    assert count.per_token == 6 * count.matmul_parameters + count.attention


def test_sums_over_depth_are_in_the_printed_formula():
    ours = quantities(CONSTANT, decoder_block="denseformer", scan_layers=False)
    lines, count = " ".join(ours.describe().split()), ours.flops(0)
    # Of 2, 3 and 4 outputs, the embedding among them.
    assert " + 6 x outputs summed x width = " in lines
    assert f"16 + 6 x 9 x 32 = {count.per_token:,.0f}" in lines
    assert count.per_token == 6 * count.matmul_parameters + 6 * 3 * 4 * 8 * 16 + 6 * 9 * 32
