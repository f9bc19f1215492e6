"""MemoryEstimate of a train step on one device, by cause.

Parameters, optimizer state and gradients are exact, from the abstract state and shardings.
Activations come from tracing loss and gradients at one device's shapes, without compiling them. An
array lives from the node that writes it to the last one that reads it, through fused operations.
The order is the program's or a greedy one that frees most first, whichever needs less. Arrays of a
loop's body are live while the loop runs.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.model_sections import ModelConfig
from MaxText.cost.abstract_step import FakeDevice, Program, cached, cached_model
from MaxText.cost.jaxpr_graph import Node, SizeOf, Traced, Value, plain_size, tiled_size, traced
from MaxText.layers.batch import Batch, batch_shapes
from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import Rules, axis_rules, split_axes
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.training.model_objective import abstract_frozen_params, frozen_models
from MaxText.training.objective import loss_sums, loss_totals
from MaxText.value_types import PyTree, TreeDef


class LiveBuffer(NamedTuple):
    """A live array at the peak."""

    size: float  # bytes
    shape: tuple[int, ...]  # on one device
    writer: str  # name of a primitive


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Memory of a program besides its arguments."""

    outside: float  # bytes at the peak outside of loop bodies
    in_loops: float  # bytes of the running loop's body at the peak; 0 without one
    between: float  # bytes live from the first loop to the last, if the peak is there
    # other live arrays at the peak, largest first
    live: tuple[LiveBuffer, ...]
    in_body: tuple[LiveBuffer, ...] = ()  # live arrays inside that body

    @property
    def size(self) -> float:
        """Bytes at the peak."""
        return self.outside + self.in_loops + self.between


_NOTHING = PeakMemory(0.0, 0.0, 0.0, ())


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: float
    # with the guard's state and the step counter, without what is offloaded to the host
    optimizer: float
    fetched: float  # offloaded optimizer state, on the device during the update
    frozen: float  # parameters of the models that the objective does not train
    batch: float  # ids and weights of all microbatches
    gradients: float  # plus their sum if there are several microbatches
    # Loss and gradients of a microbatch, besides their arguments. `between` are scanned weights in
    # the compute dtype, if the compiler converts them before the first loop and keeps them for
    # backward.
    peak: PeakMemory
    update: float  # temporaries of the optimizer update besides gradients

    @property
    def state(self) -> float:
        """Arguments of the step: parameters, optimizer state, frozen models and batch."""
        return self.parameters + self.optimizer + self.frozen + self.batch

    @property
    def total(self) -> float:
        """Bytes at the peak of the step."""
        return self.state + self.temporaries

    @property
    def temporaries(self) -> float:
        """Bytes besides the arguments, at the peak of the passes or of the update."""
        sums = self.gradients - self.parameters  # of several microbatches
        passes = self.peak.size + sums
        return max(passes, self.gradients + self.fetched + self.update)


def estimate_memory(program: Program) -> MemoryEstimate:
    """Estimates the memory of a train step on one device, by cause."""
    size_of = _size_of(program.platform)
    _, state = program.optimizer_and_state
    parameters = _bytes(state.params, size_of)
    in_host = program.config.mesh.optimizer_memory_host_offload
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 0 and in_host]
    fetched = _bytes(moments, size_of)
    gradient_bytes = [None, *(_bytes(leaf, size_of) for leaf in jax.tree.leaves(state.params))]
    return MemoryEstimate(
        parameters=parameters,
        optimizer=_bytes(state, size_of) - parameters - fetched,
        fetched=fetched,
        frozen=_frozen_bytes(program, size_of),
        batch=12.0 * program.local_batch_size * program.num_microbatches * program.length,
        gradients=parameters * (2 if program.num_microbatches > 1 else 1),  # and their sum
        peak=peak_memory(
            trace(program, all_stages=True), gradient_bytes, _converted_bytes(program)
        ),
        update=_update_bytes(program),
    )


def min_memory(program: Program) -> float:
    """Returns a lower bound without tracing: state, and gradients or inputs."""
    _, state = program.optimizer_and_state
    size_of = _size_of(program.platform)
    params = _bytes(state.params, size_of)
    state_bytes = (
        params if program.config.mesh.optimizer_memory_host_offload else _bytes(state, size_of)
    )
    stages = program.sharding.mesh.shape["stage"]
    layers = program.config.model.shape.dimensions.num_layers // stages
    state_bytes += _frozen_bytes(program, size_of)
    return state_bytes + max(params, layers * program.state_bytes / program.num_hidden_parts)


def _frozen_bytes(program: Program, size_of: SizeOf) -> float:
    """Returns the bytes of the models that the objective does not train, on one device."""
    return _bytes(abstract_frozen_params(program.model.config, program.sharding), size_of)


def _size_of(platform: str) -> SizeOf:
    """Returns the function from an array's shape to its bytes on a platform."""
    return tiled_size if platform == "tpu" else plain_size


def _bytes(tree: PyTree, size_of: SizeOf) -> float:
    return sum(
        size_of(leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype).itemsize)
        for leaf in jax.tree.leaves(tree)
    )


def trace(program: Program, all_stages: bool = False) -> Traced:
    """Traces loss and gradients of one microbatch at one device's shapes.

    Of a pipeline, the layers of a stage read all sequences at once; with `all_stages`, stages run
    turn by turn, and a device has a share of every array.
    """
    model = program.local_model
    size = program.local_shape
    num_stages = program.sharding.mesh.shape["stage"] if all_stages else 1
    if num_stages > 1:
        model = program.model_of_all_stages
        size = program.local_batch_size, program.local_tokens // program.local_batch_size
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model.abstract)]
    names = ("/".join(entry.key for entry in path) for path in paths)
    return _trace(
        model.config,
        size=size,
        platform=program.platform,
        rules=program.sharding.rules,
        weights=tuple(_gathered(program, name) for name in names),
        num_hidden_parts=program.num_hidden_parts,
        num_stages=num_stages,
        assumes_cudnn=program.assumes_cudnn,
    )


@cached
def _trace(
    config: ModelConfig,
    *,
    size: tuple[int, int],
    platform: str,
    rules: Rules,
    weights: tuple[float, ...],
    num_hidden_parts: int,
    num_stages: int,
    assumes_cudnn: bool,
) -> Traced:
    """Caches `trace` for equal local shapes.

    Args:
        config: of the model at the sizes of one device.
        size: sequences and tokens of a microbatch on one device.
        platform: JAX's name.
        rules: logical axis rules.
        weights: for each parameter, the share of it that a device gathers.
        num_hidden_parts: parts of a hidden state split between layers.
        num_stages: pipeline stages that run turn by turn; 1 without.
        assumes_cudnn: whether attention scores are never written.
    """
    model = cached_model(config)
    objective = config.objective

    def loss(params: Params, batch: Batch, frozen: dict[str, Params]) -> jax.Array:
        key = jax.random.key(0) if config.is_random else None
        sums = loss_sums(model.merge(params), batch, objective, key, training=True, frozen=frozen)
        return sums.minimized(loss_totals(model, batch))

    hidden = size[1], config.shape.dimensions.emb_dim  # [..., T, D]

    def size_of(shape: Sequence[int], width: int) -> float:
        is_hidden = len(shape) > 2 and tuple(shape[-2:]) == hidden
        parts = num_stages * (num_hidden_parts if is_hidden else 1)
        return _size_of(platform)(shape, width) / parts

    devices = np.array([FakeDevice(number, platform, platform) for number in range(num_stages)])
    sizes = [num_stages if axis == "stage" else 1 for axis in MESH_AXES]
    batch = batch_shapes(*size, with_documents=False)
    with axis_rules(Mesh(devices.reshape(sizes), MESH_AXES), rules):
        # At their whole sizes, also if the mesh divides their heads: an upper bound.
        frozen = {name: x.model.abstract for name, x in frozen_models(config).items()}
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(model.abstract, batch, frozen)
    program = traced(closed.jaxpr, weights=weights, size_of=size_of)
    if assumes_cudnn:
        # Traced in blocks, because cuDNN's kernel cannot be traced without a GPU.
        program.drop_scores()
    return program


def _gathered(program: Program, name: str) -> float:
    """Returns the gathered share of a parameter; of experts, its own."""
    axes = program.model.parameters[name].logical_axes
    if "exp" not in axes:
        return 1.0
    sharding = program.sharding.named_sharding(axes, program.model.parameters[name].shape)
    split = split_axes(sharding, axes.index("exp"))
    return 1 / math.prod(sharding.mesh.shape[axis] for axis in split)


def _converted_bytes(program: Program) -> float:
    """Returns the bytes of scanned weights that are cast before the first loop."""
    config = program.config.model
    parameters = program.model.parameters
    width = np.dtype(config.numerics.dtype).itemsize
    if config.memory.scan_layers is not True:
        return 0.0
    shardings = program.sharding.parameter_shardings(parameters)
    in_loop = program.platform == "tpu" and program.sharding.mesh.shape["stage"] == 1
    num_bytes = 0.0
    for name, spec in parameters.items():
        is_matrix_of_layers = spec.owner == "layers" and spec.num_input_dims
        if not is_matrix_of_layers or width >= spec.dtype.itemsize:
            continue
        if in_loop and len(spec.shape) <= 3:
            continue  # cast inside of the loop by scanned_layers.keep_casts_in_loop
        num_bytes += math.prod(shardings[name].shard_shape(spec.shape)) * float(width)
    return num_bytes


def _update_bytes(program: Program) -> float:
    """Returns the bytes of temporaries of the optimizer update on one device."""
    optimizer, state = program.optimizer_and_state
    sharding = program.sharding
    # Moments sharded like parameters: shard_optimizer_over_data also splits the temporaries.
    alike = ShardingPlan(sharding.mesh, sharding.rules).state_shardings(
        state, program.model.parameters
    )
    param_shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 0]
    leaves, structure = jax.tree.flatten((state.params, state.opt_state))
    if any(leaf.shape not in param_shapes for leaf in moments):
        # Statistics of whole arrays do not fit shards: a device has its share of the temporaries.
        whole = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        share = _bytes(state.params, plain_size) / sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params)
        )
        return share * _bytes_of_update(optimizer, structure, whole, program.platform)
    shardings = jax.tree.leaves((alike.params, alike.opt_state))
    shards = tuple(
        (named.shard_shape(leaf.shape), leaf.dtype)
        for leaf, named in zip(leaves, shardings, strict=True)
    )
    return _bytes_of_update(optimizer, structure, shards, program.platform)


@cached
def _bytes_of_update(
    optimizer: optax.GradientTransformation,
    structure: TreeDef,
    shards: tuple[tuple[tuple[int, ...], Any], ...],
    platform: str,
) -> float:
    arrays = [jax.ShapeDtypeStruct(*shard) for shard in shards]
    params, moments = jax.tree.unflatten(structure, arrays)
    closed = jax.make_jaxpr(optimizer.update)(params, moments, params)
    return peak_memory(traced(closed.jaxpr, size_of=_size_of(platform))).size


def peak_memory(
    program: Traced, result_bytes: Sequence[float | None] = (), between: float = 0.0
) -> PeakMemory:
    """Returns the memory needed by a program besides its arguments.

    Args:
      program: A step, or a loop's body.
      result_bytes: Bytes of each result (gradient) that a device keeps if sharded; None for all.
        Empty for a loop body, whose results leave at once.
      between: Bytes live from before the first loop to the end of the last.
    """
    # Nodes, with the needs of their largest body.
    steps = {
        node: max(map(peak_memory, node.bodies), key=lambda need: need.size, default=_NOTHING)
        for node in program.nodes
        if node.writes
    }
    sharded_bytes: dict[Value, float] = {}
    results = {root for value in program.results for root in value.roots} if result_bytes else set()
    for value, share in zip(program.results, result_bytes, strict=False):
        for root in value.roots:
            if share is not None and value.size:
                sharded_bytes[root] = root.size * min(share / value.size, 1.0)
    orders = (steps, {node: steps[node] for node in _greedy(steps, sharded_bytes, results)})
    return min(
        (_peak(order, sharded_bytes, results, between) for order in orders),
        key=lambda need: need.size,
    )


def _peak(
    steps: Mapping[Node, PeakMemory],
    sharded_bytes: Mapping[Value, float],
    results: Set[Value],
    between: float,
) -> PeakMemory:
    """Returns the peak if nodes run in the order of `steps`.

    Args:
        steps: node -> the needs of its largest body.
        sharded_bytes: bytes of results that are sharded once they are written.
        results: arrays that live to the end.
        between: bytes live from before the first loop to the end of the last.
    """
    last = {value: number for number, node in enumerate(steps) for value in node.reads}
    loops = [number for number, node in enumerate(steps) if node.bodies]
    living: dict[Value, LiveBuffer] = {}
    peak = _NOTHING
    for number, (node, body) in enumerate(steps.items()):
        for value in node.writes:
            # The stacked results of a loop are sharded from the beginning.
            size = sharded_bytes.get(value, value.size) if node.bodies else value.size
            living[value] = LiveBuffer(size, value.shape, node.name)
        outside = sum(array.size for array in living.values())
        between_bytes = between if loops and loops[0] <= number <= loops[-1] else 0.0
        if outside + body.size + between_bytes > peak.size:
            live = tuple(sorted(living.values(), key=lambda array: -array.size))
            peak = PeakMemory(outside, body.size, between_bytes, live, body.live)
        for value in node.writes:
            living[value] = living[value]._replace(size=sharded_bytes.get(value, value.size))
        for value in [*node.reads, *node.writes]:
            if value in living and value not in results and last.get(value, number) <= number:
                del living[value]
    return peak


def _greedy(
    nodes: Collection[Node], sharded_bytes: Mapping[Value, float], results: Set[Value]
) -> Iterator[Node]:
    """Yields nodes; the runnable one freeing most memory comes next."""
    readers = collections.Counter(value for node in nodes for value in node.reads)
    available: set[Value] = set()
    written = {value for node in nodes for value in node.writes}

    def gain(node: Node) -> float:
        last = (value for value in node.reads if value in available and readers[value] == 1)
        freed = sum(sharded_bytes.get(value, value.size) for value in last if value not in results)
        return freed - sum(sharded_bytes.get(value, value.size) for value in node.writes)

    waiting = list(nodes)
    while waiting:
        best = max(
            (node for node in waiting if written.isdisjoint(node.reads - available)), key=gain
        )
        yield best
        waiting.remove(best)
        available.update(best.writes)
        readers.subtract(best.reads)
