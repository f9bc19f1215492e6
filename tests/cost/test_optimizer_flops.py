"""FLOPs of Muon and SOAP: those of the traced updates, and in plans."""

import jax
import jax.numpy as jnp
import pytest

from MaxText.config.training_sections import OptimizerConfig, SoapConfig
from MaxText.cost.optimizer_flops import optimizer_flops
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.optimizer import make_optimizer
from tests.cost.test_plans import plan_of

LAYERS, INPUTS, OUTPUTS = 3, 24, 40


def products_of(jaxpr) -> float:
    """FLOPs of all matrix products in a jaxpr; of the branches of a condition, of all."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = 1
            for axis in contracted:
                inner *= shape[axis]
            total += 2.0 * inner * equation.outvars[0].aval.size
        for value in equation.params.values():
            bodies = value if isinstance(value, tuple | list) else [value]
            for body in bodies:
                body = getattr(body, "jaxpr", body)
                if hasattr(body, "eqns"):
                    total += products_of(body)
    return total


@pytest.mark.parametrize("opt_type", ["adamw", "muon", "normuon", "muonh", "soap"])
@pytest.mark.parametrize("max_side", [10_000, 30])
def test_flops_are_those_of_the_traced_update(opt_type, max_side):
    config = OptimizerConfig(opt_type=opt_type, soap=SoapConfig(frequency=1, max_side=max_side))
    shape = (LAYERS, INPUTS, OUTPUTS)
    spec = ParamSpec(shape, jnp.dtype("float32"), ("layers", "embed", "mlp"), num_input_dims=1)
    parameters = {"kernel": spec}
    params = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    optimizer = make_optimizer(config, lambda step: 0.1, parameters)
    state = jax.eval_shape(optimizer.init, params)
    traced = products_of(jax.make_jaxpr(optimizer.update)(params, state, params).jaxpr)
    counted = sum(optimizer_flops(config, parameters).values())
    if opt_type == "soap":  # the factorization is no product
        sides = [side for side in (INPUTS, OUTPUTS) if side <= max_side]
        counted -= LAYERS * sum(8 / 3 * side**3 for side in sides)
    assert counted == pytest.approx(traced)


def test_plans_count_the_optimizer():
    times = [
        plan_of("1xH100", "llama2", vocab_size=128, opt_type=name).time
        for name in ("adamw", "muon")
    ]
    assert times[0].optimizer_operations == 0
    assert times[1].optimizer_operations > 0
    assert times[0].operations == times[1].operations
    sharded = plan_of(
        "4xH100", "llama2", vocab_size=128, opt_type="muon", ici_fsdp_parallelism=4
    ).time
    expected = times[1].optimizer_operations / 4
    assert sharded.optimizer_operations == pytest.approx(expected)
