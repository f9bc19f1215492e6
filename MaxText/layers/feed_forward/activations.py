"""Activation functions by configuration name, including those of GPT-Neo.

ACTIVATIONS apply to each element, OVER_FEATURES to all features of a token, and LEARNED have
scalars that are trained (`LearnedActivation`). `rrelu` draws random slopes in training.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.layers.params import Init, constant, param

Function = Callable[[jax.Array], jax.Array]


def _odd_harmonics(wave: Function, power: int) -> Function:
    """Returns wave(x) - wave(3x) / 3^power + wave(5x) / 5^power - wave(7x) / 7^power."""
    return lambda x: sum(
        (-1) ** i * wave(n * x) / n**power  # type: ignore[return-value]
        for i, n in enumerate((1, 3, 5, 7))
    )


ACTIVATIONS: dict[str, Function] = {
    "linear": lambda x: x,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # Primer (So et al. 2021)
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    # Hendrycks and Gimpel 2016, section 2: the sigmoid approximation, as in gpt-oss.
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "linear_plus_one": lambda x: x + 1,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "hard_swish": jax.nn.hard_swish,
    "soft_sign": jax.nn.soft_sign,
    # Further activations of GPT-Neo, under its names.
    "abs": jnp.abs,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sign": jnp.sign,
    "id": lambda x: x,
    "lrelu001": functools.partial(jax.nn.leaky_relu, negative_slope=0.01),
    "lrelu020": functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
    "triangle_relax": _odd_harmonics(jnp.sin, 2),
    "square_relax": _odd_harmonics(jnp.cos, 1),
    "spike": lambda x: 1 / (1 + jnp.square(x)),
    "spike2": lambda x: jnp.exp(-jnp.square(x)),
    "tanhshrink": lambda x: x - jnp.tanh(x),  # a NameError in GPT-Neo
    "softsign": jax.nn.soft_sign,
    "bipolarsigmoid": lambda x: 2 * jax.nn.sigmoid(x) - 1,
    # Basirat and Roth 2018; 1 + e^-x as in the paper.
    "elish": lambda x: jnp.where(x > 0, x, jnp.expm1(jnp.minimum(x, 0))) * jax.nn.sigmoid(x),
    # GPT-Neo's "elish" has 1 + e^x for x > 0: models that were trained with it need this one.
    "elish_gpt_neo": lambda x: jnp.where(
        x > 0, x * jax.nn.sigmoid(-x), jnp.expm1(jnp.minimum(x, 0)) * jax.nn.sigmoid(x)
    ),
    "arcsinh": jnp.arcsinh,
    "maxsig": lambda x: jnp.maximum(x, jax.nn.sigmoid(x)),
    "cosid": lambda x: jnp.cos(x) - x,
    "minsin": lambda x: jnp.minimum(x, jnp.sin(x)),
    "maxtanh": lambda x: jnp.maximum(x, jnp.tanh(x)),
    # Clamped: tanh(e^5) is 1, and e^x overflows from x = 89.
    "tanhexp": lambda x: x * jnp.tanh(jnp.exp(jnp.minimum(x, 5))),
    "lisht": lambda x: x * jnp.tanh(x),
    "seagull": lambda x: jnp.log1p(jnp.square(x)),
    "snake": lambda x: x + jnp.square(jnp.sin(x)),
    "roottanh": lambda x: jnp.cbrt(jnp.square(x) + 1) * jnp.tanh(x),
    "softplusmone": lambda x: jax.nn.softplus(x) - 1,
}

OVER_FEATURES: dict[str, Function] = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "logsoftmax": functools.partial(jax.nn.log_softmax, axis=-1),
}

_RRELU_SLOPES = (1 / 8, 1 / 3)  # range of the random slopes


def rrelu(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns leaky ReLU with a random slope per element (Xu et al. 2015, section 2.4).

    GPT-Neo draws a single slope when it builds the graph, and another one for evaluation.

    Args:
      x: Any array.
      key: RNG key of the slopes; None is their mean, as in evaluation.
    """
    slope = sum(_RRELU_SLOPES) / 2
    if key is not None:
        low, high = _RRELU_SLOPES
        slope = jax.random.uniform(key, x.shape, x.dtype, low, high)
    return jnp.where(x >= 0, x, slope * x)


def _aria2(
    x: jax.Array,
    *,
    lower: jax.Array,
    upper: jax.Array,
    offset: jax.Array,
    factor: jax.Array,
    rate: jax.Array,
    root: jax.Array,
) -> jax.Array:
    """Returns ARiA: x times Richards' curve (Patwardhan et al. 2018)."""
    # Clamped against overflow; the curve is 0 there.
    growth = jnp.exp(jnp.minimum(rate * x / (1 + jax.nn.softplus(root)), 60))
    return x * (lower + upper / (jax.nn.softplus(offset) + factor * growth))


def _proottanh(x: jax.Array, *, power: jax.Array, offset: jax.Array, root: jax.Array) -> jax.Array:
    """Returns roottanh with learned powers and offset.

    Uses |x|: a fractional power of x itself is NaN for x < 0.
    """
    powered = jnp.abs(x) ** (2 + jax.nn.softplus(power)) + 1 + jax.nn.softplus(offset)
    return powered ** (1 / (3 + jax.nn.softplus(root))) * jnp.tanh(x)


def _xielu(x: jax.Array, *, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Returns xIELU with beta = 0.5 (Huang and Schlag 2024, equation 11)."""
    beta = 0.5
    positive = jax.nn.softplus(alpha_p) * jnp.square(x)
    # Of inputs up to -1e-6 as in Apertus, also against overflow for the other sign.
    exponential = jnp.expm1(jnp.minimum(x, -1e-6))
    negative = (beta + jax.nn.softplus(alpha_n)) * (exponential - x)
    return jnp.where(x > 0, positive, negative) + beta * x


def _before_softplus(y: float) -> float:
    """Returns the number whose softplus is y."""
    return math.log(math.expm1(y))


LEARNED: dict[str, tuple[Callable[..., jax.Array], dict[str, float]]] = {  # initial scalars
    "aria": (
        _aria2,
        {"lower": 0.0, "upper": 1.0, "offset": 0.0, "factor": 1.0, "rate": -1.0, "root": 0.0},
    ),
    "prelu": (lambda x, *, slope: jnp.where(x >= 0, x, slope * x), {"slope": 0.2}),
    "parcsinh": (
        lambda x, *, scale, rate: scale * jnp.arcsinh(x * (1 + jax.nn.softplus(rate))),
        {"scale": 1.0, "rate": 0.0},
    ),
    "psoftplus": (
        lambda x, *, scale, rate, offset: scale * jax.nn.softplus(rate * x) + offset,
        {"scale": 1.0, "rate": 1.0, "offset": 0.0},
    ),
    "xielu": (_xielu, {"alpha_p": _before_softplus(0.8), "alpha_n": _before_softplus(0.3)}),
    "proottanh": (_proottanh, {"power": 0.0, "offset": 0.0, "root": 0.0}),
}


def clamped(x: jax.Array, index: int, limit: float) -> jax.Array:
    """Returns a branch's input of its activation, clamped by mlp_activations_limit.

    Args:
      x: Output of the kernel before the activation.
      index: Which branch it is. The first is clamped from above alone, as most activations bound it
        from below (gpt-oss).
      limit: The largest value; 0 for none.
    """
    if limit == 0:
        return x
    return jnp.minimum(x, limit) if index == 0 else jnp.clip(x, -limit, limit)


class LearnedActivation(nnx.Module):
    """An activation with a few learned scalars, shared by all features."""

    def __init__(self, name: str, init: Init, rngs: nnx.Rngs):
        """Declares the scalars.

        Args:
          name: One of LEARNED.
          init: dtype of the scalars.
          rngs: RNG streams; the scalars' first values are constants.
        """
        self.function, first_values = LEARNED[name]
        self.names = tuple(first_values)
        for parameter, value in first_values.items():
            scalar = param(rngs, (), (), constant(value), dtype=init.weight_dtype)
            setattr(self, parameter, scalar)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the activation of x, of any shape."""
        scalars = {name: getattr(self, name)[...].astype(x.dtype) for name in self.names}
        return self.function(x, **scalars)
