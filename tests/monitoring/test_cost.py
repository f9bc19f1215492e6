"""The cost table: its sums, its bytes against real arrays, and its words."""

import json

import jax
import pytest

from MaxText.configuration.loading import configure
from MaxText.layers.model import Model
from MaxText.monitoring.cost import MFU_RULE, model_cost
from MaxText.monitoring.flops import count_flops
from tests.small_models import tiny_config, trainer


def cost_of(**keys):
    return model_cost(Model(tiny_config(**keys).model), sequence_length=16)


def cells(line):
    """A line of the table as words, without thousands separators."""
    return line.replace(",", "").split()


def bytes_of(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


@pytest.mark.parametrize("keys", [{}, {"weight_dtype": "bfloat16", "opt_type": "lion"}])
def test_bytes_are_those_of_the_arrays(keys):
    model, state, _ = trainer(tiny_config(**keys))
    gradients = jax.eval_shape(
        jax.grad(lambda params: sum(x.sum() for x in jax.tree.leaves(params))), state.params
    )
    cost = model_cost(model, sequence_length=16, optimizer_state=state.opt_state)
    assert cost.facts()["bytes"] == {
        "parameters": bytes_of(state.params),
        "optimizer": bytes_of(state.opt_state),
        "gradients": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(gradients)),
    }
    abstract = jax.eval_shape(lambda: state.opt_state)
    assert model_cost(model, sequence_length=16, optimizer_state=abstract) == cost


def test_cache_of_llama_2_7b():
    # Published: half a MiB per token in 16 bits, 2 GiB for the 4,096 tokens of its context.
    config = configure(
        model_name="llama2-7b", dtype="bfloat16", scan_layers=True, remat_policy="full"
    )
    cost = model_cost(Model(config.model), sequence_length=4096)
    assert cost.kv_cache_bytes_per_token == 2**19
    assert cost.kv_cache_bytes == 2**31
    assert "4,096 x 524,288 = 2,147,483,648 bytes (2.00 GiB)" in cost.describe()


def test_cache_counts_key_value_heads_and_the_format_of_activations():
    whole = cost_of(base_num_kv_heads=4)
    assert whole.kv_cache_bytes_per_token == 2 * 3 * 4 * 8 * 4
    assert cost_of(base_num_kv_heads=1).kv_cache_bytes * 4 == whole.kv_cache_bytes
    assert cost_of(base_num_kv_heads=4, dtype="bfloat16").kv_cache_bytes * 2 == whole.kv_cache_bytes


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "attention_types": [[["local", "linear", "none"], 1]], "scan_layers": False,
            "sliding_window_size": 5, "dtype": "bfloat16",
        },
        {"num_mem_kv": 3, "static_sgu": True, "static_sgu_kernel": 4},
        {"head_qk": True, "head_qk_dim": 6, "share_parameters": True},
    ],
)  # fmt: skip
def test_the_cache_of_a_sequence_is_what_generation_keeps(keys):
    cost = cost_of(**keys)
    tokens, lengths = jax.numpy.zeros((1, 16), int), jax.numpy.ones((1,), int)

    def states(params):
        return cost.model.merge(params).read_prompt(tokens, lengths, 16)[1]

    kept = jax.tree.leaves(jax.eval_shape(states, cost.model.abstract))
    assert sum(x.size * x.dtype.itemsize for x in kept) == cost.kv_cache_bytes
    assert max(map(len, cost.describe().splitlines())) <= 110


def test_no_cache_without_a_causal_mask():
    cost = cost_of(mlm_training=True)
    assert cost.kv_cache_bytes_per_token == cost.kv_cache_bytes == 0
    assert "KV cache = none, attention is not causal" in cost.describe()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"decoder_block": "gpt2"},
        {"remat_policy": "minimal"},
        {"static_sgu": True, "head_qk": True, "num_experts": 4, "capacity_factor": 1.0},
    ],
)
def test_facts_are_json_and_add_up(keys):
    cost = cost_of(**keys)
    facts = json.loads(json.dumps(cost.facts(), allow_nan=False))
    for total in ("parameters", "forward_flops_per_token", "flops_per_token"):
        assert facts[total] == sum(part[total] for part in facts["parts"])
    assert facts["parameters"] == cost.model.num_parameters
    assert facts["flops_per_token"] == count_flops(cost.model, 16).per_token
    assert facts["executed_flops_per_token"] == cost.count.executed_per_token
    assert facts["sequence_length"] == 16
    assert facts["mfu_rule"] == MFU_RULE
    assert facts["bytes"]["optimizer"] is None


def test_the_printed_table():
    cost = cost_of(decoder_block="gpt2")
    text = cost.describe()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110
    rows = {line.partition("  ")[0]: cells(line.partition("  ")[2]) for line in lines[:14]}
    # A tied head multiplies with the token table, 64 x 32, and holds nothing itself.
    assert rows["head"][:2] == ["tied", str(2 * 64 * 32)]
    assert rows["position embedding"] == [
        str(16 * 32), f"{100 * 16 * 32 / cost.model.num_parameters:.1f}%", "0", "0", "0.0%",
    ]  # fmt: skip
    total = [f"{cost.model.num_parameters}", "100.0%", f"{cost.count.forward:.0f}"]
    assert rows["total"] == [*total, f"{cost.count.per_token:.0f}", "100.0%"]
    assert MFU_RULE in " ".join(text.split())
    assert "parameters + gradients = " in text


def test_executed_operations_are_shown_where_they_are_known():
    full = cost_of(remat_policy="full", num_vocab_tiling=2).describe()
    assert "computed again (remat_policy=full, num_vocab_tiling=2)" in full
    assert "executed FLOPs per token" not in cost_of(remat_policy="minimal").describe()
    cost = cost_of(static_sgu=True, static_sgu_kernel=3)
    sums = next(part.executed for part in cost.count.parts if part.name == "static SGU")
    three_times = cost.count.executed_forward - sums
    assert f"3 x {three_times:,.0f} + {sums:,.0f} + 0" in " ".join(cost.describe().split())


@pytest.mark.parametrize(
    ("keys", "rule", "computed"),
    [
        (
            {"attention": "dot_product"},
            "causal, a query counts half of 16 keys: 8",
            "attention=dot_product multiplies it with all 16",
        ),
        (
            {"attention": "blocked", "attention_block_size": 4},
            "causal, a query counts half of 16 keys: 8",
            "attention=blocked multiplies it with 10, in blocks of 4 query rows",
        ),
        (
            {
                "attention_types": [[["local", "global", "linear"], 1]],
                "sliding_window_size": 4,
                "attention": "dot_product",
            },
            "causal, a query counts half of 16 keys: 8; in local layers, of a window of 4, 3.5; a "
            "linear layer has sums of fixed size in their place",
            "attention=dot_product multiplies it with all 16; in local layers with 16",
        ),
        (
            {"mlm_training": True},
            "not causal, a query counts all 16 keys",
            "attention=autoselected multiplies it with all 16",
        ),
    ],
)
def test_both_counts_of_attention_are_stated(keys, rule, computed):
    cost = cost_of(**keys)
    assert cost.facts()["attention_rule"] == rule
    assert cost.facts()["attention_computed"] == computed
    assert f"attention: {rule}; {computed}." in " ".join(cost.describe().split())
