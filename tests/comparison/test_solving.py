"""Budgets met by changing one key."""

import dataclasses
import math

import pytest

from MaxText.comparison import solving
from MaxText.comparison.costs import cost
from MaxText.comparison.request import default_free
from MaxText.comparison.solving import amount_of, solve
from MaxText.configuration.loading import configure
from MaxText.configuration.saved import flat
from MaxText.configuration.schema import Config
from MaxText.errors import UserError
from MaxText.layers.model import Model
from tests.small_models import TINY, tiny_config

BLOCKS = ("gpt2", "llama2", "gpt_neox")


@dataclasses.dataclass
class Solved:
    """The solution of a configuration without stages."""

    config: Config
    changes: dict
    amount: float


def solved_chain(stages, match, free, factor, *, tolerance=0.02, num_devices=1, seconds=()):
    """Solves for `factor` times what the stages have; gives the budget and the solution."""
    amount = amount_of(match, num_devices, seconds)
    budget = amount(stages) * factor
    return budget, solve("it", stages, free, amount, budget, match=match, tolerance=tolerance)


def solved(config, match, free, factor, *, seconds=0.0, **options):
    """As `solved_chain`, of one configuration."""
    budget, found = solved_chain((config,), match, free, factor, seconds=(seconds,), **options)
    return budget, Solved(found.stages[0], found.changes[0], found.amount)


def test_costs_are_those_of_the_model_and_its_batches():
    config = tiny_config(per_device_batch_size=2, gradient_accumulation_steps=3, steps=7)
    of = cost(config, num_devices=4)
    assert of.parameters == Model(config.model).num_parameters
    assert of.tokens == 7 * 2 * 3 * 4 * 16
    assert of.steps == 7
    # 6 operations for each weight of a product, and causal attention over 16 tokens.
    weights = 64 * 32 + 3 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    attention = 12 * 3 * 4 * 8 * 16 / 2
    assert of.flops_per_token == 6 * weights + attention
    assert of.flops == of.tokens * of.flops_per_token


def test_a_batch_that_is_no_whole_number_is_refused():
    with pytest.raises(UserError, match=r"per_device_batch_size=0\.5 x 3 devices = 1\.5"):
        cost(tiny_config(per_device_batch_size=0.5), num_devices=3)


@pytest.mark.parametrize(
    ("block", "match", "free", "factor"),
    [
        *((block, "params", "width", 2.5) for block in BLOCKS),
        ("llama2", "flops", "width", 0.6),
        *((block, "flops", "steps", 3.3) for block in BLOCKS),
        *((block, "tokens", "steps", 70.0) for block in BLOCKS),
        ("llama2", "params", "vocab_size", 1.3),
        ("llama2", "tokens", "steps", 0.6),
    ],
)
def test_budgets_are_met(block, match, free, factor):
    config = tiny_config(block, per_device_batch_size=1)
    budget, found = solved(config, match, free, factor)
    reached = cost(found.config, 1)
    amount = {"params": reached.parameters, "flops": reached.flops, "tokens": reached.tokens}[match]
    assert amount == found.amount
    assert amount == pytest.approx(budget, rel=0.02)
    changed = {"width": {"base_emb_dim", "base_mlp_dim"}, "vocab_size": {"vocab_size"},
               "steps": {"steps", "learning_rate_schedule_steps"}}[free]  # fmt: skip
    assert set(found.changes) <= changed
    before, after = flat(config), flat(found.config)
    assert found.changes == {
        name: (before[name], after[name]) for name in before if before[name] != after[name]
    }
    assert not solving.broken_rules(found.config)


def test_width_keeps_the_feed_forward_in_proportion():
    config = tiny_config(base_emb_dim=128, base_mlp_dim=384, vocab_size=4096)
    _, found = solved(config, "params", "width", 4.0)
    shape = found.config.model.shape
    assert shape.base_emb_dim % 8 == 0
    assert shape.base_mlp_dim / shape.base_emb_dim == pytest.approx(3, rel=0.2)
    assert (shape.base_num_query_heads, shape.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("block", "match", "free", "key"),
    [
        ("muddformer", "params", "width", "base_emb_dim"),
        ("muddformer_prepost", "flops", "depth", "base_num_decoder_layers"),
        ("tokenformer", "params", "slots", "slot_num"),
    ],
)
def test_budgets_of_models_with_dense_connections(block, match, free, key):
    """Of layers that differ, the feed-forward's widths change in multiples of their own."""
    config = tiny_config(
        block, per_device_batch_size=1, vocab_size=4096, scan_layers=False, dense_conn=True,
        dense_hidden_rounding="none",
        **({"slot_num": 64} if block == "tokenformer" else {"mlp_dim_multiple": 8}),
    )  # fmt: skip
    tolerance = 0.2 if free == "depth" else 0.02  # layers are coarse
    budget, found = solved(config, match, free, 1.7, tolerance=tolerance)
    of = cost(found.config, 1)
    assert {"params": of.parameters, "flops": of.flops}[match] == found.amount
    assert found.amount == pytest.approx(budget, rel=tolerance)
    assert found.changes[key][1] > found.changes[key][0]
    assert set(found.changes) <= {key, "base_mlp_dim"}
    assert not solving.broken_rules(found.config)


def test_width_is_divided_by_the_heads_into_even_sizes_where_head_dim_follows_it():
    config = tiny_config(
        base_emb_dim=192, base_mlp_dim=512, base_num_query_heads=6, base_num_kv_heads=6, head_dim=-1
    )
    for factor in (0.5, 1.5):
        _, found = solved(config, "params", "width", factor)
        dimensions = found.config.model.shape.dimensions
        assert dimensions.emb_dim == dimensions.head_dim * 6
        assert dimensions.head_dim % 2 == 0


def test_depth_steps_over_small_budgets_and_says_so():
    config = tiny_config()
    layer = cost(tiny_config(base_num_decoder_layers=4), 1).parameters - cost(config, 1).parameters
    budget, found = solved(config, "params", "depth", 1 + 2 * layer / cost(config, 1).parameters)
    assert found.changes == {"base_num_decoder_layers": (3, 5)}
    assert found.amount == budget
    with pytest.raises(UserError) as caught:
        solved(config, "params", "depth", 1 + 2.5 * layer / cost(config, 1).parameters)
    message = str(caught.value)
    assert "cannot be met within 2.0% by depth" in message
    assert "base_num_decoder_layers=5 gives" in message
    assert "base_num_decoder_layers=6 gives" in message
    assert "free=width" in message
    tolerance = float(message.partition("tolerance=")[2].rstrip("."))
    _, found = solved(
        config, "params", "depth", 1 + 2.5 * layer / cost(config, 1).parameters,
        tolerance=tolerance,
    )  # fmt: skip
    assert found.changes["base_num_decoder_layers"][1] in (5, 6)


@pytest.mark.parametrize(("factor", "which"), [(1e-6, "smallest"), (1e12, "largest")])
def test_budgets_out_of_reach(factor, which):
    with pytest.raises(UserError, match=f"That is the {which} base_mlp_dim that is tried"):
        solved(tiny_config(), "params", "base_mlp_dim", factor)


def test_values_that_a_rule_forbids_are_passed_over():
    config = tiny_config("gpt2", base_num_query_heads=4, base_num_kv_heads=4, head_dim=8)
    _, found = solved(config, "params", "base_num_query_heads", 1.1, tolerance=0.1)
    assert found.config.model.shape.base_num_query_heads % 4 == 0


def test_keys_without_influence_are_refused():
    with pytest.raises(UserError, match=r"the tokens of a run do not grow with width.*free=steps"):
        solved(tiny_config(), "tokens", "width", 2.0)
    with pytest.raises(UserError, match="do not grow with log_period"):
        solved(tiny_config(), "params", "log_period", 2.0)
    with pytest.raises(UserError, match="trainable_position_size=-1 is decided by other keys"):
        solved(tiny_config("gpt2"), "params", "trainable_position_size", 1.1)


def test_what_meets_the_budget_stays_as_it_is():
    config = configure(**TINY)
    assert solved(config, "params", "width", 1.0)[1].changes == {}
    amount = amount_of("params", 1)
    alone = (config,)
    near = solve(
        "it", alone, "width", amount, amount(alone) + 1, match="params", tolerance=0.02
    )  # fmt: skip
    assert near.stages == alone


def test_a_schedule_of_its_own_length_is_left_alone():
    config = tiny_config(learning_rate_schedule_steps=50)
    _, found = solved(config, "tokens", "steps", 2.0)
    assert found.changes == {"steps": (10, 20)}


def test_time_is_solved_by_steps():
    _, found = solved(tiny_config(), "time", "steps", 7.5, seconds=0.25)
    assert found.config.run.steps == 75
    assert found.amount == 75 * 0.25
    with pytest.raises(UserError, match="seconds cannot be met"):
        solved(tiny_config(), "time", "steps", 0.15, seconds=0.25)


def test_stages_of_the_batch_are_counted():
    config = tiny_config(
        per_device_batch_size=4, enable_rampup_batch_size=True, per_device_batch_size_start=2,
        per_device_batch_size_increment=1, global_rampup_samples=16, steps=20,
    )  # fmt: skip
    budget, found = solved(config, "tokens", "steps", 3.0)
    assert math.isclose(found.amount, budget, rel_tol=0.02)
    assert found.config.run.steps < 60  # later steps see more than the first ones


def test_what_is_free_by_default():
    assert [default_free(match) for match in ("params", "flops", "tokens", "time")] == [
        "width", "steps", "steps", "steps",
    ]  # fmt: skip


SLOTTED = {"base_num_kv_heads": 4, "head_dim": -1, "slot_num": 48, "vocab_size": 256}


def tokenformer(**keys) -> Config:
    return tiny_config("tokenformer", **(SLOTTED | keys))


@pytest.mark.parametrize("match", ["params", "flops"])
@pytest.mark.parametrize(
    ("free", "factor", "changed"),
    [("slots", 2.7, {"slot_num"}), ("width", 2.0, {"base_emb_dim", "slot_num"})],
)
def test_slots_and_widths_of_a_tokenformer(match, free, factor, changed):
    config = tokenformer()
    budget, found = solved(config, match, free, factor)
    reached = cost(found.config, 1)
    assert {"params": reached.parameters, "flops": reached.flops}[match] == found.amount
    assert found.amount == pytest.approx(budget, rel=0.02)
    assert set(found.changes) <= changed
    # What takes up the rest leaves its size by a fifth at most.
    if free == "width":
        assert 0.8 * 48 <= found.config.model.pattention.slot_num <= 1.2 * 48


def test_slots_of_parts_keep_their_proportion():
    config = tokenformer(slot_num=-1, ffn_slot_num=96)
    _, found = solved(config, "params", "slots", 2.0)
    slots = found.config.model.pattention
    assert found.changes["slot_num"][0] == -1
    assert slots.slot_num > 32
    assert slots.ffn_slot_num == pytest.approx(96 / 32 * slots.slot_num, abs=2)
    assert (slots.qkv_slot_num, slots.proj_slot_num) == (-1, -1)


def test_slots_where_they_have_no_effect_and_what_has_some():
    with pytest.raises(UserError, match=r"do not grow with slots.*free=width or free=depth"):
        solved(tiny_config(), "params", "slots", 2.0)
    with pytest.raises(UserError, match=r"do not grow with base_mlp_dim.*or free=slots"):
        solved(tokenformer(), "params", "base_mlp_dim", 2.0)
    with pytest.raises(UserError, match=r"Write head_dim=-1, or free=depth or free=slots\."):
        solved(tokenformer(head_dim=8), "params", "width", 2.0)


def chain(*slots: int, steps=(15, 10, 10)) -> tuple[Config, ...]:
    return tuple(
        tokenformer(slot_num=number, steps=count)
        for number, count in zip(slots, steps, strict=True)
    )


@pytest.mark.parametrize("match", ["flops", "tokens", "time"])
def test_steps_of_all_stages_are_scaled_alike(match):
    stages = chain(16, 32, 64)
    budget, found = solved_chain(stages, match, "steps", 3.0, seconds=(0.1, 0.2, 0.4))
    assert found.amount == budget
    assert [stage.run.steps for stage in found.stages] == [45, 30, 30]
    assert [stage.schedule.learning_rate_schedule_steps for stage in found.stages] == [45, 30, 30]
    assert [set(changes) for changes in found.changes] == [
        {"steps", "learning_rate_schedule_steps"}
    ] * 3
    seconds = 45 * 0.1 + 30 * 0.2 + 30 * 0.4
    by_hand = {
        "flops": sum(cost(stage, 1).flops for stage in found.stages),
        "tokens": 105 * cost(stages[0], 1).tokens / 15,
        "time": seconds,
    }
    assert found.amount == pytest.approx(by_hand[match])


def test_every_stage_keeps_a_step():
    _, found = solved_chain(chain(16, 32, 64), "tokens", "steps", 3 / 35)
    assert [stage.run.steps for stage in found.stages] == [1, 1, 1]
    with pytest.raises(UserError, match="That is the smallest steps that is tried"):
        solved_chain(chain(16, 32, 64), "tokens", "steps", 2 / 35)


def test_slots_of_all_stages_are_scaled_alike_and_the_last_has_the_parameters():
    stages = chain(16, 32, 64)
    budget, found = solved_chain(stages, "params", "slots", 2.0)
    slots = [stage.model.pattention.slot_num for stage in found.stages]
    assert slots[0] * 4 == pytest.approx(slots[2], abs=3)
    assert slots[1] * 2 == pytest.approx(slots[2], abs=1)
    assert cost(found.stages[-1], 1).parameters == pytest.approx(budget, rel=0.02)
    assert budget == 2 * cost(stages[-1], 1).parameters


def test_width_is_that_of_all_stages():
    _, found = solved_chain(chain(16, 32, 64), "params", "width", 1.5)
    assert len({stage.model.shape.base_emb_dim for stage in found.stages}) == 1
    slots = [stage.model.pattention.slot_num for stage in found.stages]
    assert slots[1] / slots[2] == pytest.approx(0.5, abs=0.05)
