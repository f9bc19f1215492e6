"""Compiled steps by shape of batch, and what the compiler says of their memory."""

import jax
import jax.numpy as jnp
import pytest

from MaxText.parallelism.compiled_steps import CompiledSteps


@pytest.fixture
def steps():
    def compile_for(batch):
        state = jax.ShapeDtypeStruct((8,), jnp.float32)

        def step(state, batch):
            return state + batch.sum(), {"loss": batch.mean()}

        return jax.jit(step, donate_argnums=0).lower(state, batch).compile(), 0.5

    return CompiledSteps(compile_for)


def test_each_shape_is_compiled_once(steps):
    batch = jnp.ones((4, 16))
    assert not steps.fits(batch)
    compilation = steps.prepare(batch)
    assert (compilation.rows, compilation.length, compilation.compile_seconds) == (4, 16, 0.5)
    assert steps.fits(batch)
    assert not steps.fits(jnp.ones((8, 8)))
    state, metrics = steps(jnp.zeros(8), batch)
    assert float(metrics["loss"]) == 1
    assert float(state[0]) == 64


def test_memory_counts_what_is_there_at_once(steps):
    memory = steps.prepare(jnp.ones((4, 16))).memory
    assert memory["arguments"] == 4 * (8 + 4 * 16)
    assert memory["aliased"] == 4 * 8  # the state is donated
    assert memory["peak"] >= memory["arguments"] + memory["temporaries"]


def test_a_saved_step_is_taken_where_it_fits():
    def compile_for(batch):
        return lambda state, batch: (state, {"loss": batch.mean()}), 0.5

    saved = jax.jit(lambda state, batch: (state, {"loss": batch.sum()}))
    saved = saved.lower(jnp.zeros(1), jnp.ones((4, 16))).compile()
    steps = CompiledSteps(compile_for, lambda batch: saved if batch.shape == (4, 16) else None)
    assert steps.prepare(jnp.ones((4, 16))).source == "file"
    assert float(steps(jnp.zeros(1), jnp.ones((4, 16)))[1]["loss"]) == 64
