"""Generating with the state of earlier tokens equals the forward pass over the whole sequence.

A family or option that brings a mixer, a position form or another part adds its row to CASES.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.generation.engine import Engine
from MaxText.generation.token_choice import Choice
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import Layout, make_mesh
from tests.small_models import some_quick, tiny_config

ALL_HEADS = {"base_num_kv_heads": 4}
WRITTEN_OUT = {"scan_layers": False}
NARROW_STEPS = {"mlp_dim_multiple": 16}

LOCAL = {"attention_types": [[["local", "global", "local"], 1]], "sliding_window_size": 5}
NONE = {"attention_types": [[["global", "none", "global"], 1]]}
CHUNKS = {"linear_attention_chunk": 5, "sliding_window_size": 3}

# name -> (decoder_block, keys)
CASES = {
    "llama2": ("llama2", {}),
    "gpt2": ("gpt2", ALL_HEADS),
    "gpt_neox": ("gpt_neox", ALL_HEADS),
    "multi-query": ("llama2", {"base_num_kv_heads": 1}),
    "qk-norm": ("llama2", {"use_qk_norm": True}),
    "biases": ("llama2", {"qkv_bias": True, "proj_bias": True, "ffn_bias": True}),
    "partial rotary": ("llama2", {"rotary_pct": 0.5}),
    "no positions": ("llama2", {"position_embedding": "none"}),
    "soft caps": ("llama2", {"attn_logits_soft_cap": 5.0, "final_logits_soft_cap": 5.0}),
    "tied and scaled": ("llama2", {"logits_via_embedding": True}),
    "plain attention": ("llama2", {"attention": "dot_product"}),
    "written out": ("llama2", {"scan_layers": False}),
    "parallel": ("llama2", {"block_arrangement": "parallel"}),
    "dropout is off": ("llama2", {"dropout_rate": 0.5}),
    "gemma": ("gemma", {"base_num_kv_heads": 1}),
    "llama3.1 rotary": ("llama2", {"rope_type": "llama3.1"}),
    "tokenformer": ("tokenformer", ALL_HEADS | {"slot_num": 24, "drop_path": 0.5}),
    "tokenformer_pytorch": ("tokenformer_pytorch", {"ffn_slot_num": 40}),
    "local": ("llama2", LOCAL),
    "local, written out": ("llama2", LOCAL | WRITTEN_OUT | {"base_num_kv_heads": 1}),
    "linear": ("llama2", {"attention_types": [[["linear", "global", "local"], 1]]} | CHUNKS),
    "memories": ("gpt_neo", ALL_HEADS | {"num_mem_kv": 3}),
    "layers of no attention": ("gpt_neo", ALL_HEADS | NONE | WRITTEN_OUT),
    "axial": ("gpt_neo", {"position_embedding": "axial", "axial_pos_shape": [5, 7]}),
    "alibi": ("llama2", {"position_embedding": "alibi"}),
    "alibi, local": ("llama2", {"position_embedding": "alibi"} | LOCAL),
    "macaron": ("gpt_neo", {"use_macaron": True}),
    "rezero": ("gpt_neo", {"use_rezero": True}),
    "scale norm": ("llama2", {"normalization_type": "scale_norm"}),
    "one for all": ("llama2", {"share_parameters": True} | LOCAL),
    "fused": ("gpt2", {"block_arrangement": "parallel", "parallel_residual_shared_norm": True}),
    "static SGU": ("gpt2", ALL_HEADS | {"static_sgu": True, "static_sgu_kernel": 3}),
    "Head-QK": ("gpt2", ALL_HEADS | {"head_qk": True, "head_qk_dim": 8}),
    "Head-QK, local": ("fattorib", ALL_HEADS | LOCAL | {"head_qk": True, "head_qk_dim": 8}),
    "fattorib": ("fattorib", ALL_HEADS),
    "experts": ("llama2", {"num_experts": 4, "num_experts_per_tok": 2}),
    "experts in one layer": (
        "gpt_neo",
        ALL_HEADS | WRITTEN_OUT | {"num_experts": 2, "moe_layers": [1], "capacity_factor": 1.0},
    ),
    "muddformer": ("muddformer", WRITTEN_OUT | NARROW_STEPS),
    "muddformer_prepost": ("muddformer_prepost", WRITTEN_OUT | NARROW_STEPS),
    "muddpythia": ("muddpythia", WRITTEN_OUT | NARROW_STEPS | ALL_HEADS),
    "denseformer": ("denseformer", WRITTEN_OUT | {"dense_sources": "dilated", "dense_period": 2}),
}
WINDOW = 32


def one_device_layout(config):
    return Layout(make_mesh(config.mesh, jax.devices()[:1]), config.mesh.logical_axis_rules)


def with_noise(params):
    """So that gates, Head-QK and other parts that start at 0 do something."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + 0.05 * generator.normal(size=x.shape).astype(np.float32), params
    )


def whole_logits(model, params, tokens_BT):
    """Float32 [B, T, V] of the forward pass that training uses."""

    @jax.jit
    def run(params, tokens_BT):
        decoder = model.merge(params)
        weights_BT = jnp.ones(tokens_BT.shape, jnp.float32)
        return decoder(Batch(tokens_BT, tokens_BT, weights_BT))

    return np.asarray(run(params, jnp.asarray(tokens_BT, jnp.int32)))


@pytest.mark.parametrize("name", some_quick(CASES, 8))
def test_cached_decoding_equals_the_whole_forward_pass(name):
    family, keys = CASES[name]
    config = tiny_config(family, max_target_length=WINDOW, **keys)
    model = Model(config.model)
    params = with_noise(jax.jit(model.initialize)(jax.random.key(0)))
    tokens = np.random.default_rng(1).integers(0, 64, (3, WINDOW))
    lengths = np.array([1, 11, 17])

    @jax.jit
    def prompt(params, tokens_BT, lengths_B):
        decoder = model.merge(params)
        h_BTD, states = decoder.read_prompt(tokens_BT, lengths_B, capacity=WINDOW)
        return decoder.logits(h_BTD, decoder.pointers_of(states)), states

    @jax.jit
    def step(params, tokens_BT, positions_BT, states):
        decoder = model.merge(params)
        h_BTD, states = decoder.read_next(tokens_BT, positions_BT, states)
        return decoder.logits(h_BTD, decoder.pointers_of(states), positions_BT), states

    expected = whole_logits(model, params, tokens)
    apart = model.in_parts(jax.tree.map(jnp.copy, params))
    padded = np.where(np.arange(17) < lengths[:, None], tokens[:, :17], 63)
    got, states = prompt(apart, padded, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], expected[row, :length], atol=1e-4)
    # Ragged rows, one token at a time.
    for place in range(WINDOW - 17):
        positions = lengths + place
        new = np.take_along_axis(tokens, positions[:, None], axis=1)
        got, states = step(apart, new, positions[:, None], states)
        wanted = np.take_along_axis(expected, positions[:, None, None], axis=1)
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_no_expert_is_full_while_text_is_generated():
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "max_target_length": WINDOW}
    full = Model(tiny_config("llama2", **keys, eval_capacity_factor=0.5).model)
    model = Model(tiny_config("llama2", **keys).model)
    params = with_noise(jax.jit(model.initialize)(jax.random.key(0)))
    tokens = np.random.default_rng(1).integers(0, 64, (2, WINDOW))
    expected = whole_logits(model, params, tokens)
    assert np.abs(whole_logits(full, params, tokens) - expected).max() > 0.1
    lengths = np.array([20, 3])

    @jax.jit
    def run(params, tokens_BT, lengths_B):
        decoder = full.merge(params)
        h_BTD, states = decoder.read_prompt(tokens_BT, lengths_B, capacity=WINDOW)
        new_BT = jnp.take_along_axis(tokens_BT, lengths_B[:, None], axis=1)
        return decoder.logits(h_BTD), decoder.logits(
            decoder.read_next(new_BT, lengths_B[:, None], states)[0]
        )

    got, new = run(params, tokens, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], expected[row, :length], atol=1e-4)
        np.testing.assert_allclose(new[row, 0], expected[row, length], atol=1e-4)


def test_several_new_tokens_at_once_equal_one_by_one():
    config = tiny_config("llama2", max_target_length=WINDOW)
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    tokens = np.random.default_rng(1).integers(0, 64, (2, 20))
    decoder = model.merge(params)
    _, states = decoder.read_prompt(jnp.asarray(tokens[:, :8]), jnp.array([8, 8]), WINDOW)
    places = np.tile(np.arange(8, 20), (2, 1))
    h_BTD, _ = decoder.read_next(jnp.asarray(tokens[:, 8:]), jnp.asarray(places), states)
    expected = whole_logits(model, params, tokens)[:, 8:]
    np.testing.assert_allclose(decoder.logits(h_BTD), expected, atol=1e-4)


ALL_KINDS = {
    "attention_types": [[["none", "global", "local", "linear"], 1]],
    "base_num_decoder_layers": 4,
    "sliding_window_size": 6,
    "num_mem_kv": 2,
    "static_sgu": True,
    "static_sgu_kernel": 5,
    "head_qk": True,
    "head_qk_dim": 8,
}


@pytest.mark.parametrize(
    ("keys", "grows"),
    some_quick(
        [
            ({}, True),
            (WRITTEN_OUT | ALL_KINDS, True),
            ({"attention_types": [[["linear"], 3]]}, False),
        ],
        3,
    ),
    ids=["global", "all kinds", "linear"],
)
def test_states_that_grow_go_on_where_they_stood(monkeypatch, keys, grows):
    monkeypatch.setattr("MaxText.generation.engine.SMALLEST_CAPACITY", 8)
    monkeypatch.setattr("MaxText.generation.engine.SMALLEST_PROMPT", 4)
    config = tiny_config("llama2", max_target_length=64, **keys)
    model = Model(config.model)
    params = with_noise(jax.jit(model.initialize)(jax.random.key(0)))
    engine = Engine(model, params, one_device_layout(config), Choice(temperature=0))

    def room_of(sequences):
        states = [state for state in sequences.states if state is not None]
        return {state.capacity for state in states if state.capacity is not None}

    def run(room):
        sequences, drawn = engine.start(
            [[1, 2, 3], [4]], [(0, 0), (1, 0)], [0, 0], seed=0, room=room
        )
        tokens = [drawn.on_host().tokens_B]
        capacities = room_of(sequences)
        for length in range(4, 40):
            sequences = engine.with_room(sequences, length)
            sequences, drawn = engine.step(sequences)
            capacities |= room_of(sequences)
            tokens.append(drawn.on_host().tokens_B)
        return np.array(tokens), capacities

    grown, capacities = run(room=4)
    at_once, one = run(room=64)
    assert capacities == ({8, 32, 64} if grows else set())
    assert one == ({64} if grows else set())
    np.testing.assert_array_equal(grown, at_once)
    assert len(np.unique(grown)) > 3
