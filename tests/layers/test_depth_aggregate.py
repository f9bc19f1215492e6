"""Depth aggregation: every form against sums written down naively, values and gradients."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from MaxText.layers.depth import aggregate as depth_aggregate
from MaxText.layers.depth import kernel
from MaxText.layers.depth.aggregate import (
    aggregate,
    kernel_unsupported_reason,
    scale_grad_only,
    supports_fused_norms,
    vmem_bytes_per_token,
)
from MaxText.layers.depth.norms import Norms
from MaxText.parallelism.logical_sharding import axis_rules
from MaxText.training import backend_defaults
from tests.small_models import tiny_config

FORMS = ("sum", "kernel")
# The kernel takes 384 dimensions in three chunks, and 160 tokens in five tiles.
B, T, D, S, C = 2, 80, 384, 3, 4


def given(dtype, seed=0):
    """Weights of each token, weights of all tokens, sources and scales."""
    numbers = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    sources = [normal(B, T, D).astype(dtype) for _ in range(S)]
    return normal(B, T, C, S), normal(1, 1, C, S - 1), sources, normal(S, D)


def grad_sums(sums, offset):
    """A number that depends on every element of every way in another way."""
    return sum(jnp.sum(jnp.sin(jnp.float32(y) + offset) * (c + 1)) for c, y in enumerate(sums))


def naive(weights, fixed, sources, scales):
    """Two sums over the same sources, the second one of fewer, by autodiff."""
    rows = [1.0] * S if scales is None else list(scales)
    floats = [scale * x.astype(jnp.float32) for scale, x in zip(rows, sources, strict=True)]
    total = 0.0
    for w, number in ((weights, S), (fixed, S - 1)):
        sums = [
            jnp.stack([w[:, :, c, s, None] * floats[s] for s in range(number)]).sum(axis=0)
            for c in range(C)
        ]
        sums = [y.astype(sources[0].dtype) for y in sums]
        total = total + grad_sums(sums, number)
    return total


def chained(form, weights, fixed, sources, scales):
    """The same by `mix`, each sum reading what the one before has handed on."""
    if scales is not None:
        sources = [scale_grad_only(x, scale) for x, scale in zip(sources, scales, strict=True)]
    first, sources = aggregate(weights, sources, form, scales_SD=scales)
    fewer = None if scales is None else scales[: S - 1]
    second, _ = aggregate(fixed, sources[: S - 1], form, scales_SD=fewer)
    return grad_sums(first, S) + grad_sums(second, S - 1)


def differentiated(function, arguments):
    argnums = (0, 1, 2) if arguments[-1] is None else (0, 1, 2, 3)
    return jax.jit(jax.value_and_grad(function, argnums))(*arguments)


@pytest.mark.parametrize(
    ("form", "dtype", "has_scales"),
    [
        ("sum", "float32", True),
        ("sum", "bfloat16", False),
        ("kernel", "float32", False),
        ("kernel", "bfloat16", True),
    ],
)
def test_values_and_gradients(form, dtype, has_scales):
    *rest, scales = given(dtype)
    arguments = (*rest, scales if has_scales else None)
    value, gradients = differentiated(functools.partial(chained, form), arguments)
    expected_value, expected_gradients = differentiated(naive, arguments)
    # Sums are float32 in every form: bfloat16 is rounded to once where the naive form does, too;
    # gradients of sources once for each sum that reads them.
    step = 2e-6 if dtype == "float32" else 2.0**-7
    np.testing.assert_allclose(value, expected_value, rtol=1e-5 if dtype == "float32" else 1e-3)
    leaves = map(jax.tree.leaves, (gradients, expected_gradients))
    for actual, reference in zip(*leaves, strict=True):
        assert actual.dtype == reference.dtype
        actual, reference = np.float32(actual), np.float32(reference)
        np.testing.assert_allclose(actual, reference, atol=2 * step * np.abs(reference).max())


def test_gradients_of_other_backends():
    """CPU has another form of the gradients of sums one by one, tried alone here."""
    weights, _, sources, scales = given(jnp.float32)
    streams = [sources[c % S] * (c + 1) for c in range(C)]

    @jax.jit
    def both(*arguments):
        forms = (depth_aggregate._sum_gradients, depth_aggregate._product_gradients)
        return [gradients(*arguments) for gradients in forms]

    near(*both(weights, sources, scales, streams, sources[::-1]))


def test_sums_are_float32():
    """1 + 8 terms of 2^-8, each lost in bfloat16, which has 8 bits."""
    one, little = jnp.ones((1, 16, 64), jnp.bfloat16), jnp.full((1, 16, 64), 2.0**-8, jnp.bfloat16)
    sources = [one, *[little] * 8]
    weights = jnp.ones((1, 1, 1, len(sources)))
    for form in FORMS:
        ((y_BTD,), _) = aggregate(weights, sources, form)
        assert np.all(y_BTD == 1.03125), form


def test_gradients_are_added_in_the_memory_of_those_before():
    weights, _, sources, _ = given(jnp.float32)

    def two(sources):
        first, sources = aggregate(weights, sources, "kernel")
        second, _ = aggregate(weights, sources, "kernel")
        return grad_sums(first, 0) + grad_sums(second, 1)

    program = str(jax.make_jaxpr(jax.grad(two))(sources))
    # (operand, result) that share memory, of each kernel.
    handed_over = [part.split("\n")[0] for part in program.split("input_output_aliases=")[1:]]
    # The last sum starts from nothing, not from zeros; the first is given one for each source.
    each = "(" + ", ".join(f"({s}, {s})" for s in range(S)) + ")"
    assert sorted(handed_over) == sorted(["()", "()", "()", each])


def test_kernels_lower():
    """Mosaic takes the kernels, a ragged last tile and an odd width included."""
    num_tokens, width = 40, 384
    shape = jax.ShapeDtypeStruct
    weights = shape((num_tokens, C * S), jnp.float32)
    states = [shape((num_tokens, width), jnp.bfloat16)] * S
    streams = [shape((num_tokens, width), jnp.bfloat16)] * C
    scales = shape((S, width), jnp.float32)

    def both(weights, states, scales, streams, old):
        given: dict = {"weights": weights, "sources": states, "scales": scales}
        of = given | {"grad_sums": streams}
        full: dict = {"weights": weights[:32], "sources": [x[:32] for x in states]}
        full |= {"factors": FACTORS}
        of_full = full | {"grad_sums": [x[:32] for x in streams]}
        before = [x[:32] for x in old]
        return (
            kernel.forward(given),
            kernel.backward(of),
            kernel.backward(of | {"accumulated": old}),
            kernel.forward(full, NORMS),
            kernel.backward(of_full, NORMS),
            kernel.backward(of_full | {"accumulated": before}, NORMS),
        )

    traced = jax.jit(both).trace(weights, states, scales, streams, states)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("custom_call") >= 6


# Ways 1 and 3 are normalized, ways 0 and 2 are not.
NORMS = Norms((1, 3), 1e-3)
FACTORS = jnp.asarray(np.random.default_rng(1).normal(size=(2, D)), jnp.float32)


def naive_norms(weights, factors, sources, scales):
    sums = [
        sum(weights[:, :, c, s, None] * scales[s] * sources[s] for s in range(S)) for c in range(C)
    ]
    for place, c in enumerate(NORMS.streams):
        mean_square = jnp.mean(sums[c] ** 2, axis=-1, keepdims=True)
        sums[c] = sums[c] / jnp.sqrt(mean_square + NORMS.epsilon) * factors[place]
    return grad_sums(sums, 0)


def kernel_norms(weights, factors, sources, scales):
    sources = [scale_grad_only(x, scale) for x, scale in zip(sources, scales, strict=True)]
    sums, _ = aggregate(
        weights, sources, "kernel", scales_SD=scales, norms=NORMS, factors_MD=factors
    )
    return grad_sums(sums, 0)


def test_kernel_with_norms():
    weights, _, sources, scales = given(jnp.float32)
    arguments = (weights, FACTORS, sources, scales)
    assert supports_fused_norms("kernel", sources[0])
    near(differentiated(kernel_norms, arguments), differentiated(naive_norms, arguments))
    assert not supports_fused_norms("sum", sources[0])
    # Tiles of tokens that are not full would add what is not there to gradients of factors.
    assert not supports_fused_norms("kernel", sources[0][:, :11])


def near(actual, reference):
    for mine, other in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(mine, other, atol=4e-6 * np.abs(other).max())


def test_states_that_kernels_refuse():
    def is_served(width, backend, kind):
        size = vmem_bytes_per_token(33, 4, 2 * width)
        served = {"bytes_per_token": size, "device_kind": kind}
        return kernel_unsupported_reason(width, backend, **served) is None

    assert is_served(4096, "tpu", "TPU v5 lite")
    assert not is_served(192, "tpu", "TPU v5")
    assert not is_served(4096, "tpu", "TPU v4")  # states too large for the chip
    assert not is_served(4096, "gpu", "NVIDIA H100")


@pytest.mark.parametrize(("kind", "form"), [("TPU v4", "sum"), ("TPU v5", "kernel")])
def test_form_on_each_generation(kind, form):
    """As tests on several devices, without one: what is chosen reads a device's name alone."""
    device = SimpleNamespace(platform="tpu", device_kind=kind, id=0)
    mesh = SimpleNamespace(devices=np.array([device]), shape={"stage": 1})
    sharding: Any = SimpleNamespace(mesh=mesh, num_length_parts=1)
    keys = {"dense_conn": True, "dense_aggregation_impl": "auto"}
    keys |= {"scan_layers": "auto", "dtype": "bfloat16"}
    section = tiny_config("llama2", base_emb_dim=4096, base_num_decoder_layers=32, **keys).model
    resolved, lines = backend_defaults.resolve_auto(section, "tpu", sharding)
    assert resolved.dense_connections.dense_aggregation_impl == form
    assert resolved.memory.scan_layers is False
    assert any(f"dense_aggregation_impl: auto -> {form}" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "emb_dim", "backend", "chosen", "named"),
    [
        ("auto", 128, "cpu", "sum", "CPU"),
        ("auto", 128, "tpu", "kernel", "kernel"),
        ("auto", 64, "tpu", "sum", "emb_dim 64"),
        ("kernel", 128, "gpu", "sum", "TPU"),
        ("kernel", 32, "cpu", "kernel", None),
    ],
)
def test_form_on_each_backend(given, emb_dim, backend, chosen, named):
    section = tiny_config(
        dense_conn=True, scan_layers=False, dense_aggregation_impl=given, base_emb_dim=emb_dim
    ).model
    resolved, lines = backend_defaults.resolve_auto(section, backend)
    assert resolved.dense_connections.dense_aggregation_impl == chosen
    lines = [line for line in lines if "dense_aggregation_impl" in line]
    assert len(lines) == (named is not None)
    assert all(named in line for line in lines)


@pytest.mark.multi_device
@pytest.mark.parametrize("embed_axes", [(), ("tensor",)], ids=["whole", "divided"])
def test_kernel_on_several_devices(embed_axes):
    """Each device sums its own tokens; where states are divided, weights' gradients are added.

    Else gradients of norms' factors are added over the devices that have other tokens.
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    rules = [("activation_batch", ("data",)), ("activation_norm_length", ())]
    rules += [("activation_embed", embed_axes)]
    weights, fixed, sources, scales = given(jnp.float32)

    def sharded(function, *arguments):
        with axis_rules(mesh, rules):
            return function(*arguments)

    kernels = functools.partial(sharded, chained, "kernel")
    arguments = (weights, fixed, sources, scales)
    near(differentiated(kernels, arguments), differentiated(naive, arguments))
    assert sharded(supports_fused_norms, "kernel", sources[0]) == (not embed_axes)
    if not embed_axes:
        arguments = (weights, FACTORS, sources, scales)
        kernels = functools.partial(sharded, kernel_norms)
        near(differentiated(kernels, arguments), differentiated(naive_norms, arguments))
