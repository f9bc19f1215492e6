"""What must hold for every architecture, all of it read from one compiled program per row.

A new part adds a row to ARCHITECTURES, a pair of options that makes no sense one to REFUSED.
"""

import contextlib
import itertools
import math
import random
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.schema import Config
from MaxText.input_pipeline.batch import Batch
from MaxText.layers import depth_mixing
from MaxText.layers.model import Model
from MaxText.monitoring.flops import count_flops
from MaxText.training.objective import loss_sums, num_tokens
from tests.small_models import random_batch, tiny_config

LENGTH, PROMPT, CUT = 12, 5, 5
SIZES = {
    "base_emb_dim": 16,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 16,
    "head_dim": 4,
    "base_num_decoder_layers": 2,
    "vocab_size": 32,
    "max_target_length": LENGTH,
    "normalization_layer_epsilon": 1e-5,
    "attention_block_size": 5,
}
SLOW = pytest.mark.slow
UNROLLED = {"scan_layers": False}
BIASES = {"qkv_bias": True, "proj_bias": True, "ffn_bias": True}
TWO_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
HEAD_QK = {"head_qk": True, "head_qk_dim": 4, "num_vocab_tiling": 3}
SGU = {"static_sgu": True, "static_sgu_kernel": 3}
MUDD = UNROLLED | {"mlp_dim_multiple": 4, "dense_mixing": "sum"}
DROPS = {"dropout_rate": 0.2, "drop_path": 0.1}


def kinds(*names: str, repeats: int = 1) -> dict[str, Any]:
    window = {"sliding_window_size": 3} if "local" in names else {}
    return {"attention_types": [[list(names), repeats]]} | window


# name -> (decoder_block, keys)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {"base_num_kv_heads": 2, "use_qk_norm": True}),
    "gpt2": ("gpt2", {"position_embedding": "learned", "proj_bias": True}),
    "gpt_neox": ("gpt_neox", BIASES | {"rotary_pct": 0.5}),
    "gemma": ("gemma", {"base_num_kv_heads": 1, "attn_logits_soft_cap": 5.0}),
    "local, rotary of Llama 3.1": (
        "llama2",
        kinds("local", "global") | {"rope_type": "llama3.1", "attention": "dot_product"} | DROPS,
    ),
    "linear, ReZero": (
        "llama2",
        kinds("linear", "global")
        | {"linear_attention_chunk": 5, "base_num_kv_heads": 1, "use_rezero": True},
    ),
    "memories, macaron, axial positions": (
        "gpt_neo",
        {"num_mem_kv": 3, "use_macaron": True}
        | {"position_embedding": "axial", "axial_pos_shape": [3, 4]},
    ),
    "no attention, local, ALiBi": (
        "gpt_neo",
        kinds("none", "local") | UNROLLED | {"position_embedding": "alibi", "final_norm": False},
    ),
    "static SGU, Head-QK, ALiBi": ("fattorib", SGU | HEAD_QK),
    "shared layer, scale norm": (
        "llama2",
        kinds("local", repeats=2)
        | {"share_parameters": True, "normalization_type": "scale_norm", "base_num_kv_heads": 1},
    ),
    "tokenformer": ("tokenformer", {"slot_num": 12, "drop_path": 0.1}),
    "experts": (
        "llama2",
        TWO_EXPERTS
        | {"capacity_factor": 1.0, "eval_capacity_factor": 0.5, "moe_second_policy": "random"},
    ),
    "experts in one layer, Head-QK": (
        "gpt_neo",
        TWO_EXPERTS
        | HEAD_QK
        | UNROLLED
        | {"moe_layers": [1], "normalization_type": "scale_norm_centered"},
    ),
    "muddformer": ("muddformer", MUDD),
    "denseformer, experts": ("denseformer", UNROLLED | {"num_experts": 4, "dense_mixing": "sum"}),
}
# Their parts are above, or have golden tests; with the slow tests.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "muddpythia": ("muddpythia", MUDD | {"rotary_pct": 0.5}),
    "muddformer_prepost": ("muddformer_prepost", MUDD),
    "tokenformer, parallel": (
        "tokenformer_pytorch",
        {"proj_slot_num": 20, "base_num_kv_heads": 2, "block_arrangement": "parallel"}
        | {"rotary_pct": 0.5},
    ),
}


def variants() -> Batch:
    """Two packed documents; one token changed in either of them; each as the start of one alone."""
    tokens, more = np.random.default_rng(1).integers(0, 32, (2, LENGTH))
    first, second = tokens.copy(), tokens.copy()
    first[CUT - 2] ^= 1
    second[CUT + 2] ^= 1
    alone = [np.append(part, more)[:LENGTH] for part in (tokens[:CUT], tokens[CUT:])]
    rows = np.stack([tokens, first, second, *alone]).astype(np.int32)
    places = np.arange(LENGTH, dtype=np.int32)
    behind = places >= CUT
    segments = np.stack([1 + behind] * 3 + [np.ones(LENGTH, int)] * 2).astype(np.int32)
    positions = np.stack([places - CUT * behind] * 3 + [places] * 2)
    return Batch(rows, rows, np.ones(rows.shape, np.float32), positions, segments)


LENGTHS = np.array([PROMPT, 2])


def parameters_of(model: Model) -> dict:
    """Numbers about as large as trained ones, also where training starts at 0."""
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        scale = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return (scale + 0.2 * generator.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract)


def decoded(decoder, tokens_BT):
    """Logits of prompts and of the tokens after them, one by one."""
    lengths_B = jnp.asarray(LENGTHS)
    padded_BT = jnp.where(jnp.arange(PROMPT) < lengths_B[:, None], tokens_BT[:, :PROMPT], 31)
    h_BTD, states = decoder.read_prompt(padded_BT, lengths_B, capacity=LENGTH)
    prompt = decoder.logits(h_BTD, decoder.pointers_of(states))

    def step(states, place):
        positions_B1 = (lengths_B + place)[:, None]
        new_B1 = jnp.take_along_axis(tokens_BT, positions_B1, axis=1)
        h_B1D, states = decoder.read_next(new_B1, positions_B1, states)
        return states, decoder.logits(h_B1D, decoder.pointers_of(states), positions_B1)[:, 0]

    _, steps = jax.lax.scan(step, states, jnp.arange(LENGTH - PROMPT))
    return prompt, jnp.moveaxis(steps, 0, 1)


@contextlib.contextmanager
def sums_as_products():
    """Sums over depth that a traced program shows as products, forward as they are backward."""

    def product(weights_BTCS, sources, scales_SD):
        states_SBTD = jnp.stack(depth_mixing._floats(sources, scales_SD))
        sums_CBTD = jnp.einsum("btcs,sbtd->cbtd", weights_BTCS, states_SBTD, precision="highest")
        return list(sums_CBTD.astype(sources[0].dtype))

    with mock.patch.object(depth_mixing, "_sum", product):
        yield


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


class Architecture:
    """A configuration and the same with the other walk and remat policy, in one program.

    Attributes:
      losses: and gradients, of both.
      logits: of `variants`, [5, T, V].
      prompt: logits of prompts, by prefill.
      steps: logits of one token after another from there.
      fell: how far a step against the gradient lowers the loss, 1 being what the gradient says.
      products: operations of both losses with their gradients.
    """

    def __init__(self, decoder_block: str, keys: dict[str, Any]):
        self.decoder_block, self.keys = decoder_block, SIZES | keys
        config = self.config()
        can_scan, scans = config.model.scan_refused is None, config.model.memory.scan_layers
        other = self.config(scan_layers=can_scan and not scans, remat_policy="full")
        self.models = [Model(config.model), Model(other.model)]
        self.batch = random_batch(config, rows=2, documents=True)
        # Keys of a kind that compiles fast.
        self.key = jax.random.key(1, impl="unsafe_rbg") if config.model.is_random else None

        with sums_as_products():
            traced = jax.jit(self.program).trace(self.models[0].abstract)
        run = traced.lower().compile()
        self.products = [
            products(equation.params["jaxpr"].jaxpr)
            for equation in traced.jaxpr.eqns
            if equation.params.get("name") == "loss"
        ]
        params = parameters_of(self.models[0])
        self.losses, self.logits, (self.prompt, self.steps) = jax.tree.map(np.asarray, run(params))
        loss, gradients = self.losses[0]
        square = sum(np.sum(np.square(gradient)) for gradient in jax.tree.leaves(gradients))
        fall = 0.003  # so short a step that the loss falls by what the gradient says
        moved = jax.tree.map(lambda x, dx: x - fall / square * dx, params, gradients)
        self.fell = (loss - run(moved)[0][0][0]) / fall

    def config(self, **more: Any) -> Config:
        return tiny_config(self.decoder_block, **self.keys | more)

    def program(self, params):
        def loss(params, model):
            sums = loss_sums(
                model.merge(params), self.batch, model.section.objective, self.key, training=True
            )
            means = sums.means(self.batch.weights_BT.sum(), num_tokens(self.batch))
            return sum(means.values())

        losses = [
            jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, model)
            for model in self.models
        ]
        decoder, batch = self.models[0].merge(params), variants()
        h_BTD, _ = decoder.hidden(batch, drops_tokens=False)
        logits = decoder.logits(h_BTD, decoder.pointers(h_BTD, batch))
        return losses, logits, decoded(decoder, batch.tokens_BT[3:])


def a_token_changes_nothing_before_it_nor_in_other_documents(found):
    for row, place, end in ((1, CUT - 2, CUT), (2, CUT + 2, LENGTH)):
        changed = np.any(found.logits[row] != found.logits[0], axis=-1)
        assert changed[place : place + 2].all()
        assert not changed[:place].any()
        assert not changed[end:].any()


def packed_documents_equal_separate_ones(found):
    packed, first, second = found.logits[[0, 3, 4]]
    np.testing.assert_allclose(packed[:CUT], first[:CUT], atol=2e-5)
    np.testing.assert_allclose(packed[CUT:], second[: LENGTH - CUT], atol=2e-5)


def cached_decoding_equals_the_full_forward_pass(found):
    for row, length in enumerate(LENGTHS):
        full = found.logits[3 + row]
        np.testing.assert_allclose(found.prompt[row, :length], full[:length], atol=1e-4)
        steps = found.steps[row]
        np.testing.assert_allclose(steps, full[length : length + len(steps)], atol=1e-4)


def gradients_are_those_of_the_loss(found):
    for path, gradient in jax.tree_util.tree_leaves_with_path(found.losses[0][1]):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        assert np.any(gradient), name
    if "static_sgu" not in found.keys:  # through which no gradient passes
        assert found.fell == pytest.approx(1, rel=0.2)


def walks_and_remat_policies_are_equal(found):
    (loss, gradients), (other, others) = found.losses
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    named = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(gradients)}
    for path, gradient in jax.tree_util.tree_leaves_with_path(others):
        name = jax.tree_util.keystr(path)
        wanted = named[name]
        np.testing.assert_allclose(gradient, wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=name)


def products_equal_the_formula(found):
    for ours, model in zip(found.products, found.models, strict=True):
        count = count_flops(model, LENGTH)
        assert sum(part.parameters for part in count.parts) == model.num_parameters
        assert ours == count.executed_per_token * found.batch.tokens_BT.size


def bfloat16_stays(found):
    """Hidden states have it, logits are float32, and a state has one format."""
    model = Model(found.config(dtype="bfloat16").model)
    tokens, places = jnp.zeros((2, PROMPT), int), jnp.full((2, 1), PROMPT)

    def run(params):
        decoder = model.merge(params)
        h_BTD, states = decoder.read_prompt(tokens, places[:, 0], LENGTH)
        new_B1D, new_states = decoder.read_next(tokens[:, :1], places, states)
        logits = decoder.logits(new_B1D, decoder.pointers_of(new_states), places)
        batch = Batch(tokens, tokens, jnp.ones(tokens.shape))
        return (decoder.hidden(batch)[0], h_BTD, new_B1D), logits, states, new_states

    hidden, logits, states, new_states = jax.eval_shape(run, model.abstract)
    assert {x.dtype for x in hidden} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32
    formats = [[(x.shape, x.dtype) for x in jax.tree.leaves(x)] for x in (states, new_states)]
    assert formats[0] == formats[1]


PROPERTIES = (
    a_token_changes_nothing_before_it_nor_in_other_documents,
    packed_documents_equal_separate_ones,
    cached_decoding_equals_the_full_forward_pass,
    gradients_are_those_of_the_loss,
    walks_and_remat_policies_are_equal,
    products_equal_the_formula,
    bfloat16_stays,
)


def conforms(decoder_block: str, keys: dict[str, Any]) -> None:
    found = Architecture(decoder_block, keys)
    for holds in PROPERTIES:
        holds(found)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *(pytest.param(n, marks=SLOW) for n in MORE)])
def test_conformance(name):
    conforms(*(ARCHITECTURES | MORE)[name])


# Values of options, each as keys.
OPTIONS: list[list[dict[str, Any]]] = [
    [{}, kinds("local", repeats=2), kinds("linear", "global"), kinds("none", "local")],
    [
        {},
        {"block_arrangement": "parallel"},
        {"block_arrangement": "parallel", "parallel_residual_shared_norm": True},
        {"use_macaron": True},
        {"use_rezero": True},
    ],
    [
        {},
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
        TWO_EXPERTS | {"capacity_factor": 1.0, "moe_second_policy": "random"},
        TWO_EXPERTS | {"moe_layers": [1], "mlp_activations": ["gelu"]},
    ],
    [{}, {"num_mem_kv": 2}, SGU],
    [{}, {"share_parameters": True}, UNROLLED | {"dense_conn": True}],
    [{}, UNROLLED | {"remat_policy": "full"}],
    [{}, {"logits_via_embedding": True, "final_norm": False}, HEAD_QK],
    [{}, {"base_num_kv_heads": 2, "use_qk_norm": True}, BIASES | {"base_num_kv_heads": 1}],
    [{}, DROPS],
]
Row = tuple[int, ...]  # which value of each option


def keys_of(row: Row) -> dict[str, Any]:
    return {k: v for values, n in zip(OPTIONS, row, strict=True) for k, v in values[n].items()}


def is_allowed(row: Row) -> bool:
    try:
        tiny_config(**SIZES | keys_of(row), strict_config=True)
    except ConfigurationError:
        return False
    return True


def covering_rows(number: int) -> list[Row]:
    """Rows that the configuration allows, each of random ones that with most new pairs."""
    generator = random.Random(0)
    drawn = [tuple(generator.randrange(len(v)) for v in OPTIONS) for _ in range(600)]
    allowed = [row for row in drawn if is_allowed(row)]
    rows, covered = [], set()

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    while len(rows) < number:
        rows.append(max(allowed, key=lambda row: len(pairs(row) - covered)))
        covered |= pairs(rows[-1])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_conformance_of_pairs(number, covering):
    conforms("llama2", keys_of(covering[number]))


@pytest.fixture(scope="module")
def covering():
    return covering_rows(12)
