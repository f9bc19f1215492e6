"""FLOP counts by formula, against the compiler's count and figures worked out by hand."""

import math
import types

import jax
import pytest

from MaxText.configuration.layer_sections import Attention
from MaxText.configuration.loading import configure
from MaxText.layers.model import Model
from MaxText.layers.weights import ParameterInfo
from MaxText.monitoring.flops import FlopCount, Part, count_flops, keys_by_rule, keys_multiplied
from MaxText.training.objective import loss_sums
from tests.small_models import random_batch, some_quick, tiny_config

# So wide that what is no product is a few percent of XLA's count.
SIZES = {
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "base_mlp_dim": 512,
    "base_num_decoder_layers": 2,
    "vocab_size": 512,
    "max_target_length": 256,
    "scan_layers": False,
    "attention": "dot_product",
}
BLOCKED = {"attention": "blocked", "attention_block_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_num_kv_heads": 2}
PLACES = EXPERTS | {"capacity_factor": 1.5, "eval_capacity_factor": 1.5}
NONE = {"attention_types": [[["none", "local"], 1]], "sliding_window_size": 32}
LINEAR = {"attention_types": [[["linear", "global"], 1]], "linear_attention_chunk": 48}
SGU = {"decoder_block": "fattorib", "static_sgu": True, "static_sgu_kernel": 24}
# einsum is the form whose sums the traced program shows as products. gelu_erf is over 20 operations
# to XLA for each element.
MUDD = {
    "decoder_block": "muddformer",
    "base_num_decoder_layers": 3,
    "dense_mixing": "einsum",
    "dense_activation": "gelu",
}
CASES = {
    "gpt2": {"decoder_block": "gpt2"},  # tied head, learned positions, plain MLP
    "gpt2, untied, blocked": {"decoder_block": "gpt2", "logits_via_embedding": False} | BLOCKED,
    "llama2": {"base_num_kv_heads": 2},  # grouped queries, gated MLP, untied head
    "llama2, blocked": {"base_num_kv_heads": 1} | BLOCKED,
    "llama2, both directions": {"mlm_training": True} | BLOCKED,
    "gpt_neox": {"decoder_block": "gpt_neox"},  # parallel arrangement
    "gemma": {"decoder_block": "gemma", "base_num_kv_heads": 1},  # scaled, zero-centred norms
    "gpt3": {"decoder_block": "gpt3", "logits_via_embedding": True},  # no positions
    "tokenformer": {"decoder_block": "tokenformer", "slot_num": 96},
    "tokenformer, grouped queries": {
        "decoder_block": "tokenformer_pytorch",
        "base_num_kv_heads": 2,
        "proj_slot_num": 160,
        "gelu_approximate": True,  # erf is over 20 operations to XLA
    },
    "tokenformer, full": {"decoder_block": "tokenformer", "remat_policy": "full"},
    "tokenformer, parallel, full": {
        "decoder_block": "tokenformer",
        "block_arrangement": "parallel",
        "remat_policy": "full",
    },
    "llama2, full": {"base_num_kv_heads": 2, "remat_policy": "full"},
    "gpt_neox, full": {"decoder_block": "gpt_neox", "remat_policy": "full"},
    "local, none": {"decoder_block": "gpt_neo"} | NONE,
    "local, both directions": {
        "attention_types": [[["local"], 2]],
        "sliding_window_size": 24,
        "mlm_training": True,
    },
    "memories": {"decoder_block": "gpt_neo", "num_mem_kv": 8} | BLOCKED,
    "one for all, macaron": {
        "decoder_block": "gpt_neo",
        "share_parameters": True,
        "use_macaron": True,
    },
    "experts, places": PLACES,
    "static SGU": SGU,
    "Head-QK": {"decoder_block": "gpt2", "head_qk": True, "head_qk_dim": 128},
    "muddformer": MUDD,  # layers that differ
    "muddformer, full": MUDD | {"remat_policy": "full"},
    "muddpythia, full": MUDD
    | {"decoder_block": "muddpythia", "mlp_activations": ["gelu"], "remat_policy": "full"},
}
SUMS_ONE_BY_ONE = MUDD | {"dense_mixing": "sum"}
# XLA counts the body of a loop once, whatever its length, so these are for the traced program.
TRACED = {
    "scanned": {"scan_layers": True},
    "scanned, full": {"scan_layers": True, "remat_policy": "full"},
    "head in chunks": {"num_vocab_tiling": 4, "logits_via_embedding": True},
    "head in chunks, full": {"num_vocab_tiling": 4, "remat_policy": "full"},
    "Head-QK in chunks": {"num_vocab_tiling": 4, "head_qk": True, "head_qk_dim": 128},
    "linear": LINEAR,
    "linear, full": LINEAR | {"remat_policy": "full", "base_num_kv_heads": 1},
    "linear, both directions": LINEAR
    | {"attention_types": [[["linear"], 2]], "mlm_training": True, "remat_policy": "full"},
    "local, none, full": {"decoder_block": "gpt_neo", "remat_policy": "full"} | NONE,
    "one for all, macaron, scanned, full": {
        "decoder_block": "gpt_neo",
        "share_parameters": True,
        "use_macaron": True,
        "scan_layers": True,
        "remat_policy": "full",
    },
    "rezero, full": {"decoder_block": "gpt_neo", "use_rezero": True, "remat_policy": "full"},
    "rezero, parallel, full": {
        "use_rezero": True,
        "block_arrangement": "parallel",
        "remat_policy": "full",
    },
    "experts": EXPERTS,
    "experts, full": EXPERTS | {"remat_policy": "full"},
    "experts in one layer, places, full": PLACES
    | {"moe_layers": [1], "moe_group_size": 64, "remat_policy": "full"},
    "static SGU, full": SGU | {"remat_policy": "full"},
    "static SGU, sequential, full": SGU
    | {"decoder_block": "gpt2", "remat_policy": "full", "static_sgu_kernel": 8},
    "static SGU, rezero, full": SGU
    | {"decoder_block": "gpt_neo", "use_rezero": True, "remat_policy": "full"},
    # Kinds of sums, which take no loop but time to compile.
    "muddformer, pre- and post-norm, full": MUDD
    | {"decoder_block": "muddformer_prepost", "remat_policy": "full"},
    "muddformer, pre-norm alone, full": MUDD | {"mudd_prenorm": True, "remat_policy": "full"},
    "muddformer, norms after all sums, full": MUDD
    | {"mudd_postnorm": "all", "remat_policy": "full"},
    "fixed weights, layers alike, full": MUDD
    | {"dense_dynamic": False, "dynamic_mlp_dim": False, "dense_first_norms": "each"}
    | {"remat_policy": "full"},
    "two ways of the last two outputs, no fixed weights, full": MUDD
    | {"dense_ways": ["q", "v"], "dense_static": False, "dense_sources": "window"}
    | {"dense_window": 2, "remat_policy": "full"},
    "sums after every second layer, slots, full": MUDD
    | {"decoder_block": "tokenformer", "dense_conn": True, "dense_period": 2}
    | {"remat_policy": "full"},
}


def built(case):
    """(count, logits of a batch, loss and gradient of a batch, their arguments, tokens)."""
    config = tiny_config(**(SIZES | case))
    model, batch = Model(config.model), random_batch(config, rows=1)

    def logits(parameters, batch):
        return model.merge(parameters)(batch)

    def loss(parameters, batch):
        return loss_sums(model.merge(parameters), batch, config.model.objective).total

    count = count_flops(model, config.model.shape.max_target_length)
    arguments = (model.abstract, batch)
    return count, logits, jax.value_and_grad(loss), arguments, batch.tokens_BT.size


def products(jaxpr) -> int:
    """Operations of all products of matrices in a traced program, loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            outputs = math.prod(equation.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(left[dimension] for dimension in contracted)
        if equation.primitive.name == "ragged_dot_general":
            # Each row of the left with one matrix, or each row of both with each other.
            left, outputs = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * left.size * outputs.shape[-1]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * products(inner)
    return total


@pytest.mark.parametrize("name", some_quick([*CASES, "sums"], 3))
def test_xla_counts_the_same_within_5_percent(name):
    """XLA's own count of the optimised programs.

    Beside products it has one operation or more for every element of norms, softmax, activation
    functions, masks, rotary positions, additions and the cross entropy, forward and backward: 1 to
    4 % here. So it is never below the formula.
    """
    case = (CASES | {"sums": SUMS_ONE_BY_ONE})[name]
    count, logits, loss_and_gradient, arguments, tokens = built(case)
    programs = [(loss_and_gradient, count.executed_per_token)]
    if "remat_policy" not in case:  # else the forward pass is that of another case
        programs.append((logits, count.executed_forward))
    for function, formula in programs:
        cost = jax.jit(function).lower(*arguments).compile().cost_analysis()
        assert formula * tokens <= cost["flops"] <= 1.05 * formula * tokens


@pytest.mark.parametrize("name", some_quick(CASES | TRACED, 3))
def test_the_products_of_the_traced_program_are_the_same_exactly(name):
    count, logits, loss_and_gradient, arguments, tokens = built((CASES | TRACED)[name])
    for function, formula in (
        (logits, count.executed_forward),
        (loss_and_gradient, count.executed_per_token),
    ):
        assert products(jax.make_jaxpr(function)(*arguments).jaxpr) == formula * tokens


def test_the_rule_differs_from_what_is_executed_by_the_masked_half_only():
    causal = count_flops(Model(tiny_config(attention="dot_product").model), 16)
    assert causal.executed_per_token == causal.per_token + causal.attention
    both = count_flops(Model(tiny_config(mlm_training=True).model), 16)
    assert both.executed_per_token == both.per_token == causal.executed_per_token
    assert both.attention == 2 * causal.attention


@pytest.mark.parametrize("case", ["llama2", "tokenformer"])
def test_policy_minimal_computes_only_attention_between_tokens_again(case):
    _, _, loss_and_gradient, arguments, tokens = built(CASES[case])
    count, _, minimal, _, _ = built(CASES[case] | {"remat_policy": "minimal"})
    again = sum(part.executed for part in count.parts if part.name.startswith("attention "))
    again -= next(part.executed for part in count.parts if part.name == "attention output")
    more = products(jax.make_jaxpr(minimal)(*arguments).jaxpr) - products(
        jax.make_jaxpr(loss_and_gradient)(*arguments).jaxpr
    )
    assert more == again * tokens


def test_slots_by_hand():
    # 12 layers of 16 x 768 x 576 and the tied head of 50304 x 768. Attention: 12 layers x 2
    # products x 2 x 768 x 512 keys = 18,874,368.
    config = configure(
        model_name="tokenformer-124m", dtype="float32", scan_layers=True, remat_policy="none"
    )
    count = count_flops(Model(config.model), 1024)
    assert count.matmul_parameters == 12 * 16 * 768 * 576 + 50_304 * 768
    assert count.forward == 2 * count.matmul_parameters + 18_874_368
    parts = {part.name: part.flops / (2 * 12 * 768 * 576) for part in count.parts}
    assert [parts[name] for name in ("query, key, value", "attention output", "feed-forward")] == [
        6,
        2,
        8,
    ]


@pytest.mark.parametrize(
    ("name", "length", "forward", "training"),
    [
        # Weights: 12 layers of 12 x 768^2 and the tied head of 50257 x 768 make 123,532,032, each
        # 2 operations. Attention: 12 layers x 2 products x 2 x 768 x 512 keys = 18,874,368.
        ("gpt2-124m", 1024, 2 * 123_532_032 + 18_874_368, 797_815_296),
        # 32 layers of (4 x 4096 + 3 x 11008) x 4096 and a head of 32000 x 4096 make
        # 6,607,077,376. Attention: 32 layers x 2 products x 2 x 4096 x 2048 keys = 1,073,741,824.
        ("llama2-7b", 4096, 2 * 6_607_077_376 + 1_073_741_824, 42_863_689_728),
    ],
)
def test_published_models_by_hand(name, length, forward, training):
    config = configure(model_name=name, dtype="float32", scan_layers=True, remat_policy="none")
    count = count_flops(Model(config.model), length)
    assert count.forward == forward
    assert count.per_token == training


@pytest.mark.parametrize("mixing", ["sum", "einsum"])
def test_dense_connections_by_hand(mixing):
    # Sums of 2, 3 and 4 hidden states, on four ways but after the last layer; 64 hidden units each.
    L, D, F = 3, 32, 64
    model = Model(tiny_config("muddformer", mlp_dim_multiple=8, scan_layers=False,
                              dense_mixing=mixing).model)  # fmt: skip
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


@pytest.mark.parametrize(
    ("num_layers", "width", "heads", "published"),
    [(24, 2048, 16, (0.0022, 0.0038)), (32, 2560, 32, (0.0023, 0.0040))],
    ids=["1.4B", "2.8B"],
)
def test_published_overhead_of_dense_connections(num_layers, width, heads, published):
    """Parameters and operations over those of the layers, for 4096 tokens (Xiao et al. 2025).

    The paper counts eta / 6 and eta / (3 + rho / 4) with eta = (L + 3) / D and rho = T / D: four
    ways after the last layer, too, and no second product.
    """
    L, D, T = num_layers, width, 4096
    config = configure(
        decoder_block="muddpythia", base_emb_dim=D, base_num_decoder_layers=L, base_mlp_dim=4 * D,
        base_num_query_heads=heads, base_num_kv_heads=heads, head_dim=D // heads,
        dense_hidden_rounding="none", dense_last_expand=1, dtype="float32", scan_layers=False,
        remat_policy="none", dataset_type="synthetic",
    )  # fmt: skip
    parts = {part.name: part for part in count_flops(Model(config.model), T).parts}
    pairs = [4 * (depth + 1) for depth in range(1, L)] + [L + 1]
    counted = parts["dense connections"].flops + parts["sums over depth"].flops
    assert counted == 2 * sum(K * D + K * K + K * D for K in pairs)
    layers = sum(
        parts[name].flops
        for name in ("query, key, value", "attention scores", "attention values",
                     "attention output", "feed-forward")
    )  # fmt: skip
    eta, rho = (L + 3) / D, T / D
    whole = counted - 2 * sum(K * K for K in pairs) + 4 * D * 3 * (L + 1)
    assert whole / layers == pytest.approx(eta / (3 + rho / 4), rel=1e-12)
    assert (round(eta / 6, 4), round(whole / layers, 4)) == published
    assert counted / layers == pytest.approx(whole / layers, rel=0.05)


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


def test_shared_weights_are_held_once_and_multiplied_in_each_layer():
    alone, shared = parts_of(), parts_of(share_parameters=True)
    for name in ("query, key, value", "attention output", "feed-forward"):
        assert 3 * shared[name].parameters == alone[name].parameters
        assert shared[name].flops == alone[name].flops
    assert shared["attention scores"] == alone["attention scores"]


def test_experts_by_hand():
    L, D, F, E, k = 3, 32, 64, 8, 2
    keys = {"num_experts": E, "num_experts_per_tok": k}
    parts = parts_of(**keys, capacity_factor=1.5)
    assert parts["router"] == Part("router", L * D * E, 2 * L * D * E, 2 * L * D * E)
    # 16 tokens: 1.5 * 16 / 8 = 3 places for each of 8 experts.
    one = 2 * L * 3 * D * F
    assert parts["feed-forward"] == Part("feed-forward", one * E // 2, k * one, 24 / 16 * one)
    assert parts_of(**keys)["feed-forward"].executed == k * one
    macaron = parts_of(use_macaron=True)
    assert macaron["feed-forward"].flops == 2 * parts_of()["feed-forward"].flops


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


def test_every_parameter_is_in_one_part():
    for case in (CASES | TRACED).values():
        model = Model(tiny_config(**(SIZES | case)).model)
        assert sum(part.parameters for part in count_flops(model, 8).parts) == model.num_parameters


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
    ("section", "length", "keys"),
    [
        ({"attention": "dot_product"}, 256, 256),
        ({"attention": "blocked", "attention_block_size": 64}, 256, (64 + 128 + 192 + 256) / 4),
        ({"attention": "autoselected", "attention_block_size": 64}, 256, 160),
        ({"attention": "blocked", "attention_block_size": 5}, 13, (5 * 5 + 5 * 10 + 3 * 13) / 13),
        ({"attention": "blocked", "attention_block_size": 512}, 100, 100),
        # No more than 16 blocks: of 256 rows.
        ({"attention": "blocked", "attention_block_size": 128}, 4096, 256 * (16 + 1) / 2),
        ({"attention": "blocked", "causal": False}, 4096, 4096),
        ({"attention": "flash"}, 2048, 512 * (1 + 2 + 3 + 4) / 4),
        # Not what the kernel serves.
        ({"attention": "flash"}, 100, 100),
    ],
)
def test_keys_multiplied(section, length, keys):
    assert keys_multiplied(Attention(**section), length) == keys


@pytest.mark.parametrize(
    ("window", "length", "causal", "keys"),
    [
        (4, 12, True, 12),  # one block of all
        (20, 100, True, 40),
        (20, 90, True, 5 * 20 * 40 / 90),  # rows that fill up the last block
        (20, 100, False, 60),
        (4, 64, True, 32),  # blocks of 16 rows at least
    ],
)
def test_keys_multiplied_by_a_window(window, length, causal, keys):
    section = Attention(sliding_window_size=window, causal=causal)
    assert keys_multiplied(section, length, "local") == keys


def test_executed_operations_are_unknown_for_policies_in_between():
    count = count_flops(Model(tiny_config(remat_policy="minimal").model), 16)
    assert count.executed_per_token is None
    assert count.per_token == count_flops(Model(tiny_config().model), 16).per_token


def test_line_of_maxtext():
    parts = (Part("feed-forward", 1, 3e9, 3e9), Part("attention scores", 0, 1e9 / 3, 1e9))
    line = FlopCount(sequence_length=8, parts=parts, recomputed=0.0).line(1000)
    assert line == (
        "Per train step: Total TFLOPs: 10.00 split as 90.00% learnable weight flops and "
        "10.00% attention flops"
    )
    parts = (Part("feed-forward", 1, 8e9, 8e9), Part("attention values", 0, 1e9, 1e9),
             Part("sums over depth", 0, 1e9, 1e9))  # fmt: skip
    line = FlopCount(sequence_length=8, parts=parts, recomputed=0.0).line(1000)
    assert line.endswith(
        "split as 80.00% learnable weight flops and 10.00% attention flops, and 10.00% sums over "
        "depth"
    )
