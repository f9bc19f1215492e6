"""Budgets met by changing one key."""

import pytest

from MaxText.config.schema import Config, flatten
from MaxText.errors import UserError
from MaxText.experiments import solver
from MaxText.experiments.solver import budget_metric, cost, solve
from MaxText.layers.assembly.model import Model
from tests.refusals import refused
from tests.small_models import tiny_config


def solved_chain(stages, match, solve_for, factor, *, tolerance=0.02, seconds=()):
    """Solves for `factor` times what the stages have; gives (budget, stages, amount)."""
    amount = budget_metric(match, 1, seconds)
    budget = amount(stages) * factor
    solution = solve("it", stages, solve_for, amount, budget, match=match, tolerance=tolerance)
    return budget, solution, amount(solution)


def solved(config, match, solve_for, factor, **options):
    """(budget, configuration, changes, amount) of one configuration."""
    budget, (solution,), amount = solved_chain((config,), match, solve_for, factor, **options)
    keys_before, keys_after = flatten(config), flatten(solution)
    changes = {
        name: (keys_before[name], keys_after[name])
        for name in keys_before
        if keys_before[name] != keys_after[name]
    }
    return budget, solution, changes, amount


def tokenformer(**keys) -> Config:
    slotted = {"base_num_kv_heads": 4, "head_dim": -1, "slot_num": 48, "vocab_size": 256}
    return tiny_config("tokenformer", **(slotted | keys))


def test_costs_are_those_of_the_model_and_its_batches():
    config = tiny_config(per_device_batch_size=2, gradient_accumulation_steps=3, steps=7)
    stage = cost(config, num_devices=4)
    assert stage.parameters == Model(config.model).num_parameters
    assert (stage.tokens, stage.steps) == (7 * 2 * 3 * 4 * 16, 7)
    # 6 operations for each weight of a product, and causal attention over 16 tokens.
    weights = 64 * 32 + 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    attention = 12 * 3 * 4 * 8 * 16 / 2
    assert stage.flops == stage.tokens * (6 * weights + attention)
    with pytest.raises(UserError, match=r"per_device_batch_size=0\.5 x 3 .*1\.5"):
        cost(tiny_config(per_device_batch_size=0.5), num_devices=3)


@pytest.mark.parametrize(
    ("block", "match", "solve_for", "factor"),
    [
        ("gpt2", "params", "width", 2.5),
        ("llama2", "flops", "width", 0.6),
        ("gpt_neox", "flops", "steps", 3.3),
        ("llama2", "tokens", "steps", 70.0),
        ("llama2", "params", "vocab_size", 1.3),
        ("tokenformer", "params", "slots", 2.7),
        ("tokenformer", "flops", "slots", 2.7),
        ("tokenformer", "params", "width", 2.0),
        ("muddformer", "params", "width", 1.7),
        ("muddformer_prepost", "flops", "depth", 1.7),
    ],
)
def test_budgets_are_met(block, match, solve_for, factor):
    keys = {"per_device_batch_size": 1}
    if block.startswith("muddformer"):  # layers differ: widths of the feed-forward in multiples
        keys |= {"vocab_size": 4096, "scan_layers": False, "dense_conn": True}
        keys |= {"dynamic_dense_hidden_round": "none", "mlp_dim_multiple": 8}
    config = tokenformer(**keys) if block == "tokenformer" else tiny_config(block, **keys)
    tolerance = 0.2 if solve_for == "depth" else 0.02  # layers are coarse
    budget, solution, changes, amount = solved(
        config, match, solve_for, factor, tolerance=tolerance
    )
    assert amount == getattr(cost(solution, 1), "parameters" if match == "params" else match)
    assert amount == pytest.approx(budget, rel=tolerance)
    size_key = "slot_num" if block == "tokenformer" else "base_mlp_dim"
    changed = {
        "width": {"base_emb_dim", size_key},
        "vocab_size": {"vocab_size"},
        "slots": {"slot_num"},
        "steps": {"steps", "learning_rate_schedule_steps"},
        "depth": {"base_num_decoder_layers"},
    }[solve_for]
    assert set(changes) <= changed
    keys_before, keys_after = flatten(config), flatten(solution)
    if solve_for == "steps":
        assert keys_after["learning_rate_schedule_steps"] == keys_after["steps"]
    if solve_for == "width":  # the rest leaves its proportion by a fifth at most
        assert keys_after[size_key] == pytest.approx(
            keys_before[size_key] * (keys_after["base_emb_dim"] / keys_before["base_emb_dim"])
            if size_key == "base_mlp_dim"
            else keys_before[size_key],
            rel=0.2,
        )
    assert not solver.validation_errors(solution)


def test_a_letter_forbids_a_size():
    kinds = {"A": {"base_num_query_heads": 8, "base_num_kv_heads": 8}}
    keys = {"layer_pattern": "A", "layer_kinds": kinds, "head_dim": -1}
    config = tiny_config(**keys, position_embedding="none")
    assert solver.with_overrides(config, {"base_emb_dim": 40}) is not None
    assert solver.with_overrides(config, {"base_emb_dim": 36}) is None


def test_width_keeps_to_multiples_and_to_the_feed_forward_s_proportion():
    config = tiny_config(base_emb_dim=128, base_mlp_dim=384, vocab_size=4096)
    shape = solved(config, "params", "width", 4.0)[1].model.shape
    assert shape.base_emb_dim % 8 == 0
    assert shape.base_mlp_dim / shape.base_emb_dim == pytest.approx(3, rel=0.2)
    assert (shape.base_num_query_heads, shape.head_dim) == (4, 8)
    # Where the size of a head follows the width, it stays even.
    heads = {"base_num_query_heads": 6, "base_num_kv_heads": 6, "head_dim": -1}
    config = tiny_config(base_emb_dim=192, base_mlp_dim=512, **heads)
    for factor in (0.5, 1.5):
        dimensions = solved(config, "params", "width", factor)[1].model.shape.dimensions
        assert dimensions.emb_dim == dimensions.head_dim * 6
        assert dimensions.head_dim % 2 == 0


def test_depth_steps_over_small_budgets_and_says_so():
    config = tiny_config()
    layer = cost(tiny_config(base_num_decoder_layers=4), 1).parameters - cost(config, 1).parameters
    share = layer / cost(config, 1).parameters
    budget, _, changes, amount = solved(config, "params", "depth", 1 + 2 * share)
    assert (changes, amount) == ({"base_num_decoder_layers": (3, 5)}, budget)
    message = "base_num_decoder_layers=5.*base_num_decoder_layers=6.*solve_for=width.*tolerance="
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        solved(config, "params", "depth", 1 + 2.5 * share)
    tolerance = float(str(caught.value).partition("tolerance=")[2].rstrip("."))
    _, _, changes, _ = solved(config, "params", "depth", 1 + 2.5 * share, tolerance=tolerance)
    assert changes["base_num_decoder_layers"][1] in (5, 6)


def test_values_that_a_rule_forbids_are_passed_over():
    config = tiny_config("gpt2", base_num_query_heads=4, base_num_kv_heads=4, head_dim=8)
    _, solution, *_ = solved(config, "params", "base_num_query_heads", 1.1, tolerance=0.1)
    assert solution.model.shape.base_num_query_heads % 4 == 0


@pytest.mark.parametrize(
    ("config", "match", "solve_for", "factor", "message"),
    [
        (tiny_config, "tokens", "width", 2.0, "width .*tokens.*solve_for=steps"),
        (tiny_config, "params", "log_period", 2.0, "log_period"),
        (tiny_config, "params", "trainable_position_size", 1.1, "trainable_position_size=-1"),
        (tiny_config, "params", "slots", 2.0, "slots.*solve_for=width or solve_for=depth"),
        (tokenformer, "params", "base_mlp_dim", 2.0, "base_mlp_dim.*or solve_for=slots"),
        (lambda: tokenformer(head_dim=8), "params", "width", 2.0, r"head_dim=-1, .*_for=slots\."),
        (tiny_config, "params", "base_mlp_dim", 1e-6, "base_mlp_dim=1 gives"),
        (tiny_config, "params", "base_mlp_dim", 1e12, "base_mlp_dim=1048576 gives"),
        (tiny_config, "time", "steps", 0.06, "seconds cannot be met"),
    ],
)
def test_what_cannot_be_solved(config, match, solve_for, factor, message):
    refused(message, solved, config(), match, solve_for, factor, seconds=(0.25,))


def test_what_meets_the_budget_stays_as_it_is():
    config = tiny_config()
    for factor in (1.0, 1.0001):
        _, solution, changes, _ = solved(config, "params", "width", factor)
        assert (solution, changes) == (config, {})
    # So does a schedule of its own length.
    config = tiny_config(learning_rate_schedule_steps=50)
    assert solved(config, "tokens", "steps", 2.0)[2] == {"steps": (10, 20)}


def test_growing_batches_are_counted():
    config = tiny_config(
        per_device_batch_size=4,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=2,
        per_device_batch_size_increment=1,
        global_rampup_samples=16,
        steps=20,
    )
    budget, solution, _, amount = solved(config, "tokens", "steps", 3.0)
    assert amount == pytest.approx(budget, rel=0.02)
    assert solution.run.steps < 60  # later steps see more than the first ones


def test_slots_of_parts_keep_their_proportion():
    config = tokenformer(slot_num=-1, ffn_slot_num=96)
    _, solution, changes, _ = solved(config, "params", "slots", 2.0)
    slots = solution.model.pattention
    assert changes["slot_num"][0] == -1
    assert slots.slot_num > 32
    assert slots.ffn_slot_num == pytest.approx(96 / 32 * slots.slot_num, abs=2)
    assert (slots.qkv_slot_num, slots.proj_slot_num) == (-1, -1)


CHAIN = tuple(
    tokenformer(slot_num=number, steps=count) for number, count in ((16, 15), (32, 10), (64, 10))
)


@pytest.mark.parametrize("match", ["flops", "tokens", "time"])
def test_steps_of_all_stages_are_scaled_alike(match):
    budget, solution, amount = solved_chain(CHAIN, match, "steps", 3.0, seconds=(0.1, 0.2, 0.4))
    assert amount == budget
    assert [stage.run.steps for stage in solution] == [45, 30, 30]
    assert [stage.schedule.learning_rate_schedule_steps for stage in solution] == [45, 30, 30]
    by_hand = {
        "flops": sum(cost(stage, 1).flops for stage in solution),
        "tokens": 105 * cost(CHAIN[0], 1).tokens / 15,
        "time": 45 * 0.1 + 30 * 0.2 + 30 * 0.4,
    }
    assert amount == pytest.approx(by_hand[match])


def test_every_stage_keeps_a_step():
    _, solution, _ = solved_chain(CHAIN, "tokens", "steps", 3 / 35)
    assert [stage.run.steps for stage in solution] == [1, 1, 1]
    refused("steps=3 gives", solved_chain, CHAIN, "tokens", "steps", 2 / 35)


def test_slots_of_all_stages_are_scaled_alike_and_the_last_has_the_parameters():
    budget, solution, _ = solved_chain(CHAIN, "params", "slots", 2.0)
    slots = [stage.model.pattention.slot_num for stage in solution]
    assert slots[0] * 4 == pytest.approx(slots[2], abs=3)
    assert slots[1] * 2 == pytest.approx(slots[2], abs=1)
    assert cost(solution[-1], 1).parameters == pytest.approx(budget, rel=0.02)
    assert budget == 2 * cost(CHAIN[-1], 1).parameters
