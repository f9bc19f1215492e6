"""The cost of a configuration, counted from its traced and compiled train step.

Nothing here is what a part says about itself. A table, a buffer and an array that is closed over
count as parameters; a product that is written as a sum of products counts as FLOPs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from MaxText.compilation.lowering import largest_batch
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.training_sections import MeshConfig
from MaxText.cost.abstract_step import cached
from MaxText.cost.flops import count_flops
from MaxText.cost.jaxpr_operations import (
    TracedOperations,
    constants,
    count_operations,
    host_computations,
)
from MaxText.errors import UserError
from MaxText.experiments.arena.information_leaks import target_losses
from MaxText.formatting import byte_count
from MaxText.input_pipeline.sequences.plan_batches import plan_batches
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.assembly import TrainSetup, setup_train
from MaxText.training.objective import loss_sums, loss_totals
from MaxText.value_types import PyTree

Match = Literal["parameters", "stored_bytes", "flops", "bytes", "tokens"]
MATCHES: tuple[Match, ...] = ("parameters", "stored_bytes", "flops", "bytes", "tokens")
# Keys of the counted program: products as products, all layers in sight of XLA's count.
_COUNTED_AS = {"attention": "dot_product", "scan_layers": False}
# What a part's formula may leave out, as a share of what is traced.
_MISREPORTED = 0.02


@dataclasses.dataclass(frozen=True)
class CountedCost:
    """What a model costs, counted by the harness.

    Attributes:
      parameters: Numbers in all weights, frozen models, and arrays in the program.
      stored_bytes: Bytes of the same.
      optimizer_bytes: Bytes of the optimizer's state.
      tokens_per_step: Tokens of a train step on all devices.
      matmul_flops_per_token: FLOPs of matrix products in the train step per token, with those that
        remat repeats.
      flops_per_token: All operations of the train step per token, arithmetic included.
      step_bytes: Bytes that a train step reads and writes, by XLA's analysis of the program for one
        CPU device; 0 if unknown.
    """

    parameters: int
    stored_bytes: int
    optimizer_bytes: int
    tokens_per_step: int
    matmul_flops_per_token: float
    flops_per_token: float
    step_bytes: float

    @property
    def flops_per_step(self) -> float:
        """All operations of a train step on all devices."""
        return self.flops_per_token * self.tokens_per_step

    def amount(self, match: Match) -> float:
        """Returns the cost of a kind."""
        return float(
            {
                "parameters": self.parameters,
                "stored_bytes": self.stored_bytes,
                "flops": self.flops_per_token,
                "bytes": self.step_bytes,
                "tokens": self.tokens_per_step,
            }[match]
        )


class TracedProgram(NamedTuple):
    """The train step of a configuration on one CPU device, and its evaluation, traced."""

    setup: TrainSetup
    batch: Batch  # shapes
    train_step: jax.stages.Traced
    evaluation: jax.stages.Traced
    operations: TracedOperations  # of the train step

    @property
    def host_computations(self) -> list[str]:
        """Primitives that run Python on the host, in training or evaluation."""
        programs = (self.train_step, self.evaluation)
        names = [name for program in programs for name in host_computations(program.jaxpr.jaxpr)]
        return list(dict.fromkeys(names))

    @property
    def constants(self) -> list[np.ndarray]:
        """Arrays that the train step or the evaluation holds, of the one that holds more."""
        both = [constants(program.jaxpr) for program in (self.train_step, self.evaluation)]
        arrays = max(both, key=_num_bytes)
        return [array for array in arrays if array.size > 1]


def counted_config(config: Config) -> Config:
    """Returns a configuration whose program can be counted: one device, plain attention."""
    keys = flatten(config) | _COUNTED_AS
    if config.model.scan_unsupported_reason is not None or config.model.block.share_layer_params:
        keys["scan_layers"] = config.model.memory.scan_layers
    return unflatten(keys).model_copy(update={"mesh": MeshConfig()})


@cached
def trace_program(config: Config) -> TracedProgram:
    """Traces what a configuration runs, on one CPU device; compiles nothing.

    Raises:
      UserError: The configuration does not fit one device.
    """
    config = counted_config(config)
    sharding = make_sharding_plan(config.mesh, jax.devices("cpu")[:1], config.model.pipeline)
    setup = setup_train(config, sharding)
    batch = sharding.abstract_batch(largest_batch(config, plan_batches(config, sharding)))
    train_step = sharding.trace_step(
        setup.step, setup.abstract_state, batch, setup.compiler_options, setup.abstract_frozen
    )
    losses = sharding.jit(functools.partial(target_losses, setup.model))
    return TracedProgram(
        setup=setup,
        batch=batch,
        train_step=train_step,
        evaluation=losses.trace(setup.model.abstract, batch),
        operations=count_operations(train_step.jaxpr.jaxpr),
    )


def count_cost(config: Config, num_devices: int = 1) -> CountedCost:
    """Returns the cost of a configuration; compiles its train step for one CPU device.

    Args:
      config: Of a run.
      num_devices: That the run has: a batch is that many times as large.
    """
    program = trace_program(config)
    state = program.setup.abstract_state
    stored = jax.tree.leaves((state.params, program.setup.abstract_frozen))
    stored += program.constants
    tokens = math.prod(program.batch.tokens_BT.shape)
    tokens *= config.batch.gradient_accumulation_steps
    operations = program.operations
    analysis = program.train_step.lower().compile().cost_analysis() or {}
    return CountedCost(
        parameters=sum(math.prod(array.shape) for array in stored),
        stored_bytes=_num_bytes(stored),
        optimizer_bytes=_num_bytes(jax.tree.leaves(state.opt_state)),
        tokens_per_step=tokens * num_devices,
        matmul_flops_per_token=operations.matmul_flops / tokens,
        flops_per_token=operations.flops / tokens,
        step_bytes=float(analysis.get("bytes accessed", 0.0)),
    )


def _num_bytes(arrays: Sequence[PyTree]) -> int:
    """Returns the bytes of arrays or of their shapes."""
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def cost_reasons(
    cost: CountedCost, baseline: CountedCost, match: Sequence[str], tolerance: float
) -> list[str]:
    """Returns a reason for each matched cost that is above the baseline's.

    Args:
      cost: Of the candidate.
      baseline: Of the baseline.
      match: Kinds of MATCHES.
      tolerance: Largest excess, relative to the baseline.

    Raises:
      UserError: There is no such kind of cost.
    """
    reasons = []
    for kind in match:
        if kind not in MATCHES:
            raise UserError(f"match={kind}: unknown cost; write one of {', '.join(MATCHES)}")
        amount = cost.amount(kind)
        allowed = baseline.amount(kind)
        if amount > allowed * (1 + tolerance):
            excess = f"{amount / allowed - 1:+.1%}" if allowed else "more"
            reasons.append(
                f"{_DESCRIPTIONS[kind]}: {_formatted(kind, amount)}, the baseline has "
                f"{_formatted(kind, allowed)} ({excess}); match={kind} allows {tolerance:.1%}"
            )
    return reasons


_DESCRIPTIONS = {
    "parameters": "parameters, tables and constants included",
    "stored_bytes": "stored bytes, tables and constants included",
    "flops": "FLOPs per token of the traced train step",
    "bytes": "bytes moved by a compiled train step",
    "tokens": "tokens per step",
}


def _formatted(kind: str, amount: float) -> str:
    """Returns an amount with its unit."""
    if kind in ("bytes", "stored_bytes"):
        return byte_count(round(amount))
    return f"{amount:,.0f}"


def misreported_flops(config: Config) -> str | None:
    """Returns a reason if matrix products are traced that the formulas of the parts leave out.

    Args:
      config: Of a run; without rematerialization, which formulas do not count.
    """
    keys = flatten(counted_config(config)) | {"remat_policy": "none"}
    config = unflatten(keys).model_copy(update={"mesh": MeshConfig()})
    sharding = make_sharding_plan(config.mesh, jax.devices("cpu")[:1])
    setup = setup_train(config, sharding)
    model = setup.model
    batch = sharding.abstract_batch(largest_batch(config, plan_batches(config, sharding)))
    frozen = setup.abstract_frozen

    def loss(params: Params, batch: Batch, frozen: PyTree) -> jax.Array:
        key = jax.random.key(0) if config.model.is_random else None
        sums = loss_sums(
            model.merge(params), batch, model.config.objective, key, training=True, frozen=frozen
        )
        return sums.minimized(loss_totals(model, batch))

    traced = sharding.jit(jax.value_and_grad(loss)).trace(model.abstract, batch, frozen)
    num_tokens = math.prod(batch.tokens_BT.shape)
    actual = count_operations(traced.jaxpr.jaxpr).matmul_flops / num_tokens
    claimed = _claimed_flops(model, batch)
    if claimed is None or actual <= claimed * (1 + _MISREPORTED):
        return None
    return (
        f"FLOPs are misreported: {actual:,.0f} per token in the traced program, {claimed:,.0f} by "
        "the formulas of its parts; flops() counts the products besides those of weights"
    )


def _claimed_flops(model: Model, batch: Batch) -> float | None:
    """Returns the training FLOPs per token that the parts of a model declare."""
    return count_flops(model, batch.tokens_BT.shape[1]).executed_per_token
