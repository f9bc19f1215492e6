"""FLOP counts by formula, against the compiler's count and figures worked out by hand.

tests/layers/test_conformance.py holds the formula of every architecture against its traced program.
"""

import types

import jax
import pytest

from MaxText.configuration.layer_sections import Attention
from MaxText.configuration.loading import configure
from MaxText.layers.model import Model
from MaxText.layers.weights import ParameterInfo
from MaxText.monitoring.flops import FlopCount, Part, count_flops, keys_by_rule, keys_multiplied
from MaxText.training.objective import loss_sums
from tests.layers.test_conformance import products, sums_as_products
from tests.small_models import random_batch, tiny_config

# So wide that what is no product is a few percent of XLA's count.
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
FULL = {"remat_policy": "full"}
MUDD = {"decoder_block": "muddformer", "base_num_decoder_layers": 3, "dense_activation": "gelu"}
COMPILED = {
    "gpt2, blocks": {"decoder_block": "gpt2", "attention": "blocked", "attention_block_size": 64},
    "tokenformer": FULL | {"decoder_block": "tokenformer", "slot_num": 96},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "base_num_kv_heads": 2}
    | {"capacity_factor": 1.5, "eval_capacity_factor": 1.5},
    "depth sums one by one": MUDD | {"dense_mixing": "sum"},
}
SMALL = {
    "base_num_kv_heads": 4,
    "base_num_decoder_layers": 2,
    "scan_layers": False,
    "attention": "dot_product",
}
DENSE = MUDD | FULL | {"dense_mixing": "sum", "mlp_dim_multiple": 16}
SGU = {"static_sgu": True, "static_sgu_kernel": 8}
# Beside the rows of the conformance suite: what is counted in a way of its own.
TRACED = {
    "both directions": {"mlm_training": True, "attention": "blocked", "attention_block_size": 4},
    "local, both directions": {"mlm_training": True, "attention_types": [[["local"], 2]]}
    | {"sliding_window_size": 3},
    "linear, both directions": {"mlm_training": True, "attention_types": [[["linear"], 2]]} | FULL,
    "head in chunks": {"num_vocab_tiling": 4, "logits_via_embedding": True} | FULL,
    "rezero, parallel": {"use_rezero": True, "block_arrangement": "parallel"} | FULL,
    "static SGU, rezero": SGU | FULL | {"decoder_block": "gpt_neo", "use_rezero": True},
    "experts in one layer": {"num_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1]}
    | {"capacity_factor": 1.5, "eval_capacity_factor": 1.5, "moe_group_size": 8}
    | FULL,
    "pre- and post-norm": DENSE | {"decoder_block": "muddformer_prepost"},
    "two ways of the last two outputs": DENSE
    | {"dense_ways": ["q", "v"], "dense_static": False}
    | {"dense_sources": "window", "dense_window": 2},
    "depth sums after every second layer, slots": DENSE
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
        return count, products(jax.make_jaxpr(function)(*arguments).jaxpr), tokens


@pytest.mark.parametrize("name", COMPILED)
def test_xla_counts_the_same_within_5_percent(name):
    """XLA's own count of the optimized program.

    Beside products it has one operation or more for every element of norms, softmax, activation
    functions, masks, rotary positions, additions and the cross entropy, forward and backward: 1 to
    4 % here. So it is never below the formula.
    """
    count, function, arguments, tokens = loss_and_gradients(WIDE | COMPILED[name])
    cost = jax.jit(function).lower(*arguments).compile().cost_analysis()
    formula = count.executed_per_token * tokens
    assert formula <= cost["flops"] <= 1.05 * formula


@pytest.mark.parametrize("name", TRACED)
def test_products_of_the_traced_program_equal_the_formula(name):
    count, found, tokens = traced_products(SMALL | TRACED[name])
    assert found == count.executed_per_token * tokens


def test_remat_policy_minimal_recomputes_only_attention_between_tokens():
    count, plain, tokens = traced_products(SMALL)
    unknown, minimal, _ = traced_products(SMALL | {"remat_policy": "minimal"})
    again = sum(part.executed for part in count.parts if part.name.startswith("attention "))
    again -= next(part.executed for part in count.parts if part.name == "attention output")
    assert minimal - plain == again * tokens
    assert unknown.executed_per_token is None
    assert unknown.per_token == count.per_token


def test_the_rule_differs_from_what_is_executed_by_the_masked_half_only():
    causal = count_flops(Model(tiny_config(attention="dot_product").model), 16)
    assert causal.executed_per_token == causal.per_token + causal.attention
    both = count_flops(Model(tiny_config(mlm_training=True).model), 16)
    assert both.executed_per_token == both.per_token == causal.executed_per_token
    assert both.attention == 2 * causal.attention


@pytest.mark.parametrize(
    ("name", "length", "matrices", "attention"),
    [
        # 12 layers of 12 x 768^2 and the tied head of 50257 x 768. Attention: 12 layers x 2
        # products x 2 x 768 x 512 keys.
        ("gpt2-124m", 1024, 123_532_032, 18_874_368),
        # 32 layers of (4 x 4096 + 3 x 11008) x 4096 and a head of 32000 x 4096. Attention: 32
        # layers x 2 products x 2 x 4096 x 2048 keys.
        ("llama2-7b", 4096, 6_607_077_376, 1_073_741_824),
        # 12 layers of 16 x 768 x 576 and the tied head of 50304 x 768.
        ("tokenformer-124m", 1024, 12 * 16 * 768 * 576 + 50_304 * 768, 18_874_368),
    ],
)
def test_published_models_by_hand(name, length, matrices, attention):
    config = configure(model_name=name, dtype="float32", scan_layers=True, remat_policy="none")
    count = count_flops(Model(config.model), length)
    assert count.matmul_parameters == matrices
    assert count.forward == 2 * matrices + attention
    assert count.per_token == 3 * count.forward


def test_dense_connections_by_hand():
    # Sums of 2, 3 and 4 hidden states, on four ways but after the last layer; 64 hidden units each.
    L, D, F = 3, 32, 64
    model = Model(tiny_config("muddformer", mlp_dim_multiple=8, scan_layers=False).model)
    count = count_flops(model, 16)
    parts = {part.name: part for part in count.parts}
    pairs = 4 * 2 + 4 * 3 + 4
    assert parts["sums over depth"] == Part("sums over depth", 0, 2 * D * pairs, 2 * D * pairs)
    of_weights = parts["dense connections"]
    assert of_weights.parameters == L * D * 64 + 64 * pairs + pairs
    assert of_weights.flops == 2 * (L * D * 64 + 64 * pairs)
    # Widths 32, 64 and 96 under numbers of their own.
    assert parts["feed-forward"] == Part("feed-forward", L * 3 * D * F, *[2 * L * 3 * D * F] * 2)
    # One norm before the first layer's attention, three before that of the others; and heads'.
    assert parts["norms"].parameters == (1 + 3 + 3 + L) * D + L * 2 * 8 + D
    assert {"layers", "connections"}.isdisjoint(name.partition("/")[0] for name in parts)
    assert count.per_token == count.weights + count.attention + count.depth_sums
    assert count.weights == 6 * count.matmul_parameters


def test_published_overhead_of_dense_connections():
    """Parameters and operations over those of the layers of 2.8B (Xiao et al. 2025).

    The paper counts eta / 6 and eta / (3 + rho / 4) with eta = (L + 3) / D and rho = T / D: four
    ways after the last layer, too, and no second product.
    """
    L, D, T = 32, 2560, 4096
    config = configure(
        decoder_block="muddpythia", base_emb_dim=D, base_num_decoder_layers=L, base_mlp_dim=4 * D,
        base_num_query_heads=32, base_num_kv_heads=32, head_dim=D // 32,
        dense_hidden_rounding="none", dense_last_expand=1, dtype="float32", scan_layers=False,
        remat_policy="none", dataset_type="synthetic",
    )  # fmt: skip
    parts = {part.name: part.flops for part in count_flops(Model(config.model), T).parts}
    pairs = [4 * (depth + 1) for depth in range(1, L)] + [L + 1]
    counted = parts["dense connections"] + parts["sums over depth"]
    assert counted == 2 * sum(K * D + K * K + K * D for K in pairs)
    layers = parts["query, key, value"] + parts["feed-forward"]
    layers += sum(parts[f"attention {name}"] for name in ("scores", "values", "output"))
    eta, rho = (L + 3) / D, T / D
    by_paper = counted - 2 * sum(K * K for K in pairs) + 4 * D * 3 * (L + 1)
    assert by_paper / layers == pytest.approx(eta / (3 + rho / 4), rel=1e-12)
    assert (round(eta / 6, 4), round(by_paper / layers, 4)) == (0.0023, 0.0040)


def test_parts_by_hand():
    L, T, D, N, K, H, F, V = 3, 16, 32, 4, 2, 8, 64, 64
    model = Model(tiny_config(use_qk_norm=True, qkv_bias=True).model)
    parts = {part.name: part for part in count_flops(model, T).parts}
    assert {name: (part.parameters, part.flops) for name, part in parts.items()} == {
        "token embedding": (V * D, 0),
        "query, key, value": (L * (D + 1) * H * (N + 2 * K), 2 * L * D * H * (N + 2 * K)),
        "attention scores": (0, 2 * L * N * H * T / 2),
        "attention values": (0, 2 * L * N * H * T / 2),
        "attention output": (L * N * H * D, 2 * L * N * H * D),
        "feed-forward": (L * 3 * D * F, 2 * L * 3 * D * F),
        "norms": (L * (2 * D + 2 * H) + D, 0),
        "head": (D * V, 2 * D * V),
    }


def parts_of(**keys):
    return {part.name: part for part in count_flops(Model(tiny_config(**keys).model), 16).parts}


def test_kinds_of_attention_by_hand():
    T, D, N, K, H, W, M = 16, 32, 4, 2, 8, 4, 3
    parts = parts_of(
        attention_types=[[["global", "local", "linear"], 1]],
        sliding_window_size=W, linear_attention_chunk=8,
    )  # fmt: skip
    keys = T / 2 + W - W**2 / (2 * T)
    assert parts["attention scores"].flops == 2 * N * H * keys + 2 * K * H * H
    assert parts["attention values"].flops == 2 * N * H * keys + 2 * N * H * H
    parts = parts_of(attention_types=[[["none", "global", "none"], 1]], scan_layers=False)
    assert parts["attention scores"].flops == 2 * N * H * T / 2
    assert parts["attention output"].flops == 2 * N * H * D
    parts = parts_of(num_mem_kv=M)
    assert parts["attention scores"].flops == 3 * 2 * N * H * (T / 2 + M)
    assert parts["memories"] == Part("memories", 3 * 2 * M * K * H, 0, 0)


def test_experts_by_hand():
    L, D, F, E, k = 3, 32, 64, 8, 2
    keys = {"num_experts": E, "num_experts_per_tok": k}
    parts = parts_of(**keys, capacity_factor=1.5)
    assert parts["router"] == Part("router", L * D * E, 2 * L * D * E, 2 * L * D * E)
    # 16 tokens: 1.5 * 16 / 8 = 3 places for each of 8 experts.
    one = 2 * L * 3 * D * F
    assert parts["feed-forward"] == Part("feed-forward", one * E // 2, k * one, 24 / 16 * one)
    assert parts_of(**keys)["feed-forward"].executed == k * one


def test_shared_weights_are_held_once_and_macarons_twice():
    alone, shared = parts_of(), parts_of(share_parameters=True)
    assert 3 * shared["feed-forward"].parameters == alone["feed-forward"].parameters
    assert shared["feed-forward"].flops == alone["feed-forward"].flops
    macaron = parts_of(use_macaron=True)
    assert macaron["feed-forward"].flops == 2 * alone["feed-forward"].flops


def test_static_sgu_and_head_qk_by_hand():
    L, T, D, V = 3, 16, 32, 64
    config = tiny_config(static_sgu=True, static_sgu_kernel=3, head_qk=True, head_qk_dim=24)
    count = count_flops(Model(config.model), T)
    parts = {part.name: part for part in count.parts}
    sums = L * D * (4 - 4**2 / (2 * T))  # half the channels, 2 operations
    assert parts["static SGU"] == Part("static SGU", 0, sums, L * D * (16 + 3), 0)
    assert parts["Head-QK"] == Part("Head-QK", 2 * D * 24, 4 * D * 24, 4 * D * 24)
    assert parts["Head-QK scores"] == Part("Head-QK scores", 0, 2 * 24 * T / 2, 2 * 24 * T)
    assert count.per_token == 3 * (count.forward - sums) + sums
    assert count.per_token == count.weights + count.attention
    assert parts["head"].flops == 2 * D * V


def test_a_part_without_a_row_is_counted_under_its_own_name():
    model = Model(tiny_config().model)
    gate = ParameterInfo((3, 32, 5), model.parameters["decoder_norm/scale"].dtype, (None,) * 3, 1)
    larger = types.SimpleNamespace(
        section=model.section, parameters=model.parameters | {"layers/mixer/gate/kernel": gate}
    )
    before, after = count_flops(model, 16), count_flops(larger, 16)
    assert after.parts == (*before.parts, Part("mixer/gate", 480, 960, 960))
    assert after.per_token == before.per_token + 3 * 960


def test_keys_by_rule():
    assert keys_by_rule(256, causal=False) == 256
    assert keys_by_rule(256, causal=True) == 128
    assert keys_by_rule(256, causal=True, window=10_000) == 128
    # Half the window leaves three quarters of the triangle.
    assert keys_by_rule(256, causal=True, window=128) == 96


@pytest.mark.parametrize(
    ("section", "length", "kind", "keys"),
    [
        ({"attention": "dot_product"}, 256, "global", 256),
        ({"attention_block_size": 64}, 256, "global", (64 + 128 + 192 + 256) / 4),
        ({"attention_block_size": 5}, 13, "global", (5 * 5 + 5 * 10 + 3 * 13) / 13),
        # No more than 16 blocks: of 256 rows.
        ({"attention_block_size": 128}, 4096, "global", 256 * (16 + 1) / 2),
        ({"causal": False}, 4096, "global", 4096),
        ({"attention": "flash"}, 2048, "global", 512 * (1 + 2 + 3 + 4) / 4),
        ({"attention": "flash"}, 100, "global", 100),  # not what the kernel serves
        ({"sliding_window_size": 4}, 12, "local", 12),  # one block of all
        ({"sliding_window_size": 20}, 90, "local", 5 * 20 * 40 / 90),  # the last block filled up
        ({"sliding_window_size": 20, "causal": False}, 100, "local", 60),
        ({"sliding_window_size": 4}, 64, "local", 32),  # blocks of 16 rows at least
    ],
)
def test_keys_multiplied(section, length, kind, keys):
    assert keys_multiplied(Attention(**section), length, kind) == keys


def test_line_of_maxtext(told):
    parts = (
        Part("feed-forward", 1, 8e9, 8e9),
        Part("attention scores", 0, 1e9, 1e9),
        Part("sums over depth", 0, 1e9, 1e9),
    )
    told(
        "\n".join(
            FlopCount(sequence_length=8, parts=some, recomputed=0.0).line(1000)
            for some in (parts[:2], parts)
        )
    )
