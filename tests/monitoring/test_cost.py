"""The cost table: its sums, its bytes against real arrays, and its words; other printed tables."""

import json

import jax
import jax.numpy as jnp
import pytest

from MaxText.configuration.loading import configure
from MaxText.layers.model import Model
from MaxText.monitoring.cost import MFU_RULE, model_cost
from MaxText.monitoring.flops import count_flops
from MaxText.monitoring.tables import parameter_table
from tests.small_models import tiny_config, trainer


def cost_of(**keys):
    return model_cost(Model(tiny_config(**keys).model), sequence_length=16)


def bytes_of(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def test_bytes_are_those_of_the_arrays():
    model, state, _ = trainer(tiny_config(weight_dtype="bfloat16", opt_type="lion"))
    cost = model_cost(model, sequence_length=16, optimizer_state=state.opt_state)
    assert cost.facts()["bytes"] == {
        "parameters": bytes_of(state.params),
        "optimizer": bytes_of(state.opt_state),
        "gradients": bytes_of(state.params),
    }
    abstract = jax.eval_shape(lambda: state.opt_state)
    assert model_cost(model, sequence_length=16, optimizer_state=abstract) == cost


def test_cache_of_llama_2_7b():
    # Published: half a MiB per token in 16 bits, 2 GiB for the 4,096 tokens of its context.
    keys = {"dtype": "bfloat16", "scan_layers": True, "remat_policy": "full"}
    model = Model(configure(model_name="llama2-7b", **keys).model)
    cost = model_cost(model, sequence_length=4096)
    assert (cost.kv_cache_bytes_per_token, cost.kv_cache_bytes) == (2**19, 2**31)
    assert "4,096 x 524,288 = 2,147,483,648 bytes (2.00 GiB)" in cost.describe()


@pytest.mark.parametrize(
    "keys",
    [
        {"base_num_kv_heads": 1},
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
    tokens, lengths = jnp.zeros((1, 16), int), jnp.ones((1,), int)

    def states(params):
        return cost.model.merge(params).read_prompt(tokens, lengths, 16)[1]

    kept = jax.tree.leaves(jax.eval_shape(states, cost.model.abstract))
    assert sum(x.size * x.dtype.itemsize for x in kept) == cost.kv_cache_bytes


EXPERTS = {"static_sgu": True, "head_qk": True, "num_experts": 4, "capacity_factor": 1.0}


@pytest.mark.parametrize("keys", [{"decoder_block": "gpt2"}, {"remat_policy": "minimal"}, EXPERTS])
def test_facts_are_json_and_add_up(keys):
    cost = cost_of(**keys)
    facts = json.loads(json.dumps(cost.facts(), allow_nan=False))
    for total in ("parameters", "forward_flops_per_token", "flops_per_token"):
        assert facts[total] == sum(part[total] for part in facts["parts"])
    assert facts["parameters"] == cost.model.num_parameters
    assert facts["flops_per_token"] == count_flops(cost.model, 16).per_token
    assert facts["executed_flops_per_token"] == cost.count.executed_per_token
    assert (facts["sequence_length"], facts["mfu_rule"]) == (16, MFU_RULE)
    assert facts["bytes"]["optimizer"] is None


def test_the_printed_table(told):
    """A tied head multiplies with the token table and holds nothing itself."""
    told(cost_of(decoder_block="gpt2").describe())


def test_parameter_table(told):
    shapes = {"token_embedder/embedding": (1000, 8)}
    shapes |= {f"layers/{i}/mlp/wi": (8, 32) for i in range(12)}
    shapes |= {"norm/scale": (8,), "a/very/long/name/" * 20 + "kernel": (2, 3)}
    parameters = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    table = parameter_table(parameters, sharding_of=lambda name: "fsdp, -")
    told(table)
    assert max(map(len, table.splitlines())) <= 110
