"""FLOPs, bytes and tables of a model's cost, against the compiler, arrays and figures by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from MaxText.config.layer_sections import AttentionConfig
from MaxText.config.loading import load_config
from MaxText.config.registry import lookup
from MaxText.cost.flops import MFU_RULE, FlopCount, PartFlops, count_flops, model_cost
from MaxText.cost.jaxpr_operations import count_operations
from MaxText.formatting import parameter_table
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.attention import (
    Attention,
    LocalAttention,
    average_keys_computed,
    average_keys_visible,
)
from MaxText.layers.part import Flops
from MaxText.training.objective import loss_sums
from tests.layers.test_conformance import sums_as_products
from tests.small_models import random_batch, tiny_config, trainer

WIDE = {
    "base_emb_dim": 256,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "base_mlp_dim": 512,
    "base_num_decoder_layers": 2,
    "vocab_size": 512,
    "max_target_length": 256,
    "scan_layers": False,
    "attention": "dot_product",
}
SMALL = {"base_num_kv_heads": 4, "base_num_decoder_layers": 2, "scan_layers": False}
SMALL |= {"attention": "dot_product"}
FULL = {"remat_policy": "full"}
MUDD = {"decoder_block": "muddformer", "base_num_decoder_layers": 3}
MUDD |= {"dynamic_dense_act_cls": "gelu"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"capacity_factor": 1.5, "eval_capacity_factor": 1.5}
COMPILED = {
    "experts": EXPERTS | {"base_num_kv_heads": 2},
    "depth aggregates one by one": MUDD | {"dense_aggregation_impl": "sum"},
}
DENSE = MUDD | FULL | {"dense_aggregation_impl": "sum", "mlp_dim_multiple": 16}
SGU = {"static_sgu": True, "static_sgu_kernel": 8}
MANY = EXPERTS | SGU | {"head_qk": True}
# Besides the rows of the conformance suite: what is counted in a way of its own.
TRACED = {
    "both directions": {"mlm_training": True, "attention": "blocked", "attention_block_size": 4},
    "local, both directions": {"mlm_training": True, "attention_types": [[["local"], 2]]}
    | {"sliding_window_size": 3},
    "linear, both directions": {"mlm_training": True, "attention_types": [[["linear"], 2]]} | FULL,
    "head in chunks": {"num_vocab_tiling": 4, "logits_via_embedding": True} | FULL,
    "rezero, parallel": {"use_rezero": True, "block_arrangement": "parallel"} | FULL,
    "static SGU, rezero": SGU | FULL | {"decoder_block": "gpt_neo", "use_rezero": True},
    "experts in one layer": EXPERTS | FULL | {"moe_layers": [1], "moe_group_size": 8},
    "pre- and post-norm": DENSE | {"decoder_block": "muddformer_prepost"},
    "two ways of the last two outputs": DENSE
    | {"dense_streams": ["q", "v"], "dense_static": False}
    | {"dense_sparsity": "window", "dense_selection.window": 2},
    "depth aggregates after every second layer, slots": DENSE
    | {"decoder_block": "tokenformer", "dense_conn": True, "dense_period": 2},
}


def loss_and_gradients(case):
    """(count, loss and gradient of a batch, their arguments, tokens)."""
    config = tiny_config(**case)
    model, batch = Model(config.model), random_batch(config, rows=1)

    def loss(parameters, batch):
        return loss_sums(model.merge(parameters), batch, config.model.objective).total

    count = count_flops(model, config.model.shape.max_target_length)
    return count, jax.value_and_grad(loss), (model.abstract, batch), batch.tokens_BT.size


def traced_products(case):
    """(count, operations of the traced program, tokens)."""
    count, function, arguments, tokens = loss_and_gradients(case)
    with sums_as_products():
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return count, count_operations(jaxpr).matmul_flops, tokens


@pytest.mark.parametrize("name", COMPILED)
def test_xla_counts_the_same_within_5_percent(name):
    """Its count is never below the formula: besides products it has norms, softmax and the like."""
    count, function, arguments, tokens = loss_and_gradients(WIDE | COMPILED[name])
    cost = jax.jit(function).lower(*arguments).compile().cost_analysis()
    formula = count.executed_per_token * tokens
    assert formula <= cost["flops"] <= 1.05 * formula


@pytest.mark.parametrize("name", TRACED)
def test_products_of_the_traced_program_equal_the_formula(name):
    count, found, tokens = traced_products(SMALL | TRACED[name])
    assert found == count.executed_per_token * tokens
    assert count.per_token == count.weights + count.attention + count.aggregation


def test_remat_policy_minimal_recomputes_only_attention_between_tokens():
    count, plain, tokens = traced_products(SMALL)
    unknown, minimal, _ = traced_products(SMALL | {"remat_policy": "minimal"})
    again = sum(part.hardware_flops for part in count.parts if part.name.startswith("attention "))
    again -= next(part.hardware_flops for part in count.parts if part.name == "attention output")
    assert minimal - plain == again * tokens
    assert unknown.executed_per_token is None
    assert unknown.per_token == count.per_token


# Of layers and the head; of attention: layers, two products, width and the mean number of keys.
@pytest.mark.parametrize(
    ("name", "length", "matrices", "attention"),
    [
        ("gpt2-124m", 1024, 12 * 12 * 768**2 + 50_257 * 768, 12 * 2 * 2 * 768 * 512),
        ("llama2-7b", 4096, 32 * (4 * 4096 + 3 * 11_008) * 4096 + 32_000 * 4096,
         32 * 2 * 2 * 4096 * 2048),
        ("tokenformer-124m", 1024, 12 * 16 * 768 * 576 + 50_304 * 768, 12 * 2 * 2 * 768 * 512),
    ],
)  # fmt: skip
def test_published_models_by_hand(name, length, matrices, attention):
    config = load_config(model_name=name, dtype="float32", scan_layers=True, remat_policy="none")
    count = count_flops(Model(config.model), length)
    assert (count.matmul_parameters, count.forward) == (matrices, 2 * matrices + attention)
    assert count.per_token == 3 * count.forward


def parts_of(*arguments, **keys):
    count = count_flops(Model(tiny_config(*arguments, **keys).model), 16)
    return {part.name: part for part in count.parts}


def test_parts_by_hand():
    L, T, D, N, K, H, F, V = 3, 16, 32, 4, 2, 8, 64, 64
    parts = parts_of(use_qk_norm=True, qkv_bias=True)
    assert {name: (part.parameters, part.flops) for name, part in parts.items()} == {
        "token embedding": (V * D, 0),
        "query, key, value": (L * (D + 1) * H * (N + 2 * K), 2 * L * D * H * (N + 2 * K)),
        "attention scores": (0, 2 * L * N * H * T / 2),
        "attention values": (0, 2 * L * N * H * T / 2),
        "attention output": (L * N * H * D, 2 * L * N * H * D),
        "feed-forward": (L * 3 * D * F, 2 * L * 3 * D * F), "norms": (L * (2 * D + 2 * H) + D, 0),
        "head": (D * V, 2 * D * V),
    }  # fmt: skip


def test_kinds_of_attention_by_hand():
    T, D, N, K, H, W, M = 16, 32, 4, 2, 8, 4, 3
    parts = parts_of(
        attention_types=[[["global", "local", "linear"], 1]],
        sliding_window_size=W,
        **{"linear_attention.chunk": 8},
    )
    keys = T / 2 + W - W**2 / (2 * T)
    assert parts["attention scores"].flops == 2 * N * H * keys + 2 * K * H * H
    assert parts["attention values"].flops == 2 * N * H * keys + 2 * N * H * H
    parts = parts_of(attention_types=[[["none", "global", "none"], 1]])
    assert parts["attention scores"].flops == 2 * N * H * T / 2
    assert parts["attention output"].flops == 2 * N * H * D
    parts = parts_of(num_mem_kv=M)
    assert parts["attention scores"].flops == 3 * 2 * N * H * (T / 2 + M)
    assert parts["memories"] == PartFlops("memories", 3 * 2 * M * K * H, 0, 0)


def test_experts_by_hand():
    L, D, F, E, k = 3, 32, 64, 8, 2
    keys = {"num_experts": E, "num_experts_per_tok": k}
    parts = parts_of(**keys, capacity_factor=1.5)
    assert parts["router"] == PartFlops("router", L * D * E, 2 * L * D * E, 2 * L * D * E)
    # 16 tokens: 1.5 * 16 / 8 = 3 places for each of 8 experts.
    one = 2 * L * 3 * D * F
    assert parts["feed-forward"] == PartFlops("feed-forward", one * E // 2, k * one, 24 / 16 * one)
    assert parts_of(**keys)["feed-forward"].hardware_flops == k * one


def test_shared_weights_are_held_once_and_macarons_twice():
    alone, shared = parts_of(), parts_of(share_layer_params=True)
    assert 3 * shared["feed-forward"].parameters == alone["feed-forward"].parameters
    assert shared["feed-forward"].flops == alone["feed-forward"].flops
    assert parts_of(use_macaron=True)["feed-forward"].flops == 2 * alone["feed-forward"].flops


def test_static_sgu_and_head_qk_by_hand():
    L, T, D, V = 3, 16, 32, 64
    config = tiny_config(static_sgu=True, static_sgu_kernel=3, head_qk=True, head_qk_dim=24)
    count = count_flops(Model(config.model), T)
    parts = {part.name: part for part in count.parts}
    sums = L * D * (4 - 4**2 / (2 * T))  # half the channels, 2 operations
    assert parts["static SGU"] == PartFlops("static SGU", 0, sums, L * D * (16 + 3), 0, True)
    assert parts["Head-QK"] == PartFlops("Head-QK", 2 * D * 24, 4 * D * 24, 4 * D * 24)
    pointing = PartFlops("Head-QK scores", 0, 2 * 24 * T / 2, 2 * 24 * T, 2, True)
    assert parts["Head-QK scores"] == pointing
    assert count.per_token == 3 * (count.forward - sums) + sums
    assert count.per_token == count.weights + count.attention
    assert parts["head"].flops == 2 * D * V


def test_a_part_of_ones_own_has_rows(monkeypatch):
    """By default those of its folders; declared ones and those of `flops` where they are."""
    L, D = 3, 32
    keys = {"import_modules": ["examples/moving_average.py"], "mixer": "moving_average"}
    by_folder = parts_of(**keys)
    wanted = {"self_attention/into": 2 * D * D, "self_attention": D, "self_attention/out": D * D}
    for name, size in wanted.items():
        flops = 2 * L * size if "/" in name else 0
        assert by_folder[name] == PartFlops(name, L * size, flops, flops)
    assert list(by_folder)[-3:] == ["self_attention", "self_attention/into", "self_attention/out"]
    average = lookup("mixer", "moving_average")
    monkeypatch.setattr(average, "rows", {"out": "attention output"})
    monkeypatch.setattr(average, "flops", classmethod(lambda *_: {"scan": Flops(5.0)}))
    declared = parts_of(**keys)
    assert declared["attention output"].parameters == L * D * D
    assert declared["scan"] == PartFlops("scan", 0, 15.0, 15.0, between_tokens=True)
    assert list(declared).index("scan") + 1 == list(declared).index("attention output")


def test_line_of_maxtext(told):
    flops = {"feed-forward": 8e9, "attention scores": 1e9, "depth aggregation": 1e9}
    parts = tuple(PartFlops(n, 1, x, x, between_tokens="scores" in n) for n, x in flops.items())
    counts = [FlopCount(sequence_length=8, parts=of, recomputed=0.0) for of in (parts[:2], parts)]
    told("\n".join(count.line(1000) for count in counts))


def test_keys_by_rule():
    assert average_keys_visible(256, causal=False) == 256
    assert average_keys_visible(256, causal=True) == 128
    assert average_keys_visible(256, causal=True, window=10_000) == 128
    # Half the window leaves three quarters of the triangle.
    assert average_keys_visible(256, causal=True, window=128) == 96


@pytest.mark.parametrize(
    ("section", "length", "window", "keys"),
    [
        ({"attention": "dot_product"}, 256, None, 256),
        ({"attention_block_size": 64}, 256, None, (64 + 128 + 192 + 256) / 4),
        ({"attention_block_size": 5}, 13, None, (5 * 5 + 5 * 10 + 3 * 13) / 13),
        # No more than 16 blocks: of 256 rows.
        ({"attention_block_size": 128}, 4096, None, 256 * (16 + 1) / 2),
        ({"causal": False}, 4096, None, 4096),
        ({"attention": "flash"}, 2048, None, 512 * (1 + 2 + 3 + 4) / 4),
        ({"attention": "flash"}, 100, None, 100),  # not what the kernel serves
        ({}, 12, 4, 12),  # one block of all
        ({}, 90, 20, 5 * 20 * 40 / 90),  # the last block filled up
        ({"causal": False}, 100, 20, 60),
        ({}, 64, 4, 32),  # blocks of 16 rows at least
    ],
)
def test_keys_multiplied(section, length, window, keys):
    mixer = Attention
    if window is not None:
        mixer = LocalAttention
        section = section | {"sliding_window_size": window}
    assert average_keys_computed(mixer, AttentionConfig(**section), length) == keys


def cost_of(**keys):
    return model_cost(Model(tiny_config(**keys).model), sequence_length=16)


def bytes_of(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def test_bytes_are_those_of_the_arrays():
    model, state, _ = trainer(tiny_config(weight_dtype="bfloat16", opt_type="lion"))
    cost = model_cost(model, sequence_length=16, optimizer_state=state.opt_state)
    assert cost.fields()["bytes"] == {
        "parameters": bytes_of(state.params),
        "optimizer": bytes_of(state.opt_state),
        "gradients": bytes_of(state.params),
    }
    abstract = jax.eval_shape(lambda: state.opt_state)
    assert model_cost(model, sequence_length=16, optimizer_state=abstract) == cost


def test_cache_of_llama_2_7b():
    # Published: half a MiB per token in 16 bits, 2 GiB for the 4,096 tokens of its context.
    keys = {"dtype": "bfloat16", "scan_layers": True, "remat_policy": "full"}
    model = Model(load_config(model_name="llama2-7b", **keys).model)
    cost = model_cost(model, sequence_length=4096)
    assert (cost.kv_cache_bytes_per_token, cost.kv_cache_bytes) == (2**19, 2**31)
    assert "KV cache of 4,096 tokens = 2,147,483,648 bytes (2.00 GiB)" in cost.describe()


@pytest.mark.parametrize(
    "keys",
    [
        {"base_num_kv_heads": 1},
        {
            "attention_types": [[["local", "linear", "none"], 1]],
            "scan_layers": False,
            "sliding_window_size": 5,
            "dtype": "bfloat16",
        },
        {"num_mem_kv": 3, "static_sgu": True, "static_sgu_kernel": 4},
        {"head_qk": True, "head_qk_dim": 6, "share_layer_params": True},
    ],
)
def test_the_cache_of_a_sequence_is_what_generation_keeps(keys):
    cost = cost_of(**keys)
    tokens, lengths = jnp.zeros((1, 16), int), jnp.ones((1,), int)

    def states(params):
        return cost.model.merge(params).prefill(tokens, lengths, 16)[1]

    kept = jax.tree.leaves(jax.eval_shape(states, cost.model.abstract))
    assert sum(x.size * x.dtype.itemsize for x in kept) == cost.kv_cache_bytes


@pytest.mark.parametrize("keys", [{"decoder_block": "gpt2"}, {"remat_policy": "minimal"}, MANY])
def test_facts_are_json_and_add_up(keys):
    cost = cost_of(**keys)
    facts = json.loads(json.dumps(cost.fields(), allow_nan=False))
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
