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
    num_lanes,
)
from MaxText.layers.history_plan import plan_of
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
    "all": KERNEL | {"base_num_decoder_layers": 3},
    "2x2, kinds that alternate": KERNEL | {
        "dense_sources": "dilated", "dense_dilation": 2, "dense_period": 2,
        "attention_types": [[["global", "local"], 2]], "sliding_window_size": 3,
    },
    "weights made before the kernel, window, dropout": KERNEL | {
        "dense_sources": "window", "dense_window": 2, "dense_activation": "elu",
        "dropout_rate": 0.2, "drop_path": 0.3,
    },
    "no kernel, list, keys and values alone, experts": {
        "dense_sources": "list", "dense_source_list": [0, 2], "dense_ways": ["v", "k"],
        "num_experts": 2,
    },
    "norms after, values of products kept": KERNEL | {
        "mudd_postnorm": "all", "remat_policy": "minimal", "dense_static": False,
    },
    "the stream alone, fixed weights, layer norms": KERNEL | {
        "dense_ways": ["r"], "dense_dynamic": False, "normalization_type": "layer_norm",
        "remat_policy": "none",
    },
}  # fmt: skip


@pytest.fixture
def _several_tiles(monkeypatch):
    monkeypatch.setattr(history_kernel, "_MAX_ROWS", 16)


def parameters_of(model):
    """Connections that have an effect, and no sums in which states nearly cancel."""
    fresh = jax.jit(model.initialize)(jax.random.key(0))
    leaves, structure = jax.tree.flatten(fresh)
    numbers = np.random.default_rng(0)
    moved = [leaf + 0.03 * numbers.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)


def loss_and_gradients(keys, **form):
    """Of random parameters, and the traced program."""
    config = tiny_config("llama2", **DENSE | keys | form)
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


@pytest.mark.usefixtures("_several_tiles")
@pytest.mark.parametrize("form", some_quick(FORMS, len(FORMS)))
def test_scanned_layers_and_kernels_equal_unrolled_sums(form):
    """That those are right is tested in test_connections.py."""
    keys = FORMS[form]
    (expected, wanted), _ = loss_and_gradients(keys, scan_layers=False, dense_mixing="sum")
    wanted = named(wanted)
    scanned, traced = loss_and_gradients(keys, scan_layers=True)
    assert has_loop(traced)
    found = [scanned]
    if form == "all":
        unrolled, _ = loss_and_gradients(keys, scan_layers=False, dense_kept_sums=1)
        found.append(unrolled)
    for loss, gradients in found:
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
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
    plan = plan_of(decoder.connections, config.model.layer_plan.cycle)
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


@pytest.mark.usefixtures("_several_tiles")
@pytest.mark.parametrize(
    ("norms", "fresh"), [(Norms((0, 2), 0.1), False), (NO_NORMS, True)], ids=["added", "fresh"]
)
def test_kernels(norms, fresh):
    """Several tiles, and memory that nobody has written: what is read there would be seen."""
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


RECIPE = Recipe("gelu_erf", 0.1, "highest")


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


def test_kernels_that_make_weights_lower_for_tpu():
    numbers = jnp.linspace(-9, 9, 500)
    for name, function in ON_CHIP.items():
        np.testing.assert_allclose(function(numbers), ACTIVATIONS[name](numbers), atol=1e-6)
    shape, lanes = jax.ShapeDtypeStruct, num_lanes(COUNT, C)
    states = shape((H, 256, D), jnp.bfloat16)
    wi, wo = shape((D, 64), jnp.bfloat16), shape((64, lanes), jnp.bfloat16)
    own = Making(wi, wo, shape((lanes,), jnp.float32), shape((), jnp.int32))
    recipe = RECIPE._replace(precision="default")
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


@pytest.mark.parametrize(
    ("backend", "keys", "scanned"),
    [
        ("tpu", {"base_emb_dim": 128}, True),
        ("tpu", {"base_emb_dim": 128, "mudd_prenorm": True}, False),
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
