"""Kernels of libraries, interpreted, against plain attention; and when they are taken."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText.cost.jaxpr_graph import traced
from MaxText.cost.step_time import operations
from MaxText.layers.assembly.remat import apply_remat
from MaxText.layers.attention import flash_attention
from MaxText.layers.attention.attention_core import (
    AttentionSharding,
    AttentionSpec,
    dot_product_attention,
)
from MaxText.training import backend_defaults
from tests.small_models import tiny_config

B, T = 1, 256
# An interpreted kernel takes long to compile, and not long to run.
QUICK = {"xla_backend_optimization_level": 0}

SIGMOID = {"import_modules": ["examples/sigmoid_attention.py"], "base_num_decoder_layers": 2}
SIGMOID_OR_SOFTMAX = {"S": {"mixer": "sigmoid_attention"}, "A": {"mixer": "attention"}}
# (query heads, key/value heads, head_dim, spec, several documents)
CASES = [
    (4, 2, 80, {"soft_cap": 3.0, "window": 100}, True),
    pytest.param(4, 1, 64, {"scale": 0.3}, False, marks=pytest.mark.slow),
    pytest.param(2, 2, 64, {"causal": False, "window": 100}, True, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _blocks_of_a_tile(monkeypatch):
    """So that these short texts have several blocks."""
    monkeypatch.setattr(flash_attention, "LARGEST_BLOCK", flash_attention.TILE)
    flash_attention._splash_kernel.cache_clear()
    yield
    flash_attention._splash_kernel.cache_clear()


def given(heads, kv_heads, head_dim, documents, batch=B):
    generator = np.random.default_rng(0)
    q, k, v, weights = (
        jnp.asarray(generator.normal(size=(batch, T, n, head_dim)), jnp.float32)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    segments = np.sort(generator.integers(0, 4, (batch, T)), axis=1).astype(np.int32)
    return q, k, v, weights, jnp.asarray(segments) if documents else None


def differentiated(function, q, k, v, weights):
    """The output, and gradients of its weighted sum."""

    def total(q, k, v):
        o = function(q, k, v)
        return (o * weights).sum(), o

    graded = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)
    return jax.block_until_ready(graded(q, k, v))


def check_kernel(spec, arrays, segments, sharding=None):
    """Its outputs and gradients are those of plain attention."""

    def kernel(q, k, v):
        return flash_attention.flash_attention(q, k, v, spec, sharding, segments_BT=segments)

    def plain(q, k, v):
        return dot_product_attention(q, k, v, spec, segments_BT=segments)

    found, expected = differentiated(kernel, *arrays), differentiated(plain, *arrays)
    for actual, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 100), (False, 200)])
def test_masks_are_those_of_the_library(causal, window, monkeypatch):
    spec = AttentionSpec(causal=causal, window=window)
    kernel = (512, 512), 2, 2, spec, True
    actual = jax.tree.leaves(flash_attention._splash_kernel(*kernel))
    flash_attention._splash_kernel.cache_clear()
    monkeypatch.setattr(flash_attention, "_by_diagonal", lambda kind: kind)
    reference = jax.tree.leaves(flash_attention._splash_kernel(*kernel))
    jax.tree.map(np.testing.assert_array_equal, actual, reference)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "scores", "documents"), CASES)
def test_the_same_outputs_and_gradients(heads, kv_heads, head_dim, scores, documents):
    *arrays, segments = given(heads, kv_heads, head_dim, documents)
    check_kernel(AttentionSpec(**scores), arrays, segments)


# (axes of the batch, of the sequence, of the heads, key/value heads, spec)
MESHES = [
    (("data",), ("context",), ("tensor",), 1, {}),
    pytest.param((), ("context",), (), 2, {"causal": False}, marks=pytest.mark.slow),
]


@pytest.mark.multi_device
@pytest.mark.parametrize(("batch", "length", "heads", "kv_heads", "scores"), MESHES)
def test_the_same_on_several_devices(batch, length, heads, kv_heads, scores):
    """Each device has its rows of the mask, and heads of keys that no mesh divides are copied."""
    *arrays, segments = given(4, kv_heads, 8, True, batch=4)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "context", "tensor"))
    query_sharding = NamedSharding(mesh, PartitionSpec(batch, length, heads))
    own = heads if kv_heads % 2 == 0 else None
    key_sharding = NamedSharding(mesh, PartitionSpec(batch, None, own))
    sharding = AttentionSharding(query_sharding, key_sharding)
    check_kernel(AttentionSpec(**scores), arrays, segments, sharding)


@pytest.mark.parametrize("is_split", [False, pytest.param(True, marks=pytest.mark.multi_device)])
def test_sinks_and_wider_values(is_split):
    """Values of half as many heads, wider than keys, and gradients of the sinks."""
    q, k, v, weights, segments = given(4, 2, 64, True)
    k = jnp.concatenate([k, k * 0.5], axis=2)[:, :, :2]
    v = jnp.concatenate([v, v[..., :16]], axis=-1)[:, :, :1]
    weights = jnp.concatenate([weights, weights[..., :16]], axis=-1)
    sharding = None
    if is_split:
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("context", "tensor"))
        by_head = NamedSharding(mesh, PartitionSpec(None, "context", "tensor"))
        sharding = AttentionSharding(
            by_head, NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        )

    def numbers(attend, **options):
        def total(sinks_N, q, k, v):
            spec = AttentionSpec(sinks_N=sinks_N, window=100)
            o = attend(q, k, v, spec, segments_BT=segments, **options)
            return (o * weights).sum(), o

        graded = jax.jit(
            jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True), compiler_options=QUICK
        )
        return jax.block_until_ready(graded(jnp.asarray([1.0, -1.0, 3.0, 0.0]), q, k, v))

    found = numbers(flash_attention.flash_attention, sharding=sharding)
    expected = numbers(dot_product_attention)
    for actual, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5 * max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize(
    ("keys", "backend", "chosen", "named"),
    [
        ({}, "tpu", "flash", ""),
        ({"attention": "flash"}, "tpu", "flash", None),
        ({"attention": "blocked"}, "tpu", "blocked", None),
        ({"attention": "flash"}, "cpu", "blocked", "CPU"),
        ({"max_target_length": 200}, "tpu", "blocked", "max_target_length 200"),
        ({"position_embedding": "alibi"}, "tpu", "blocked", "position_embedding=alibi"),
        ({"num_mem_kv": 2}, "tpu", "blocked", "num_mem_kv"),
        ({"attention_sinks": True}, "tpu", "flash", ""),
        ({"attention_sinks": True}, "gpu", "blocked", "log-sum-exp"),
        (SIGMOID | {"mixer": "sigmoid_attention"}, "tpu", "blocked", "score and weights"),
        (
            SIGMOID
            | {"layer_pattern": "SA", "layer_kinds": SIGMOID_OR_SOFTMAX, "attention": "flash"},
            "tpu",
            "flash",
            "mixer=sigmoid_attention",
        ),
        ({"dropout_rates.attention": 0.1}, "tpu", "blocked", "dropout"),
        ({"matmul_precision": "high"}, "tpu", "blocked", "matmul_precision=high"),
        ({"attention_types": [[["linear"], 3]]}, "tpu", "blocked", "softmax"),
        ({"attn_logits_soft_cap": 30.0}, "gpu", "blocked", "attn_logits_soft_cap"),
        ({"dtype": "float32"}, "gpu", "blocked", "dtype=float32"),
        ({"head_dim": 6}, "gpu", "blocked", "head_dim 6"),
        ({"mlm_training": True, "attention_types": [[["local"], 3]]}, "gpu", "blocked", "windows"),
        ({"dtype": "float16"}, "tpu", "blocked", "dtype=float16"),
        ({"head_dim": 520}, "tpu", "blocked", "head_dim 520"),
    ],
)
def test_form_on_each_backend(keys, backend, chosen, named):
    section = tiny_config(**{"max_target_length": 256, "dtype": "bfloat16"} | keys).model
    resolved, lines = backend_defaults.resolve_auto(section, backend)
    assert resolved.attention.attention == chosen
    lines = [line for line in lines if line.startswith("attention:")]
    assert len(lines) == (named is not None)
    assert all(named in line for line in lines)


def test_divided_sequences():
    def is_served(backend, num_parts, **keys):
        section = tiny_config(max_target_length=256, dtype="bfloat16", **keys).model
        return flash_attention.kernel_unsupported_reason(section, backend, num_parts) is None

    assert is_served("gpu", 4)
    assert is_served("tpu", 2)
    assert not is_served("tpu", 4)
    assert not is_served("tpu", 2, context_parallel_strategy="ring")


def test_other_lengths_are_served_by_the_plain_form():
    """Evaluation, prompts and stages of training may be of any length."""
    q = given(2, 2, 8, False)[0]
    assert flash_attention.supports_shape(q, None)
    assert not flash_attention.supports_shape(q[:, :200], None)


@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, 129), (True, 130), (False, 100)]
)
def test_products_are_those_of_the_blocks_that_are_not_skipped(causal, window):
    length, tile = 512, flash_attention.TILE
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = np.asarray(AttentionSpec(causal=causal, window=window).visible(jnp.asarray(distance)))
    blocks = seen.reshape(length // tile, tile, length // tile, tile).any((1, 3))
    found = flash_attention.average_keys_computed(length, causal=causal, window=window)
    assert found == blocks.sum() * tile / len(blocks)


@pytest.mark.parametrize(
    ("causal", "window", "value_width"), [(True, None, 64), (True, 70, 32), (False, 200, 64)]
)
def test_a_plan_counts_the_products_of_the_kernels(causal, window, value_width, monkeypatch):
    """As traced for a TPU, seven for each block in the backward pass and two in the forward one.

    Five of them sum over or make what is as wide as keys, four what is as wide as values.
    """
    monkeypatch.setattr(flash_attention, "platform", lambda: "tpu")
    spec = AttentionSpec(causal=causal, window=window)
    q, k, v, _, _ = given(4, 2, 64, False)
    v = v[..., :value_width]

    def total(q, k, v):
        return flash_attention.flash_attention(q, k, v, spec).sum()

    program = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)
    nodes = traced(program.jaxpr, weights=[0.0] * 3).nodes
    keys = flash_attention.average_keys_computed(T, causal=causal, window=window)
    found = sum(operations(node, keys) for node in nodes if node.name == "pallas_call")
    assert not any(value.is_square for node in nodes for value in node.outputs)
    assert found == (5 * 64 + 4 * value_width) * 2 * B * T * keys * 4


@pytest.mark.parametrize(("policy", "times"), [("full", 2), ("minimal_with_context", 1)])
def test_a_policy_that_keeps_the_context_runs_the_forward_kernel_once(policy, times, monkeypatch):
    monkeypatch.setattr(flash_attention, "platform", lambda: "tpu")
    q, k, v, _, _ = given(2, 2, 64, False)

    def attend(q, k, v):
        return flash_attention.flash_attention(q, k, v, AttentionSpec())

    layer = apply_remat(attend, policy, in_scan=False)
    program = jax.make_jaxpr(jax.grad(lambda *x: (layer(*x) ** 2).sum()))(q, k, v)
    nodes = traced(program.jaxpr, weights=[0.0] * 3).nodes
    names = [node.params["name"] for node in nodes if node.name == "pallas_call"]
    assert sum("_fwd" in name for name in names) == times


@pytest.mark.parametrize("value_width", [8, 24])
def test_cudnn_is_given_heads_of_one_width(value_width, monkeypatch):
    """JAX's own form, which refuses two widths as well, stands in place of cuDNN's."""
    plain = jax.nn.dot_product_attention

    def dot_product(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return plain(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product)
    q, k, v, _, segments = given(4, 2, 24, True)
    q, k = q[..., :16], k[..., :16]
    v = v[..., :value_width]
    spec = AttentionSpec()
    found = flash_attention._cudnn(None, None, q, k, v, segments, segments, spec=spec)
    expected = dot_product_attention(q, k, v, spec, segments_BT=segments)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_cudnn_compiles_each_kernel_once(monkeypatch):
    model = tiny_config("muddformer", mlp_dim_multiple=8, scan_layers=False).model
    assert len({layer.dimensions.mlp_dim for layer in model.layers}) == 3
    compiled = mock.Mock()
    monkeypatch.setattr(jax, "jit", compiled)
    assert flash_attention.cudnn_failure_reason(model, jax.devices()) is None
    assert compiled.call_count == 1
