"""What a user's part returns wrongly is one message with the part, its module and its line."""

import jax
import optax
import pytest

from MaxText.config.registry import KINDS
from MaxText.errors import UserError
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training import optimizer
from MaxText.training.assembly import setup_train
from tests.small_models import tiny_config

HEAD = """
import jax.numpy as jnp, optax
from MaxText.layers.normalization import rms_norm
from MaxText.layers.part import (
    Connection, FeedForward, Head, LayerInputs, Mixer, Position, ResidualStream, register)
"""
# kind -> [(the body of a part, what is wrong with it)]. Its class is derived from BASES.
BASES = {
    "mixer": "Mixer",
    "feed_forward": "FeedForward",
    "position": "Position",
    "connection": "ResidualStream",
    "head": "Head",
}
CALL = "    def __call__(self, x_BTD, context): return "
WRONG = [
    ("mixer", CALL + "x_BTD, None", r"__call__ returned \(float32\[1, 16, 32\], None\)"),
    ("mixer", CALL + "x_BTD, {'a': x_BTD}", r"{a: float32\[1, 16, 32\]}\), .*{name: scalar}"),
    ("mixer", CALL + "x_BTD", r"__call__ returned float32\[1, 16, 32\], and"),
    ("feed_forward", CALL + "x_BTD[..., 1:], {}", r"__call__ returned \(float32\[1, 16, 31\], {}"),
    ("position", "    def embed(self, p): return p", r"embed returned int32\[1, 16\]"),
    ("position", "    def for_mixers(self, p): return None", "for_mixers returned None"),
    ("position", "    def for_mixers(self, p): return {'x': p}", r"for_mixers returned {x: int32"),
    ("position", "    def for_mixers(self, p): return {'rotary': p}", r"returned {rotary: int32"),
    ("position", "    def for_mixers(self, p): return {'slopes_N': p}", r"{slopes_N: int32\[1, 1"),
    ("connection", "    def read(self, i, x, norms): return x", r"read returned float32\[1, 16"),
    (
        "connection",
        "    def read(self, i, x, norms): return LayerInputs.all(x[..., 1:]), x",
        r"read returned \(LayerInputs\(float32\[1, 16, 31\],.*LayerInputs of \[1, 16, 32\] each",
    ),
    ("connection", "    def end(self, x): return x[..., 1:]", r"end returned float32\[1, 16, 31\]"),
    ("connection", "    def write(self, i, x, y, shared): return y[..., 1:]", "write returned"),
    (
        "head",
        "    def __call__(self, h, *rest): return h",
        r"__call__ returned float32\[1, 16, 32\], and has to return float32\[1, 16, 64\]",
    ),
    ("norm", "return None", "returned None, and has to return an nnx.Module"),
    (
        "norm",
        "return type('Half', (Mixer,), {'__call__': lambda self, x: x[..., 1:]})(None, init, rngs)",
        r"its module returned .*\[1, 2, 31\], .*\[1, 2, 32\]",
    ),
    ("optimizer", "return None", "returned None, and has to return an optax.Gradient"),
    ("optimizer", "return optax.stateless(lambda u, p: jnp.zeros(3))", "update returned .*updates"),
    (
        "optimizer",
        "return optax.GradientTransformation(lambda p: p, lambda u, s, p=None: u)",
        "update returned .*updates, state",
    ),
    (
        "optimizer",
        "return optax.GradientTransformation(lambda p: {}, lambda u, s, p: (u, u))",
        "update returned .* a state like that of init",
    ),
    ("objective", "return logits", r"returned float32\[1, 16, 64\], and has to return \({name"),
]
SIGNATURES = {
    "norm": "config, init, rngs, *, parametric",
    "optimizer": "config, parameters",
    "objective": "config, logits, targets",
}


@pytest.mark.parametrize(("kind", "body", "words"), WRONG)
def test_what_is_returned_wrongly(kind, body, words, tmp_path, own_modules):
    start = (
        f"class Wrong({BASES[kind]}):\n"
        if kind in BASES
        else f"def wrong({SIGNATURES[kind]}):\n    "
    )
    source = f"{HEAD}@register({kind!r}, 'wrong')\n{start}{body}\n"
    (tmp_path / "mine.py").write_text(source)
    config = tiny_config(import_modules=["mine.py"], **{KINDS[kind]: "wrong"})
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    with pytest.raises(UserError) as caught:
        setup_train(config, sharding)
    line = HEAD.count("\n") + 1
    caught.match(rf"(?s)^{kind} wrong \(.*mine.py:{line}\).*{words}")


def test_a_weight_without_logical_axes(tmp_path, own_modules):
    part = """from flax import nnx
@register("mixer", "wrong")
class Wrong(Mixer):
    def __init__(self, config, init, rngs): self.w = nnx.Param(jnp.ones(3))
"""
    (tmp_path / "mine.py").write_text(HEAD + part)
    config = tiny_config(import_modules=["mine.py"], mixer="wrong")
    with pytest.raises(UserError, match=r"self_attention/w of a layer .*nnx\.Param"):
        setup_train(config, make_sharding_plan(config.mesh, jax.devices()[:1]))


def test_updates_may_have_another_dtype():
    parameters = {"w": jax.ShapeDtypeStruct((3,), "float32")}
    transform = optax.stateless(lambda u, p: jax.tree.map(lambda x: x.astype("bfloat16"), u))
    optimizer._check_transform(transform, transform, parameters)
