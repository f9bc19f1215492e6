"""Operations and constants of traced programs, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.cost.jaxpr_operations import constants, count_operations, host_computations

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
PRODUCT = 2 * 4 * 8 * 8


def count(function, *arguments):
    return count_operations(jax.make_jaxpr(function)(*arguments).jaxpr)


def repeated(x, w):
    return jax.lax.scan(lambda carry, _: (carry @ w, None), x, None, length=5)[0]


def until_small(x, w):
    return jax.lax.while_loop(lambda carry: carry.sum() > 1, lambda carry: carry @ w, x)


def one_of_two(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)


@pytest.mark.parametrize(
    ("function", "products"),
    [(lambda x, w: x @ w, 1), (repeated, 5), (one_of_two, 2), (jax.jit(repeated), 5)],
)
def test_products_with_loops_multiplied_out(function, products):
    assert count(function, X, W).matmul_flops == products * PRODUCT


def test_arithmetic_and_reductions_count_once_per_element():
    operations = count(lambda x: jnp.sum(x * x + 1.0), X)
    assert (operations.matmul_flops, operations.elementwise_flops) == (0, 3 * 32)


def test_a_convolution():
    def function(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")

    x = jax.ShapeDtypeStruct((1, 3, 10), jnp.float32)  # 3 channels, 10 positions
    kernel = jax.ShapeDtypeStruct((6, 3, 5), jnp.float32)  # 6 channels from 3, width 5
    assert count(function, x, kernel).convolution_flops == 2 * 10 * 6 * 3 * 5


def test_what_cannot_be_counted_is_named():
    (reason,) = count(until_small, X, W).uncounted
    assert "loop of unknown length" in reason

    def calls_python(x):
        return jax.jit(lambda x: jax.pure_callback(np.sin, X, x))(x)

    assert count(calls_python, X).uncounted == ("pure_callback",)
    assert host_computations(jax.make_jaxpr(calls_python)(X).jaxpr) == ["pure_callback"]
    assert host_computations(jax.make_jaxpr(repeated)(X, W).jaxpr) == []


def test_arrays_in_inner_programs_are_found_once():
    table = jnp.asarray(np.arange(64.0).reshape(8, 8))

    def function(x):
        step = jax.jit(lambda carry: carry @ table)
        return jax.lax.scan(lambda carry, _: (step(carry) @ table, None), x, None, length=3)[0]

    arrays = [array for array in constants(jax.make_jaxpr(function)(X)) if array.size > 1]
    assert [array.shape for array in arrays] == [(8, 8)]
