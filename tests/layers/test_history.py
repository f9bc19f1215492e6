"""A scan over layers with dense connections: what layers written out give, and its parts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from MaxText.layers import history_kernel
from MaxText.layers.activations import ACTIVATIONS
from MaxText.layers.decoder import Decoder
from MaxText.layers.depth_mixing import NO_NORMS, Norms
from MaxText.layers.depth_reading import (
    Making,
    Reading,
    Recipe,
    Sources,
    Sum,
    differentiate,
    num_lanes,
    read,
)
from MaxText.layers.history_plan import SumWeights, plan_of
from MaxText.layers.history_tiles import ON_CHIP
from MaxText.layers.history_weights import TokenWeights
from MaxText.layers.model import Model
from MaxText.layers.weights import ShapesOnly
from MaxText.training import backend_defaults
from MaxText.training.objective import loss_sums
from tests.layers.test_connections import named
from tests.small_models import random_batch, some_quick, tiny_config

DENSE = {
    "dense_conn": True,
    "dense_mixing": "sum",
    "base_num_decoder_layers": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 32,
    "remat_policy": "full",
    "weight_init": "fan_in",
}
DILATED = {"dense_sources": "dilated", "dense_dilation": 2}
KERNEL = {"dense_mixing": "kernel"}
FORMS = {
    "all": KERNEL,
    "all, no kernel": {},
    "2x2, kinds that alternate": KERNEL | DILATED | {
        "dense_period": 2, "attention_types": [[["global", "local"], 2]], "sliding_window_size": 3,
    },
    "2x2, no kernel": DILATED | {"dense_period": 2},
    "dilated": KERNEL | DILATED,
    "window": KERNEL | {"dense_sources": "window", "dense_window": 2},
    "list, keys and values alone": {
        "dense_sources": "list", "dense_source_list": [0, 2], "dense_ways": ["v", "k"],
    },
    "norms after": KERNEL | {"mudd_postnorm": "all"},
    "fixed weights alone": KERNEL | {"dense_dynamic": False},
    "weights of the token alone": {"dense_static": False},
    "the stream alone, layer norms": KERNEL | {
        "dense_ways": ["r"], "normalization_type": "layer_norm",
    },
    "experts": {"num_experts": 2, "dense_period": 2},
    "values of products kept": KERNEL | {"remat_policy": "minimal"},
    "all values kept": {"remat_policy": "none"},
    "dropout": KERNEL | {"dropout_rate": 0.2, "drop_path": 0.3},
    "weights made before the kernel": KERNEL | {"dense_activation": "elu"},
    "the same, window": KERNEL | {
        "dense_sources": "window", "dense_window": 2, "dense_activation": "elu",
    },
}  # fmt: skip


def parameters_of(model):
    """Connections that have an effect, and no sums in which states nearly cancel."""
    fresh = jax.jit(model.initialize)(jax.random.key(0))
    leaves, structure = jax.tree.flatten(fresh)
    numbers = np.random.default_rng(0)
    moved = [leaf + 0.03 * numbers.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)


def loss_and_gradients(keys, scan):
    """Of random parameters, and the traced program."""
    mixing = keys.get("dense_mixing", "sum") if scan else "sum"
    given = DENSE | keys | {"scan_layers": scan, "dense_mixing": mixing}
    config = tiny_config("llama2", **given)
    model, batch = Model(config.model), random_batch(config, rows=2, documents=True)
    key = jax.random.key(2) if config.model.is_random else None

    # Differentiated from outside of a jit, too, what a layer reads comes through arguments.
    @jax.jit
    def loss(parameters):
        module = model.merge(parameters)
        sums = loss_sums(module, batch, config.model.objective, key, training=True)
        return sum(sums.means(batch.weights_BT.sum(), batch.weights_BT.size).values())

    parameters = parameters_of(model)
    traced = jax.jit(jax.value_and_grad(loss)).trace(parameters)
    return traced.lower().compile()(parameters), traced.jaxpr.jaxpr


@pytest.mark.parametrize("form", some_quick(FORMS, 15))
def test_the_same_as_written_out(form):
    """That layers written out are right is tested in test_connections.py."""
    (loss, gradients), traced = loss_and_gradients(FORMS[form], scan=True)
    (expected, wanted), _ = loss_and_gradients(FORMS[form], scan=False)
    assert has_loop(traced)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    wanted = named(wanted)
    for name, gradient in named(gradients).items():
        largest = np.abs(wanted[name]).max()
        assert largest > 0, name
        np.testing.assert_allclose(
            gradient / largest, wanted[name] / largest, atol=2e-5, err_msg=name
        )


def has_loop(jaxpr):
    """Whether a scan has a body that holds the history."""
    return any(
        (e.primitive.name == "scan" and any(v.aval.ndim == 4 for v in e.outvars))
        or any(has_loop(inner) for inner in jaxprs_in_params(e.params))
        for e in jaxpr.eqns
    )


@pytest.mark.parametrize(
    ("keys", "rows", "nested"),
    [
        ({}, {n: n for n in range(9)}, True),
        (DILATED | {"dense_period": 2}, {0: 0, 2: 1, 4: 2, 6: 3, 8: 4}, True),
        (DILATED, {n: n for n in range(9)}, False),
        ({"dense_sources": "window", "dense_window": 3}, {n: n for n in range(9)}, False),
    ],
    ids=str,
)
def test_plan(keys, rows, nested):
    config = tiny_config("llama2", **(DENSE | keys | {"base_num_decoder_layers": 8}))
    decoder: Any = Decoder(config.model, ShapesOnly())
    section = config.model.dense_connections
    plan = plan_of(decoder.connections, config.model.attention_period)
    assert (plan.row_of, plan.nested) == (rows, nested)
    for j, depth in enumerate(range(0, 8, section.dense_period)):
        places = tuple(plan.places_JS[j, : plan.counts_J[j]])
        assert places == section.sources(depth)
    assert plan.last == section.sources(8)


N, D, H, C = 96, 256, 7, 4  # three tiles of 16 tokens for each of two cores
PLACES, ROWS, COUNT, BEFORE = [0, 2, 3, 5, 6, 0], [4, 0, 1, 2, 3, 0], 5, 4


def naive(history, weights, factors, count, norms):
    """Sums of the first `count` sources, one by one."""
    sums = []
    for c in range(C):
        y = sum(weights[:, s * C + c, None] * history[PLACES[s]] for s in range(count))
        if c in norms.ways:
            y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + norms.epsilon)
            y = y * factors[norms.ways.index(c)]
        sums.append(y)
    return sums


@pytest.mark.parametrize("fresh", [False, True], ids=["added", "fresh"])
@pytest.mark.parametrize("norms", [NO_NORMS, Norms((0, 2), 0.1)], ids=["plain", "norms"])
def test_kernels(norms, fresh, monkeypatch):
    """Several tiles, and memory that nobody has written: what is read there would be seen."""
    monkeypatch.setattr(history_kernel, "_MAX_ROWS", 16)
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    lanes = num_lanes(COUNT if fresh else len(PLACES), C)
    history, weights, weights_before = normal(H, N, D), normal(N, lanes), normal(N, lanes)
    factors = normal(len(norms.ways), D) if norms.ways else None
    of_sums = [normal(N, D) for _ in range(C)]
    accumulated: Any = None if fresh else normal(COUNT + 1, N, D)
    # Without gradients so far all places are read, and each has a row but the last.
    places, rows = (PLACES[:COUNT], [*range(COUNT - 1), 0]) if fresh else (PLACES, ROWS)
    sources = Sources(jnp.int32(COUNT), jnp.array(places), jnp.array(rows))
    unread = np.array([place not in PLACES[:COUNT] for place in range(H)])
    given = history.at[unread].set(jnp.nan)

    @jax.jit
    def run(history, weights):
        reading = Reading(C, COUNT, norms, kernel=True)
        one = Sum(weights, sources.count, factors)
        sums = history_kernel.forward(history, sources, one, reading, "interpret").sums
        found = history_kernel.backward(
            history, sources, one, of_sums, accumulated, reading, "interpret",
            before=Sum(weights_before, jnp.int32(BEFORE), factors), reading_before=reading,
        )  # fmt: skip
        return sums, found

    sums, found = run(given, weights)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)
    for y, wanted in zip(sums, naive(history, weights, factors, COUNT, norms), strict=True):
        close(y, wanted)
    wanted = naive(history, weights_before, factors, BEFORE, norms)
    for y, expected in zip(found.before.sums, wanted, strict=True):
        close(y, expected)

    def loss(history, weights, factors):
        sums = naive(history, weights, factors, COUNT, norms)
        return sum(jnp.sum(y * g) for y, g in zip(sums, of_sums, strict=True))

    of_history, of_weights, of_factors = jax.grad(loss, (0, 1, 2), allow_int=True)(
        history, weights, jnp.zeros((1, D)) if factors is None else factors
    )
    close(found.of_weights_NE, of_weights)
    of_sources = [of_history[place] for place in PLACES[:COUNT]]
    if fresh:
        of_rows, of_last = found.of_states_RND, found.of_last_ND
        for one, wanted in zip([*of_rows, of_last], of_sources, strict=True):
            close(one, wanted)
    else:
        for row, wanted in zip(ROWS, of_sources, strict=False):
            close(found.of_states_RND[row], accumulated[row] + wanted)
        close(found.of_states_RND[-1], accumulated[-1])
        assert found.of_last_ND is None
    if norms.ways:
        close(found.of_factors_MD, of_factors)


def making(place):
    """What a kernel makes weights with, and the state that they are of."""
    numbers = np.random.default_rng(place)
    lanes, hidden = num_lanes(len(PLACES), C), 24

    def normal(*shape):
        return jnp.asarray(0.2 * numbers.normal(size=shape), jnp.float32)

    return Making(normal(D, hidden), normal(hidden, lanes), normal(lanes), jnp.int32(place))


def naive_weights(x, making):
    """Weights, x W1 and 1 / rms(x)."""
    inverse_rms = 1 / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + RECIPE.epsilon)
    product = x @ making.wi_DK
    hidden = jax.nn.gelu(inverse_rms * product, approximate=False)
    return making.fixed_E + hidden @ making.wo_KE, product, inverse_rms


RECIPE = Recipe("gelu_erf", 0.1, "highest")


def test_kernels_that_make_weights(monkeypatch):
    """Of the sum, whose last sources have weights that do not matter, and of the one before it."""
    monkeypatch.setattr(history_kernel, "_MAX_ROWS", 16)
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    history, of_sums = normal(H, N, D), [normal(N, D) for _ in range(C)]
    factors, norms = normal(2, D), Norms((0, 2), 0.1)
    accumulated, weights = normal(COUNT, N, D), normal(N, num_lanes(len(PLACES), C))
    sources = Sources(jnp.int32(COUNT), jnp.array(PLACES), jnp.array(ROWS))
    reading = Reading(C, COUNT, norms, kernel=True, recipe=RECIPE)
    own, of_before = making(COUNT - 2), making(BEFORE - 1)

    @jax.jit
    def run(history):
        one = Sum(own, sources.count, factors)
        found = history_kernel.forward(history, sources, one, reading, "interpret", product=True)
        alone = history_kernel.forward(history, sources, one, reading, "interpret")
        gradients = history_kernel.backward(
            history, sources, one._replace(weights=weights), of_sums, accumulated, reading,
            "interpret", before=Sum(of_before, jnp.int32(BEFORE), factors), reading_before=reading,
        )  # fmt: skip
        return found, alone, gradients

    found, alone, gradients = run(history)
    assert alone.product is None
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)
    for read_, one, count in ((found, own, COUNT), (gradients.before, of_before, BEFORE)):
        made, *product = naive_weights(history[PLACES[int(one.place)]], one)
        for y, wanted in zip(read_.sums, naive(history, made, factors, count, norms), strict=True):
            close(y, wanted)
        for y, wanted in zip(read_.product, product, strict=True):
            close(y, wanted)
    for y, wanted in zip(alone.sums, found.sums, strict=True):
        np.testing.assert_array_equal(y, wanted)


def weights_of_sum(dtype=jnp.float32, kernel=True, **keys):
    config = tiny_config("llama2", **(DENSE | KERNEL | keys))
    decoder: Any = Decoder(config.model, ShapesOnly())
    return TokenWeights(
        decoder.connections.after["3"], jnp.zeros((2, 16, 128), dtype), kernel=kernel
    )


def test_who_makes_weights():
    recipe = weights_of_sum(matmul_precision="highest").recipe
    assert recipe == Recipe("gelu", 1e-5, "highest")
    narrow = weights_of_sum(jnp.bfloat16, matmul_precision="highest").recipe
    assert narrow == recipe._replace(precision=None)
    by_others: list[dict[str, Any]] = [
        {"kernel": False}, {"dense_dynamic": False}, {"dense_activation": "elu"},
        {"matmul_precision": "high"}, {"dtype": jnp.float16},
    ]  # fmt: skip
    assert [weights_of_sum(**keys).recipe for keys in by_others] == [None] * len(by_others)


def test_weights_of_a_kernel_and_others_in_bfloat16():
    """Forward they come from the one, and backward from the other."""
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.bfloat16)

    weigh = weights_of_sum(jnp.bfloat16)
    history, lanes = normal(4, 2, 16, 128), num_lanes(4, 3)
    wo_KE = 0.1 * normal(64, lanes)
    own = SumWeights(normal(lanes).astype(jnp.float32), 0.1 * normal(128, 64), wo_KE, {})
    sources = Sources(jnp.int32(4), jnp.arange(4), jnp.arange(4))
    reading = Reading(3, 4, kernel=True, recipe=weigh.recipe)
    making, unknown = weigh.for_sum(own, history[3], 3, None)
    assert unknown is None
    ours = read(history, sources, Sum(making, sources.count), reading, product=True)
    product = weigh.product(own, history[3])
    theirs = read(history, sources, Sum(weigh(own, product), sources.count), reading)
    assert theirs.product is None
    for y, expected in zip(ours.sums, theirs.sums, strict=True):
        np.testing.assert_allclose(y.astype(float), expected.astype(float), rtol=0.02, atol=0.1)
    for y, expected in zip(jax.tree.leaves(ours.product), jax.tree.leaves(product), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", sorted(ON_CHIP))
def test_kernels_that_make_weights_lower_for_tpu(activation):
    numbers = jnp.linspace(-9, 9, 500)
    np.testing.assert_allclose(
        ON_CHIP[activation](numbers), ACTIVATIONS[activation](numbers), atol=1e-6
    )
    shape, lanes = jax.ShapeDtypeStruct, num_lanes(COUNT, C)
    states = shape((H, 256, D), jnp.bfloat16)
    wi, wo = shape((D, 64), jnp.bfloat16), shape((64, lanes), jnp.bfloat16)
    own = Making(wi, wo, shape((lanes,), jnp.float32), shape((), jnp.int32))
    recipe = RECIPE._replace(activation=activation, precision="default")
    reading = Reading(C, COUNT, kernel=True, recipe=recipe)
    places = jnp.array(PLACES[:COUNT])
    sources = Sources(jnp.int32(COUNT), places, places)

    def both(history, own, weights, of_sums):
        made = Sum(own, sources.count)
        found = history_kernel.forward(history, sources, made, reading, "tpu", product=True)
        one = Sum(weights, sources.count)
        return found, history_kernel.backward(
            history, sources, one, of_sums, None, reading, "tpu", before=made,
            reading_before=reading,
        )  # fmt: skip

    of_sums = [shape((256, D), jnp.bfloat16)] * C
    traced = jax.jit(both).trace(states, own, shape((256, lanes), jnp.float32), of_sums)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


def test_a_plain_loop_and_the_kernel_agree():
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    shape = (2, N // 2, 32)
    history, weights = normal(H, *shape), normal(*shape[:2], num_lanes(len(PLACES), 3))
    # The fourth way of each source is filling.
    filling = jnp.arange(weights.shape[-1]) % 4 == 3
    of_sums, accumulated = [normal(*shape) for _ in range(3)], normal(COUNT, *shape)
    sources = Sources(jnp.int32(COUNT), jnp.array(PLACES), jnp.array(ROWS))
    results = []
    for kernel in (False, True):
        reading = Reading(3, COUNT, kernel=kernel)
        one = Sum(weights, sources.count)
        sums = read(history, sources, one, reading).sums
        found = differentiate(history, sources, one, of_sums, accumulated, reading)
        results.append((sums, jnp.where(filling, 0, found[0]), found.of_states_RBTD))
    for plain, ours in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("backend", "keys", "scanned"),
    [
        ("tpu", {"base_emb_dim": 128}, True),
        ("tpu", {"base_emb_dim": 96, "head_dim": 24}, False),
        ("tpu", {"base_emb_dim": 128, "mudd_prenorm": True}, False),
        ("tpu", {"base_emb_dim": 128, "dense_mixing": "sum"}, False),
        ("gpu", {"base_emb_dim": 128}, False),
        ("cpu", {}, False),
        ("cpu", {"base_num_decoder_layers": 9}, True),
    ],
    ids=str,
)
def test_auto(backend, keys, scanned):
    given = DENSE | {"scan_layers": "auto", "dense_mixing": "auto"} | keys
    section, _ = backend_defaults.resolve(tiny_config("llama2", **given).model, backend)
    assert section.memory.scan_layers is scanned
