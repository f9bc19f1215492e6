"""Bytes of a train step on one device, by cause.

Parameters, optimizer state and gradients are those of the abstract state under the mesh's
shardings, exactly. Activations come from the traced program (liveness.py) of loss and gradients,
at the shapes that one device computes with.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from MaxText.configuration.axis_rules import MESH_AXES
from MaxText.parallelism.constraints import axis_rules
from MaxText.parallelism.mesh import Layout
from MaxText.planning.liveness import Need, memory_need
from MaxText.planning.program import Program
from MaxText.planning.traced import SizeOf, Traced, plain_size, tiled_size, traced
from MaxText.training.objective import loss_sums, num_tokens


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: in weight_dtype.
      optimizer: the optimizer's state, with the guard's and the step counter; of what lies in the
        host's memory, nothing.
      fetched: of the optimizer's state, what is there only while the update is made.
      batch: ids and weights of all microbatches.
      gradients: one for every parameter; of several microbatches their sum as well.
      need: what loss and gradients of a microbatch need besides what they are given, gradients
        included.
      converted: weights of scanned layers in the format of products: the compiler converts all of
        them before the first loop, and that loop hands them on to the backward pass.
      update: what the optimizer's update works with besides gradients.
    """

    parameters: float
    optimizer: float
    fetched: float
    batch: float
    gradients: float
    need: Need
    converted: float
    update: float

    @property
    def state(self) -> float:
        """What the step is given: parameters, optimizer state and batch."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> float:
        """What the step needs in all."""
        return self.state + self.temporaries

    @property
    def temporaries(self) -> float:
        """What the step needs besides what it is given."""
        sums = self.gradients - self.parameters  # of several microbatches
        passes = self.need.size + self.converted + sums
        return max(passes, self.gradients + self.fetched + self.update)


def memory_of(program: Program) -> Memory:
    """The memory of a program on each of its devices."""
    size_of = size_of_platform(program)
    state = program.abstract_state
    gradients = parameters = _bytes(state.params, size_of)
    if program.num_microbatches > 1:
        gradients *= 2
    in_host = program.config.mesh.optimizer_memory_host_offload
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 0 and in_host]
    fetched = _bytes(moments, size_of)
    kept = [None, *(_bytes(leaf, size_of) for leaf in jax.tree.leaves(state.params))]
    return Memory(
        parameters=parameters,
        optimizer=_bytes(state, size_of) - parameters - fetched,
        fetched=fetched,
        batch=12.0 * program.local_rows * program.num_microbatches * program.length,
        gradients=gradients,
        need=memory_need(trace(program), kept),
        converted=_converted(program),
        update=_update_need(program),
    )


def size_of_platform(program: Program) -> SizeOf:
    """How arrays are laid out on the program's devices."""
    return tiled_size if program.platform == "tpu" else plain_size


def _bytes(tree: Any, size_of: SizeOf) -> float:
    """Of all arrays of a tree on one device."""
    return sum(
        size_of(leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype).itemsize)
        for leaf in jax.tree.leaves(tree)
    )


@functools.lru_cache(maxsize=8)
def trace(program: Program) -> Traced:
    """Loss and gradients of one microbatch, at the shapes of one device."""
    model, objective = program.local_model, program.local_model.section.objective

    def loss(params: Any, batch: Any) -> jax.Array:
        key = jax.random.key(0) if model.section.is_random else None
        sums = loss_sums(model.merge(params), batch, objective, key, training=True)
        totals = jnp.maximum(jnp.sum(batch.weights_BT), 1.0), num_tokens(batch)
        return sum(sums.means(*totals).values())  # type: ignore[return-value]

    device = program.layout.mesh.devices.flat[0]
    alone = Mesh(np.array([device]).reshape((1,) * len(MESH_AXES)), MESH_AXES)
    with axis_rules(alone, program.layout.rules):
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(model.abstract, program.local_batch())
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(model.abstract)[0]]
    names = ("/".join(entry.key for entry in path) for path in paths)
    weights = [_gathered(program, name) for name in names]
    weights += [0.0] * (len(closed.jaxpr.invars) - len(weights))
    return traced(closed.jaxpr, weights=weights, size_of=size_of_platform(program))


def _gathered(program: Program, name: str) -> float:
    """The share of a parameter that a device gathers: of experts, those that lie on it."""
    axes = program.model.parameters[name].logical_axes
    if "exp" not in axes:
        return 1.0
    spec = program.layout.parameter_shardings(program.model.parameters)[name].spec
    found = spec[axes.index("exp")] or ()
    split = (found,) if isinstance(found, str) else found
    return 1 / math.prod(program.layout.mesh.shape[axis] for axis in split)


def _converted(program: Program) -> float:
    """Bytes of the layers' matrices in the format of products, as a device holds them."""
    section, parameters = program.config.model, program.model.parameters
    width = np.dtype(section.numerics.dtype).itemsize
    if section.memory.scan_layers is not True:
        return 0.0
    shardings = program.layout.parameter_shardings(parameters)
    return sum(
        math.prod(shardings[name].shard_shape(info.shape)) * float(width)
        for name, info in parameters.items()
        if name.startswith("layers/") and info.num_in_dims and width < info.dtype.itemsize
    )


def _update_need(program: Program) -> float:
    """Bytes that the optimizer's update works with besides gradients."""
    state, layout = program.abstract_state, program.layout
    # Moments like their parameters: shard_optimizer_over_data cuts what is worked on, too.
    alike = Layout(layout.mesh, layout.rules).state_shardings(state, program.model.parameters)
    shards = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype),
        state,
        alike,
    )
    params, moments = shards.params, shards.opt_state
    closed = jax.make_jaxpr(program.optimizer.update)(params, moments, params)
    found = traced(
        closed.jaxpr, weights=[0.0] * len(closed.jaxpr.invars), size_of=size_of_platform(program)
    )
    return memory_need(found).size
