"""Inputs that dense connections give to each layer, by their formulas, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from MaxText.layers.assembly.model import Model
from MaxText.layers.depth.connections import rms_norm_matmul
from MaxText.layers.part import LayerInputs
from tests.small_models import random_params, tiny_config

LAYERS, EPSILON = 3, 0.3  # an epsilon that every norm shows
ACTIVATIONS = {
    "gelu_erf": lambda x: x * scipy.special.ndtr(x),
    "silu": lambda x: x * scipy.special.expit(x),
}


def norm(x, factor=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * factor


class Definition:
    """Xiao et al. 2025, section 2, with the keys of this repository."""

    def __init__(self, config, connections):
        self.dense = config.model.dense_connections
        self.zero_centered = config.model.block.normalization_zero_centered
        self.connections = connections

    def factor(self, scale):
        return np.float64(scale[...]) + self.zero_centered

    def weights(self, module, x, num_streams, depths):
        weights = np.zeros((num_streams, len(depths)))
        if self.dense.dense_static:
            weights += np.float64(module.static[...])
        elif not self.dense.adds:
            weights[:, -1] = 1.0  # the last output
        if not self.dense.dense_dynamic:
            return weights
        normed = norm(x, self.factor(module.norm.scale) if self.dense.mudd_prenorm else 1.0)
        hidden = normed @ np.float64(module.wi.kernel[...])
        hidden = ACTIVATIONS[self.dense.dynamic_dense_act_cls](hidden)
        return weights + np.einsum("btk,kcs->btcs", hidden, np.float64(module.wo.kernel[...]))

    def inputs(self, depth, outputs):
        """By stream, of the layer after `depth` layers; `outputs` begin with the embedding."""
        x, streams = outputs[depth], "r" if depth == LAYERS else self.dense.dense_streams
        if str(depth) not in self.connections.after:
            return dict.fromkeys("qkvr", x)
        module, depths = self.connections.after[str(depth)], self.dense.sources(depth)
        states = [outputs[source] for source in depths]
        if self.dense.mudd_prenorm:
            scales = self.factor(self.connections.source_norm["scale"])
            states = [norm(outputs[source], scales[source]) for source in depths]
        weights = self.weights(module, x, len(streams), depths)
        sums = {}
        for index, stream in enumerate(streams):
            y = sum(weights[..., index, s, None] * state for s, state in enumerate(states))
            if self.dense.mudd_postnorm == "all" or (
                self.dense.mudd_postnorm == "residual" and stream == "r"
            ):
                y = norm(y, self.factor(module.post_norms[stream].scale))
            sums[stream] = x + y if self.dense.adds else y
        return {stream: sums.get(stream, sums.get("r", x)) for stream in "qkvr"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dense_streams": ("v", "r"), "dense_static": False, "dynamic_dense_act_cls": "silu"},
        {"dense_streams": ("k",), "dense_dynamic": False},
        {"mudd_prenorm": True, "mudd_postnorm": "all", "normalization_zero_centered": True},
        {"mudd_prenorm": True, "dense_sparsity": "list", "dense_selection.outputs": (1,)},
        {"mudd_postnorm": "residual", "dense_sparsity": "window", "dense_selection.window": 1},
        {"mudd_prenorm": True, "dense_static": False, "dense_target_layers": (1, 3)},
    ],
    ids=str,
)
def test_inputs_of_every_layer(keys):
    keys = {"dynamic_dense_act_cls": "gelu_erf", "dense_streams": ("q", "k", "v", "r")} | keys
    config = tiny_config(
        "llama2",
        dense_conn=True,
        base_emb_dim=8,
        base_num_decoder_layers=LAYERS,
        scan_layers=False,
        normalization_layer_epsilon=EPSILON,
        matmul_precision="highest",
        **keys,
    )
    model = Model(config.model)
    params = random_params(model, 0.5)
    draw = np.random.default_rng(1).normal
    outputs = [scale * draw(size=(1, 3, 8)) for scale in (1.0, 0.2, 3.0, 0.7)]

    @jax.jit
    def run(params, outputs):
        connections = model.merge(params).connections
        carry, found = connections.begin(outputs[0]), []
        for index, y_BTD in enumerate(outputs[1:]):
            inputs, carry = connections.read(index, carry, {})
            found.append(inputs._asdict())
            carry = connections.write(index, carry, y_BTD, {})
        return found, connections.end(carry)

    found, last = run(params, [jnp.float32(x) for x in outputs])
    definition = Definition(config, model.merge(params).connections)
    for depth, inputs in enumerate(found):
        assert inputs.keys() == {*LayerInputs._fields} == set("qkvr")
        for stream, expected in definition.inputs(depth, outputs).items():
            np.testing.assert_allclose(
                inputs[stream], expected, rtol=1e-4, atol=1e-4, err_msg=f"{depth} {stream}"
            )
    np.testing.assert_allclose(last, definition.inputs(LAYERS, outputs)["r"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_inside_the_product_has_the_gradients_of_the_norm_before_it(dtype):
    draw = np.random.default_rng(2).normal
    x, kernel, grad_y = (
        jnp.asarray(size * draw(size=shape), dtype)
        for size, shape in ((0.7, (2, 3, 8)), (1.0, (8, 5)), (1.0, (2, 3, 5)))
    )

    def plain(x, kernel):
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
        normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON)
        return (normed @ kernel).astype(dtype)

    @jax.jit
    def run(x, kernel, grad_y):
        fused = functools.partial(rms_norm_matmul, epsilon=EPSILON, precision="highest")
        both = []
        for function in (lambda x, kernel: fused(x, kernel), plain):
            y, vjp = jax.vjp(function, x, kernel)
            both.append([array.astype(jnp.float32) for array in (y, *vjp(grad_y))])
        return both

    with jax.default_matmul_precision("highest"):
        found, expected = run(x, kernel, grad_y)
    for got, wanted in zip(found, expected, strict=True):
        tolerance = 1e-5 if dtype == "float32" else 2.0**-6  # two roundings of products
        np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())
