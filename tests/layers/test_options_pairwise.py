"""Every two options of a model work together: a covering array of tiny models.

Each model trains two steps and generates as its forward pass over the whole text would. Pairs that
make no sense are refused by the configuration, which is checked, too.
"""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.problems import ConfigurationError
from MaxText.input_pipeline.batch import Batch
from MaxText.layers.model import Model
from MaxText.training.objective import loss_sums, num_tokens
from tests.small_models import random_batch, some_quick, tiny_config

LENGTH, VOCAB, PROMPT = 12, 32, 5
SIZES = {
    "base_emb_dim": 16,
    "base_mlp_dim": 16,
    "head_dim": 4,
    "base_num_decoder_layers": 2,
    "vocab_size": VOCAB,
    "max_target_length": LENGTH,
    "sliding_window_size": 3,
    "normalization_layer_epsilon": 1e-5,
    "attention_block_size": 5,
}
TWO = {"num_experts": 4, "num_experts_per_tok": 2}

# option -> value -> keys
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "global": {},
        "local": {"attention_types": [[["local"], 2]]},
        "linear, global": {"attention_types": [[["linear", "global"], 1]]},
        "none, local": {"attention_types": [[["none", "local"], 1]]},
    },
    "block": {
        "sequential": {},
        "parallel": {"block_arrangement": "parallel"},
        "shared norm": {"block_arrangement": "parallel", "parallel_residual_shared_norm": True},
        "macaron": {"use_macaron": True},
        "rezero": {"use_rezero": True},
    },
    "positions": {
        "rotary": {},
        "learned": {"position_embedding": "learned"},
        "axial": {"position_embedding": "axial", "axial_pos_shape": [3, 4]},
        "alibi": {"position_embedding": "alibi"},
    },
    "norm": {
        "rms": {},
        "layer": {"normalization_type": "layer_norm"},
        "scale": {"normalization_type": "scale_norm"},
        "centered": {"normalization_type": "scale_norm_centered"},
    },
    "feed-forward": {
        "gated": {},
        "top 1": {"num_experts": 4},
        "top 2 of a few": TWO | {"capacity_factor": 1.0, "moe_second_policy": "random"},
        "experts in one layer": TWO | {"moe_layers": [1], "mlp_activations": ["gelu"]},
    },
    "beside attention": {
        "nothing": {},
        "memories": {"num_mem_kv": 2},
        "static SGU": {"static_sgu": True, "static_sgu_kernel": 3},
    },
    "layers": {
        "their own": {},
        "one for all": {"share_parameters": True},
        "dense connections": {"dense_conn": True},
    },
    "walk": {
        "scan": {"scan_layers": True},
        "written out": {"scan_layers": False, "remat_policy": "full"},
    },
    "head": {
        "untied": {},
        "tied, no norm": {"logits_via_embedding": True, "final_norm": False},
        "Head-QK": {"head_qk": True, "head_qk_dim": 4, "num_vocab_tiling": 3},
    },
    "key/value heads": {
        "4": {"base_num_kv_heads": 4},
        "2": {"base_num_kv_heads": 2, "use_qk_norm": True},
        "1": {"base_num_kv_heads": 1, "qkv_bias": True, "proj_bias": True},
    },
    "batch": {"plain": {}, "documents": {}},
    "dropout": {"off": {}, "on": {"dropout_rate": 0.2, "drop_path": 0.2}},
}

# What the configuration refuses; every row of the array is free of these.
REFUSED: tuple[dict[str, str], ...] = (
    {"attention": "linear, global", "positions": "alibi"},
    {"attention": "local", "beside attention": "memories"},
    {"attention": "none, local", "beside attention": "memories"},
    {"attention": "none, local", "layers": "one for all"},
    {"attention": "none, local", "walk": "scan"},
    {"attention": "linear, global", "beside attention": "memories", "layers": "one for all"},
    {"attention": "linear, global", "beside attention": "memories", "walk": "scan"},
    {"block": "rezero", "norm": "scale"},
    {"block": "rezero", "norm": "centered"},
    {"block": "macaron", "layers": "dense connections"},
    {"block": "shared norm", "layers": "dense connections"},
    {"beside attention": "static SGU", "layers": "dense connections"},
    {"feed-forward": "experts in one layer", "walk": "scan"},
    {"feed-forward": "experts in one layer", "layers": "one for all"},
)


def keys_of(row: dict[str, str]) -> dict[str, Any]:
    """Configuration keys of chosen values; options that are not named have their first."""
    keys = dict(SIZES)
    for option, values in OPTIONS.items():
        keys |= values[row.get(option, next(iter(values)))]
    if "walk" not in row:
        keys["scan_layers"] = False
    kinds = str(keys.get("attention_types", ""))
    if "local" not in kinds:
        del keys["sliding_window_size"]
    return keys


def allowed(row: dict[str, str]) -> bool:
    return not any(refused.items() <= row.items() for refused in REFUSED)


def covering_array(candidates: int = 60) -> list[dict[str, str]]:
    """Rows that have every allowed pair of values of two options.

    Greedy: of several rows, which fill the options in random order with the value that covers most,
    the best is taken (AETG, Cohen et al. 1997). Always the same, by a fixed seed.
    """
    generator = random.Random(0)
    values = [(option, value) for option in OPTIONS for value in OPTIONS[option]]
    missing = {
        frozenset(pair)
        for pair in itertools.combinations(values, 2)
        if pair[0][0] != pair[1][0] and allowed(dict(pair))
    }
    rows = []
    while missing:
        seed_pair = dict(min(missing, key=sorted))
        found = []
        for _ in range(candidates):
            row, covered = dict(seed_pair), 1
            for option in generator.sample(list(OPTIONS), len(OPTIONS)):
                if option in row:
                    continue
                gains = {
                    value: sum(
                        frozenset([(option, value), item]) in missing for item in row.items()
                    )
                    for value in generator.sample(list(OPTIONS[option]), len(OPTIONS[option]))
                    if allowed(row | {option: value})
                }
                if not gains:
                    break  # no value goes with the others
                row[option] = max(gains, key=gains.__getitem__)
                covered += gains[row[option]]
            else:
                found.append((covered, row))
        row = max(found, key=lambda pair: pair[0])[1]
        rows.append({option: row[option] for option in OPTIONS})
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
    return rows


def parameters_of(model: Model) -> dict:
    """Numbers about as large as trained ones, also where training starts at 0."""
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        scale = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return (scale + 0.2 * generator.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract)


ROWS = covering_array()


def test_the_array_covers_every_pair():
    found = {frozenset(pair) for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    for (first, first_values), (second, second_values) in itertools.combinations(
        OPTIONS.items(), 2
    ):
        for pair in itertools.product(first_values, second_values):
            row = dict(zip((first, second), pair, strict=True))
            assert (frozenset(row.items()) in found) == allowed(row), row
    assert len(ROWS) <= 30


@pytest.mark.parametrize("refused", REFUSED, ids=lambda row: ", ".join(row.values()))
def test_pairs_that_are_left_out_are_refused(refused):
    keys = keys_of(refused)
    with pytest.raises(ConfigurationError):
        tiny_config(**keys, strict_config=True)


@pytest.mark.parametrize("row", some_quick(ROWS, 16), ids=lambda row: "; ".join(row.values()))
def test_trains_and_generates(row):
    config = tiny_config(**keys_of(row))
    model = Model(config.model)
    params = parameters_of(model)
    batch = random_batch(config, rows=2, documents=row["batch"] == "documents")
    # Keys of a kind that compiles fast.
    key = jax.random.key(0, impl="unsafe_rbg") if config.model.is_random else None

    @jax.jit
    def loss_and_gradients(params, key):
        def loss(params):
            sums = loss_sums(model.merge(params), batch, config.model.objective, key, training=True)
            return sum(sums.means(batch.weights_BT.sum(), num_tokens(batch)).values())

        return jax.value_and_grad(loss)(params)

    losses, expected = [], 0.003
    for _ in range(2):
        loss, gradients = loss_and_gradients(params, key)
        losses.append(float(loss))
        square = sum(np.sum(np.square(gradient)) for gradient in jax.tree.leaves(gradients))
        assert 0 < square < np.inf
        # So short a step that the loss falls by what the gradient says.
        params = jax.tree.map(
            lambda x, dx, rate=expected / square: x - rate * np.asarray(dx), params, gradients
        )
    assert np.isfinite(losses).all()
    if row["beside attention"] != "static SGU":  # through which no gradient passes
        assert losses[0] - losses[1] == pytest.approx(expected, rel=0.2)

    tokens = np.asarray(batch.tokens_BT)
    lengths = np.array([PROMPT, 2])

    @jax.jit
    def read(params, tokens_BT, lengths_B):
        """Logits of everything at once, of a prompt, and of one token after another."""
        decoder = model.merge(params)
        whole = decoder(Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape)))
        h_BTD, states = decoder.read_prompt(tokens_BT[:, :PROMPT], lengths_B, capacity=LENGTH)
        prompt = decoder.logits(h_BTD, decoder.pointers_of(states))

        def step(states, place):
            positions_B1 = (lengths_B + place)[:, None]
            new_B1 = jnp.take_along_axis(tokens_BT, positions_B1, axis=1)
            h_B1D, states = decoder.read_next(new_B1, positions_B1, states)
            return states, decoder.logits(h_B1D, decoder.pointers_of(states), positions_B1)[:, 0]

        _, steps = jax.lax.scan(step, states, jnp.arange(LENGTH - PROMPT))
        return whole, prompt, jnp.moveaxis(steps, 0, 1)

    for whole, prompt, steps, length in zip(*read(params, tokens, lengths), lengths, strict=True):
        np.testing.assert_allclose(prompt[:length], whole[:length], atol=1e-4)
        np.testing.assert_allclose(steps, whole[length:][: len(steps)], atol=1e-4)


@pytest.mark.parametrize("row", ROWS[::9], ids=lambda row: "; ".join(row.values()))
def test_formats_are_kept(row):
    """In bfloat16 hidden states stay so, logits are float32, and a state has one format."""
    config = tiny_config(**keys_of(row), dtype="bfloat16")
    model = Model(config.model)
    tokens, places = jnp.zeros((2, PROMPT), int), jnp.full((2, 1), PROMPT)

    def run(params):
        decoder = model.merge(params)
        batch = Batch(tokens, tokens, jnp.ones(tokens.shape))
        h_BTD, states = decoder.read_prompt(tokens, places[:, 0], LENGTH)
        new_B1D, new_states = decoder.read_next(tokens[:, :1], places, states)
        logits = decoder.logits(new_B1D, decoder.pointers_of(new_states), places)
        return (decoder.hidden(batch)[0], h_BTD, new_B1D), logits, states, new_states

    hidden, logits, states, new_states = jax.eval_shape(run, model.abstract)
    assert {x.dtype for x in hidden} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32
    formats = [[(x.shape, x.dtype) for x in jax.tree.leaves(x)] for x in (states, new_states)]
    assert formats[0] == formats[1]
