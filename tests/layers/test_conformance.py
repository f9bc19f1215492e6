"""What must hold for every architecture, all of it read from one compiled program per row.

A new part adds a row to ARCHITECTURES, a pair of options that makes no sense one to REFUSED.
"""

import contextlib
import itertools
import random
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import LENGTH, SIZES, Subject
from MaxText.cost.flops import count_flops
from MaxText.layers.depth import aggregate
from tests.small_models import tiny_config

SLOW = pytest.mark.slow
UNROLLED = {"scan_layers": False}
BIASES = {"qkv_bias": True, "proj_bias": True, "ffn_bias": True}
TWO_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
HEAD_QK = {"head_qk": True, "head_qk_dim": 4, "num_vocab_tiling": 3}
SGU = {"static_sgu": True, "static_sgu_kernel": 3}
MUDD = UNROLLED | {"mlp_dim_multiple": 4, "dense_aggregation_impl": "sum"}
DROPS = {"dropout_rate": 0.2, "drop_path": 0.1}


def kinds(*names: str, repeats: int = 1) -> dict[str, Any]:
    window = {"sliding_window_size": 3} if "local" in names else {}
    return {"attention_types": [[list(names), repeats]]} | window


# Several chunks: of one alone the state has no gradient, which the formula counts.
LINEAR = kinds("linear", "global") | {"linear_attention.chunk": 5}

DELTA = {
    "mixer": "gated_delta_net",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "linear_chunk_size": 5,
}

LATENT = {
    "mixer": "latent_attention",
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}

MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 3,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 5,
}

# name -> (decoder_block, keys)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {"base_num_kv_heads": 2, "use_qk_norm": True}),
    "gpt2": ("gpt2", {"position_embedding": "learned", "proj_bias": True}),
    "local, rotary of Llama 3.1": (
        "llama2",
        kinds("local", "global") | {"rope_type": "llama3.1", "attention": "dot_product"} | DROPS,
    ),
    "sinks, gated output, local": (
        "llama2",
        kinds("local", "global")
        | {"attention_sinks": True, "attention_output_gate": True, "base_num_kv_heads": 2},
    ),
    "latent attention": (
        "llama2",
        LATENT | {"q_lora_rank": 10, "rope_type": "yarn", "rope_pairs": "adjacent"} | DROPS,
    ),
    "gated DeltaNet": ("llama2", DELTA | {"linear_allow_neg_eigval": True}),
    "KDA with and without a bound, latent attention without positions": (
        "llama2",
        LATENT
        | {"position_embedding": "none", "base_num_decoder_layers": 3, "layer_pattern": "KBA"}
        | {name: value for name, value in DELTA.items() if name != "linear_num_key_heads"}
        | {
            "layer_kinds": {
                "K": {"mixer": "kda", "kda_lora_rank": 6},
                "B": {"mixer": "kda", "kda_lora_rank": 0, "kda_lower_bound": -5.0},
                "A": {"mixer": "latent_attention"},
            }
        },
    ),
    "layers of one part: Mamba-2, attention, MLP, experts": (
        "llama2",
        MAMBA2
        | {
            "base_num_decoder_layers": 4,
            "layer_pattern": "MAFE",
            "layer_kinds": {
                "M": {"mixer": "mamba2", "feed_forward_type": "none"},
                "A": {"feed_forward_type": "none"},
                "F": {"mixer": "none"},
                "E": {"mixer": "none", **TWO_EXPERTS, "moe_activations": ["relu2"]},
            },
            "base_num_kv_heads": 2,
            "position_embedding": "none",
            "mamba_proj_bias": True,
            "time_step_limit": [0.4, 1.0],
        },
    ),
    "linear, ReZero": ("llama2", LINEAR | {"base_num_kv_heads": 1, "use_rezero": True}),
    "static SGU, Head-QK, ALiBi": ("fattorib", SGU | HEAD_QK),
    "shared layer, scale norm": (
        "llama2",
        kinds("local", repeats=2)
        | {"share_layer_params": True, "normalization_type": "scale_norm", "base_num_kv_heads": 1},
    ),
    "tokenformer": ("tokenformer", {"slot_num": 12, "drop_path": 0.1}),
    "experts": (
        "llama2",
        TWO_EXPERTS
        | {"capacity_factor": 1.0, "eval_capacity_factor": 0.5, "moe_second.policy": "random"}
        | {"routed_bias": True, "routed_bias_update_rate": 0.001},
    ),
    "experts of DeepSeek V3": (
        "llama2",
        TWO_EXPERTS
        | {"routed_score_func": "sigmoid", "routed_scaling_factor": 2.5}
        | {"n_routing_groups": 2, "topk_routing_group": 1, "router_z_loss_weight": 0.01}
        | {"shared_experts": 1, "moe_mlp_dim": 8, "load_balance_choices": "all"}
        | {"routed_bias": True, "routed_bias_update_rate": 0.001}
        | {"layer_pattern": "DE", "layer_kinds": {"D": {"num_experts": 1}, "E": {}}},
    ),
    "experts with biases, gated shared experts": (
        "llama2",
        # Tokens visit all experts: a step of the check of gradients would change their choices.
        {"num_experts": 2, "num_experts_per_tok": 2, "routed_score_func": "topk_softmax"}
        | {"router_bias": True, "expert_bias": True}
        | {"shared_experts": 2, "shared_expert_mlp_dim": 12, "shared_expert_gate": True},
    ),
    "muddformer": ("muddformer", MUDD),
    "a pattern of layers": (
        "llama2",
        {
            "base_num_decoder_layers": 5,
            "layer_pattern": "D(LA)",
            "layer_kinds": {
                "D": {"base_mlp_dim": 8, "position_embedding": "none"},
                "L": {
                    "mixer": "linear_attention",
                    "base_num_kv_heads": 2,
                    "linear_attention.chunk": 5,
                },
                "A": {
                    "num_experts": 4,
                    "use_qk_norm": True,
                    "head_dim": 6,
                    "base_num_query_heads": 2,
                    "base_num_kv_heads": 1,
                    "rope_max_timescale": 50.0,
                },
            },
        }
        | DROPS,
    ),
    "post-norm and pre-norm layers, joint norms": (
        "llama2",
        {
            "layer_pattern": "AL",
            "layer_kinds": {
                "A": {
                    "norm_placement": "post",
                    "qk_norm_scope": "joint",
                    "position_embedding": "none",
                },
                "L": {"mixer": "local_attention", "sliding_window_size": 3, "rope_type": "yarn"},
            },
            "use_qk_norm": True,
            "base_num_kv_heads": 2,
            "rope_truncate": False,
            "rope_attention_factor": 1.3,
            "residual_multiplier": 0.7,
        }
        | DROPS,
    ),
    "sandwich norms, global layers without values": (
        "gemma",
        {
            "base_num_decoder_layers": 3,
            "layer_pattern": "LLG",
            "layer_kinds": {
                "L": {"mixer": "local_attention", "sliding_window_size": 4},
                "G": {
                    "head_dim": 8,
                    "base_num_kv_heads": 1,
                    "share_kv_projections": True,
                    "rope_type": "proportional",
                    "rotary_pct": 0.5,
                },
            },
            "norm_placement": "sandwich",
            "use_layer_scalar": True,
            "use_qk_norm": True,
            "use_v_norm": True,
            "base_num_kv_heads": 2,
        },
    ),
}
COHERE = {
    "block_arrangement": "parallel",
    "parallel_residual_shared_norm": True,
    "normalization_type": "layer_norm",
    "normalization_bias": False,
    "use_qk_norm": True,
    "qk_norm_type": "layer_norm",
    "qk_norm_scope": "separate",
    "base_num_kv_heads": 2,
    "rope_pairs": "adjacent",
    "logits_scaling": 4.0,
    "embedding_multiplier": 3.0,
}
NANOCHAT = {
    "block_norm_parametric": False,
    "embedding_norm": True,
    "embedding_norm_parametric": False,
    "final_norm_parametric": False,
    "use_qk_norm": True,
    "qk_norm_with_scale": False,
    "qk_norm_after_rotary": True,
    "mlp_activations": ["relu2"],
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_short_factors": [1.1, 1.3],
    "rope_long_factors": [2.0, 4.0],
    "rope_attention_factor": 1.2,
    "original_max_position_embeddings": 1,  # all documents are longer
    "temperature_tuning_beta": 0.3,
}
CLAMPED = {"mlp_activations": ["quick_gelu", "linear_plus_one"], "mlp_activations_limit": 0.5}
# Their parts are above, or have golden tests; with the slow tests.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "memories, macaron, axial positions": (
        "gpt_neo",
        {"num_mem_kv": 3, "use_macaron": True}
        | {"position_embedding": "axial", "axial_pos_shape": [3, 4]},
    ),
    "no attention, local, ALiBi": (
        "gpt_neo",
        kinds("none", "local") | UNROLLED | {"position_embedding": "alibi", "final_norm": False},
    ),
    "gpt_neox": ("gpt_neox", BIASES | {"rotary_pct": 0.5}),
    "gemma": ("gemma", {"base_num_kv_heads": 1, "attn_logits_soft_cap": 5.0}),
    "experts in one layer, Head-QK": (
        "gpt_neo",
        TWO_EXPERTS
        | HEAD_QK
        | UNROLLED
        | {"moe_layers": [1], "normalization_type": "scale_norm_centered"},
    ),
    "denseformer, experts": (
        "denseformer",
        UNROLLED | {"num_experts": 4, "dense_aggregation_impl": "sum"},
    ),
    "per-layer embeddings": (
        "llama2",
        {
            "base_num_decoder_layers": 3,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 40,
            "use_layer_scalar": True,
            "norm_placement": "sandwich",
        },
    ),
    "Mamba-2 beside attention, multipliers": (
        "llama2",
        MAMBA2
        | {
            "parallel_mixer": "mamba2",
            "mamba_norm_before_gate": True,
            "attention_in_multiplier": 0.7,
            "attention_out_multiplier": 1.3,
            "mlp_multipliers": [0.8, 1.1],
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
            "ssm_out_multiplier": 0.6,
        },
    ),
    "Cohere": ("llama2", COHERE),
    "nanochat": ("llama2", NANOCHAT),
    "LongRoPE, tuned temperature, clamped GLU": ("llama2", LONGROPE | CLAMPED),
    "clamped experts, xIELU": (
        "llama2",
        TWO_EXPERTS
        | CLAMPED
        | UNROLLED
        | {"moe_activations": ["silu", "linear"], "moe_layers": [1], "mlp_activations": ["xielu"]},
    ),
    "parallel, sandwich norms": (
        "gpt_neox",
        {"norm_placement": "sandwich", "parallel_residual_shared_norm": True, "rotary_pct": 0.5},
    ),
    "muddformer, post-norm": (
        "muddformer",
        MUDD | {"norm_placement": "post", "matmul_precision": "highest"},
    ),
    "denseformer, sandwich norms": (
        "denseformer",
        UNROLLED | {"norm_placement": "sandwich", "dense_aggregation_impl": "sum"},
    ),
    "muddpythia": ("muddpythia", MUDD | {"rotary_pct": 0.5}),
    "muddformer_prepost": ("muddformer_prepost", MUDD),
    "tokenformer, parallel": (
        "tokenformer_pytorch",
        {"proj_slot_num": 20, "base_num_kv_heads": 2, "block_arrangement": "parallel"}
        | {"rotary_pct": 0.5},
    ),
}


@contextlib.contextmanager
def sums_as_products():
    """Depth aggregates that a traced program shows as products, forward as they are backward."""

    def product(weights_BTCS, sources, scales_SD):
        states_SBTD = jnp.stack(aggregate._to_f32(sources, scales_SD))
        sums_CBTD = jnp.einsum("btcs,sbtd->cbtd", weights_BTCS, states_SBTD, precision="highest")
        return list(sums_CBTD.astype(sources[0].dtype))

    with mock.patch.object(aggregate, "_sum", product):
        yield


# Each compiles programs of its own, so only a few architectures have them.
COSTLY = ("initialization", "remat policies", "bfloat16", "resume", "growth")
DEVICES = "8 devices"
REPRESENTATIVE = ("linear, ReZero", "tokenformer", "experts")
ON_DEVICES = (
    *REPRESENTATIVE,
    "latent attention",
    "gated DeltaNet",
    "layers of one part: Mamba-2, attention, MLP, experts",
    "post-norm and pre-norm layers, joint norms",
)


def subject_of(decoder_block: str, keys: dict[str, Any]) -> Subject:
    return Subject(lambda **more: tiny_config(decoder_block, **SIZES | keys | more))


def conforms(decoder_block: str, keys: dict[str, Any]) -> None:
    subject = subject_of(decoder_block, keys)
    with sums_as_products():
        for check in CHECKS:
            if check.name not in (*COSTLY, DEVICES):
                assert check.problem(subject) is None, keys
        for operations, model in zip(subject.operations, subject.models, strict=True):
            count = count_flops(model, LENGTH)
            assert sum(part.parameters for part in count.parts) == model.num_parameters
            # Exact, not to 1 %.
            assert operations == count.executed_per_token * subject.batch.tokens_BT.size


@pytest.mark.parametrize("name", [*ARCHITECTURES, *(pytest.param(n, marks=SLOW) for n in MORE)])
def test_conformance(name):
    conforms(*(ARCHITECTURES | MORE)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_costly_conformance(name):
    subject = subject_of(*ARCHITECTURES[name])
    for check in CHECKS:
        if check.name in COSTLY:
            assert check.problem(subject) is None, check.name


@pytest.mark.multi_device
@pytest.mark.parametrize("name", ON_DEVICES)
def test_conformance_on_devices(name):
    subject = subject_of(*ARCHITECTURES[name])
    [check] = (check for check in CHECKS if check.name == DEVICES)
    assert check.problem(subject) is None


# Values of options, each as keys.
OPTIONS: list[list[dict[str, Any]]] = [
    [{}, kinds("local", repeats=2), LINEAR, kinds("none", "local")],
    [
        {},
        {"block_arrangement": "parallel"},
        {"block_arrangement": "parallel", "parallel_residual_shared_norm": True},
        {"use_macaron": True},
        {"use_rezero": True},
    ],
    [{}, {"norm_placement": "post"}, {"norm_placement": "sandwich", "use_layer_scalar": True}],
    [
        {},
        LONGROPE,
        {"rope_pairs": "adjacent", "rotary_pct": 0.5},
        {"position_embedding": "learned"},
        {"position_embedding": "axial", "axial_pos_shape": [3, 4]},
        {"position_embedding": "alibi"},
    ],
    [
        {"normalization_type": name}
        for name in ("rms_norm", "layer_norm", "scale_norm", "scale_norm_centered")
    ],
    [
        {},
        {"num_experts": 4},
        TWO_EXPERTS | {"capacity_factor": 1.0, "moe_second.policy": "random"},
        TWO_EXPERTS | {"moe_layers": [1], "mlp_activations": ["gelu"]},
    ],
    [{}, {"num_mem_kv": 2}, SGU],
    [{}, {"share_layer_params": True}, UNROLLED | {"dense_conn": True}],
    [{}, UNROLLED | {"remat_policy": "full"}],
    [{}, {"logits_via_embedding": True, "final_norm": False}, HEAD_QK],
    [
        {},
        {"base_num_kv_heads": 2, "use_qk_norm": True},
        BIASES | {"base_num_kv_heads": 1},
        {"use_qk_norm": True, "qk_norm_scope": "joint", "qk_norm_after_rotary": True},
        {"base_num_kv_heads": 2, "use_v_norm": True, "share_kv_projections": True},
    ],
    [{}, DROPS],
]
NUM_TESTED = 2  # rows in a run of the slow tests
Row = tuple[int, ...]  # which value of each option


def keys_of(row: Row) -> dict[str, Any]:
    return {k: v for values, n in zip(OPTIONS, row, strict=True) for k, v in values[n].items()}


def is_allowed(row: Row) -> bool:
    try:
        tiny_config(**SIZES | keys_of(row), strict_config=True)
    except ConfigurationError:
        return False
    return True


@pytest.fixture(scope="module")
def covering() -> list[Row]:
    """Rows that the configuration allows, each of random ones that with most new pairs.

    Each run tests some of them, drawn with the seed that pytest-randomly prints.
    """
    generator = random.Random(0)
    drawn = [tuple(generator.randrange(len(v)) for v in OPTIONS) for _ in range(600)]
    allowed = [row for row in drawn if is_allowed(row)]
    rows, covered = [], set()

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    while len(rows) < 12:
        rows.append(max(allowed, key=lambda row: len(pairs(row) - covered)))
        covered |= pairs(rows[-1])
    return random.sample(rows, NUM_TESTED)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_TESTED))
def test_conformance_of_pairs(number, covering):
    conforms("llama2", keys_of(covering[number]))
