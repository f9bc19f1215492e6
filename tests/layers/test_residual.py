"""What layers hand to later layers: connections and positions that a user registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import SIZES, TRAINED, Subject
from MaxText.errors import UserError
from MaxText.layers.assembly.model import Model
from MaxText.training.backend_defaults import resolve_auto
from tests.small_models import VALUE_RESIDUAL, noisy_params, random_batch, tiny_config

PARTS = """
import jax.numpy as jnp
from MaxText.layers.part import Connection, LayerInputs, Position, register


@register("position", "sinusoidal")
class Sinusoidal(Position):
    '''Vaswani et al. 2017, section 3.5.'''

    def __init__(self, config, init, rngs):
        self.width = init.dimensions.emb_dim

    def embed(self, positions_BT):
        rates = 10_000.0 ** (-jnp.arange(0, self.width, 2) / self.width)
        angles = positions_BT[..., None] * rates
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@register("connection", "two_streams")
class TwoStreams(Connection):
    '''Layers read the first of two streams and write the second; then both change places.'''

    def begin(self, x_BTD):
        return jnp.stack([x_BTD, x_BTD], axis=2)

    def read(self, index, carry, norms):
        return LayerInputs.all(carry[:, :, 0]), carry

    def write(self, index, carry, y_BTD, shared):
        return jnp.stack([carry[:, :, 1], y_BTD], axis=2)

    def end(self, carry):
        return carry.sum(axis=2)


@register("connection", "grows")
class Grows(TwoStreams):
    '''Each layer reads the sum of the two outputs before it.'''

    keeps_shapes = False

    def begin(self, x_BTD):
        return (x_BTD,)

    def read(self, index, carry, norms):
        return LayerInputs.all(sum(carry[-2:])), carry

    def write(self, index, carry, y_BTD, shared):
        return (*carry, y_BTD)

    def end(self, carry):
        return sum(carry)


@register("connection", "forgets")
class Forgets(Grows):
    keeps_shapes = True
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "crossing_parts.py"
    path.write_text(PARTS)
    return {"import_modules": [str(path)]}


def model_and_weights(**keys):
    model = Model(tiny_config(base_num_decoder_layers=2, **keys).model)
    return model, noisy_params(model, 0.1)


def logits(model, params, batch=None):
    batch = batch or random_batch(load_config(**{"vocab_size": 64, "max_target_length": 16}), 2)
    return jax.jit(lambda params: model.merge(params)(batch))(params)


def test_values_of_the_first_layer_alone():
    """With a = 0, b = 1 the value kernel of later layers has no effect."""
    model, params = model_and_weights(**VALUE_RESIDUAL)
    attention = params["layers"]["self_attention"]

    def effect(a, b, layer):
        scales = jnp.broadcast_to(jnp.array([a, b], jnp.float32), attention["value_scales"].shape)
        attention["value_scales"] = scales
        before = logits(model, params)
        kernel = attention["value"]["kernel"]
        attention["value"]["kernel"] = kernel.at[layer].add(1.0)
        after = logits(model, params)
        attention["value"]["kernel"] = kernel
        return float(jnp.abs(after - before).max())

    assert effect(0.0, 1.0, layer=1) == 0
    assert effect(0.0, 1.0, layer=0) > 0.01
    assert effect(1.0, 0.0, layer=1) > 0.01


def test_what_is_carried_goes_through_scan_decoding_and_gradients(parts):
    """By the suite of check_part.py; tests/multi_device has pipelines."""
    keys = TRAINED | SIZES | parts | {"connection_type": "two_streams"}
    subject = Subject(lambda **more: load_config(**keys | more))
    for check in CHECKS:
        if check.name in ("causality", "gradients", "scan and remat", "decode state", "FLOPs"):
            assert check.problem(subject) is None


def test_connections_whose_shapes_grow_are_unrolled(parts):
    keys = parts | {"connection_type": "grows"}
    model, params = model_and_weights(**keys, scan_layers=False)
    assert np.isfinite(logits(model, params)).all()
    with pytest.raises(ConfigurationError, match=r"(?s)connection_type=grows.*scan_layers=auto"):
        tiny_config(**keys, scan_layers=True)
    deep = tiny_config(**keys, base_num_decoder_layers=40, scan_layers="auto").model
    assert deep.layer_plan.repeats == 0
    assert resolve_auto(deep, "tpu")[0].memory.scan_layers is False
    with pytest.raises(ValueError, match="connection_type=grows"):
        deep.pipeline_schedule(2)
    model, params = model_and_weights(**parts, connection_type="forgets")
    with pytest.raises(
        UserError, match=r"connection forgets .*crossing_parts.py:\d+.*what begin made"
    ):
        logits(model, params)


def test_a_mixer_without_its_connection():
    model, params = model_and_weights(**VALUE_RESIDUAL | {"connection_type": "auto"})
    with pytest.raises(UserError, match=r"shared\[.first_values.\].*nothing.*connection_type"):
        logits(model, params)


def test_positions_of_a_module(parts):
    model, params = model_and_weights(**parts, position_embedding="sinusoidal")
    decoder = model.merge(params)
    table = decoder.position_embedder.embed(jnp.arange(5)[None])[0]
    np.testing.assert_allclose(table[3, 1], np.sin(3 * 10_000 ** (-2 / 32)), rtol=1e-6)
    assert not np.allclose(
        logits(model, params)[:, 1:],
        logits(*model_and_weights(**parts, position_embedding="none"))[:, 1:],
    )


def test_values_of_its_own_are_not_the_keys():
    with pytest.raises(ConfigurationError, match="it computes values of its own"):
        tiny_config(**VALUE_RESIDUAL, share_kv_projections=True)


def test_keys_of_attention_act_in_a_mixer_derived_from_it():
    given = {"attention_scale": 0.5, "strict_config": True}
    tiny_config(**VALUE_RESIDUAL | given)
    other = {"import_modules": ["examples/moving_average.py"], "mixer": "moving_average"}
    with pytest.raises(ConfigurationError, match="attention_scale is for layers with mixer"):
        tiny_config(**other | given)
