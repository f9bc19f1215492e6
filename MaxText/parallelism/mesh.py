"""Mesh, and shardings of parameters, optimizer state and batches."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.model_sections import PipelineConfig
from MaxText.config.training_sections import BatchConfig, MeshConfig
from MaxText.errors import UserError
from MaxText.parallelism.compiler_options import (
    CompilerOptions,
    initialization_options,
    without_garbage_collection,
)
from MaxText.parallelism.device_mesh import create_device_mesh
from MaxText.parallelism.logical_sharding import (
    ParamSpec,
    Rules,
    axis_rules,
    logical_to_mesh_axes,
    split_axes,
)
from MaxText.value_types import PyTree, Tree

HOST_MEMORY = "pinned_host"  # kind of host memory that devices can fetch from
_DEFAULT_PIPELINE = PipelineConfig()
WEIGHT_AXES = ("fsdp", "fsdp_transpose", "context", "expert", "tensor")  # others replicate


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of the configured axis sizes; raises UserError if they misfit."""
    # Auto axes: jax.make_mesh would give Explicit ones, under which plain products raise.
    return Mesh(create_device_mesh(config, devices), MESH_AXES)


@dataclasses.dataclass(eq=False)
class ShardingPlan:
    """A mesh with the logical axis rules of the configuration."""

    mesh: Mesh
    rules: Rules
    optimizer_state_axis: str = ""  # mesh axis that also splits the optimizer state, if any
    pipeline: PipelineConfig = _DEFAULT_PIPELINE
    offloads_optimizer: bool = False  # whether the optimizer state is in host memory

    def __post_init__(self):
        """Derives the mesh axes of sequences and tokens: those of the first rule of each."""
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        first_rules = dict(reversed(self.rules))
        self.batch_axes = tuple(first_rules["activation_batch"])  # mesh axes for sequences
        self.length_axes = tuple(first_rules["activation_length"])  # mesh axes for their tokens

    @property
    def mesh_sizes(self) -> str:
        """Axes with several devices, as in "data 2, fsdp 4"."""
        sizes = [f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1]
        return ", ".join(sizes) or "one device"

    @property
    def num_length_parts(self) -> int:
        """Number of shards of a sequence's tokens."""
        return math.prod(self.mesh.shape[axis] for axis in self.length_axes)

    @property
    def num_batch_parts(self) -> int:
        """Number of shards of a batch's sequences."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def batch_divisor(self) -> int:
        """Divisor of the batch size, from shards, stages and microbatches."""
        num_stages = self.mesh.shape["stage"]
        return self.num_batch_parts * math.lcm(num_stages, self.pipeline.microbatches(num_stages))

    def named_sharding(self, names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of an array by the logical names of its axes."""
        return NamedSharding(self.mesh, logical_to_mesh_axes(names, shape, self.rules, self.mesh))

    def parameter_shardings(self, parameters: Mapping[str, ParamSpec]) -> dict[str, NamedSharding]:
        """Returns the sharding of each parameter, by its name."""
        return {
            name: self.named_sharding(spec.logical_axes, spec.shape)
            for name, spec in parameters.items()
        }

    def describe(self, parameters: Mapping[str, ParamSpec]) -> Callable[[str], str] | None:
        """Returns parameter name -> its mesh axes as text; None on one device."""
        if self.mesh.size == 1:
            return None
        shardings = self.parameter_shardings(parameters)

        def mesh_axes(name: str) -> str:
            """Returns the mesh axes of a parameter's dimensions, as in "fsdp,-,tensor"."""
            sharding = shardings[name]
            axes = [split_axes(sharding, dim) for dim in range(len(sharding.spec))]
            return ",".join("+".join(names) or "-" for names in axes)

        return mesh_axes

    def state_shardings(
        self, abstract_state: PyTree, parameters: Mapping[str, ParamSpec]
    ) -> PyTree:
        """Returns a tree like `abstract_state`, moments sharded as parameters.

        Moments with dimensions of size 1 in place of a parameter's keep the others' mesh axes, and
        square statistics [N, I, I] of matrices spread over the mesh axes of the parameter.
        Everything else (counters, factored moments) is small and replicated. `optimizer_state_axis`
        splits the optimizer state further: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).
        `offloads_optimizer` places it in host memory, from where the train step fetches it.
        """
        shardings = self.parameter_shardings(parameters)

        def sharding_of(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            """Returns the sharding of one leaf, by the path of its parameter."""
            names = [str(getattr(entry, "key", "")) for entry in path]
            leaf_sharding = self.replicated
            # A moment's path ends with the name of its parameter.
            for start in range(len(names)):
                name = "/".join(names[start:])
                if name in parameters:
                    leaf_sharding = _moment_sharding(
                        leaf.shape, parameters[name].shape, shardings[name]
                    )
                    break
            if not any(getattr(entry, "name", "") == "opt_state" for entry in path):
                return leaf_sharding
            leaf_sharding = self._shard_over_data(leaf_sharding, leaf.shape)
            offloads = self.offloads_optimizer and leaf.ndim > 0  # not counters
            return leaf_sharding.with_memory_kind(HOST_MEMORY) if offloads else leaf_sharding

        return jax.tree_util.tree_map_with_path(sharding_of, abstract_state)

    def _shard_over_data(self, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
        """Splits the longest divisible dimension over the axis, unsplit first."""
        axis = self.optimizer_state_axis
        axes = [split_axes(sharding, dim) for dim in range(len(shape))]
        if not axis or self.mesh.shape[axis] == 1 or any(axis in dim_axes for dim_axes in axes):
            return sharding
        parts = [math.prod(self.mesh.shape[name] for name in dim_axes) for dim_axes in axes]
        num_shards = self.mesh.shape[axis]
        divisible = [dim for dim, size in enumerate(shape) if size % (parts[dim] * num_shards) == 0]
        if not divisible:
            return sharding
        chosen = max(divisible, key=lambda dim: (parts[dim] == 1, shape[dim]))
        num_unnamed = len(shape) - len(sharding.spec)
        spec: list[Any] = [*sharding.spec, *[None] * num_unnamed]
        spec[chosen] = (*axes[chosen], axis) if axes[chosen] else axis
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def batch_sharding(self, batch_size: int) -> NamedSharding:
        """Returns the sharding of a batch: sequences are split, tokens are not."""
        return self.named_sharding(("activation_batch", None), (batch_size, 1))

    def batch_slice(self) -> tuple[int, int]:
        """Returns (part, parts): this process reads one part of each batch.

        Processes that hold the same sequences (tensor parallelism across machines) read the same.
        """
        shape = (self.num_batch_parts, 1)
        sequences_by_process = {}
        for device, (rows, _) in self.batch_sharding(shape[0]).devices_indices_map(shape).items():
            sequences_by_process.setdefault(device.process_index, set()).add(rows.start or 0)
        return process_batch_slice(sequences_by_process, jax.process_index())

    def to_global_batch(self, batch: Tree, batch_size: int) -> Tree:
        """Returns global arrays from this process's NumPy part of a batch."""
        make = functools.partial(
            jax.make_array_from_process_local_data, self.batch_sharding(batch_size)
        )
        return jax.tree.map(lambda x: make(x, (batch_size, *x.shape[1:])), batch)

    def abstract_batch(self, shapes: Tree) -> Tree:
        """Returns the shapes of a global batch with their shardings."""
        return jax.tree.map(lambda x: x.update(sharding=self.batch_sharding(x.shape[0])), shapes)

    def abstract_state(
        self, initialize: Callable[[jax.Array], Tree], parameters: Mapping[str, ParamSpec]
    ) -> Tree:
        """Returns the shapes of the state that `initialize` returns, with their shardings."""
        return self.with_shardings(jax.eval_shape(initialize, jax.random.key(0)), parameters)

    def with_shardings(self, shapes: Tree, parameters: Mapping[str, ParamSpec]) -> Tree:
        """Returns shapes of a state with the shardings of `state_shardings`."""
        shardings = self.state_shardings(shapes, parameters)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)

    def init_state(
        self, initialize: Callable[[jax.Array], Tree], abstract_state: Tree, seed: int
    ) -> Tree:
        """Returns a fresh state; each device draws its own shard."""
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
        options = initialization_options(self.mesh.devices.flat[0].platform)
        draw = jax.jit(initialize, out_shardings=shardings, compiler_options=options)
        return draw(jax.random.key(seed))

    def jit(self, function: Callable, **options: Any) -> jax.stages.Wrapped:
        """Returns jax.jit of `function`, traced with the logical axis rules."""

        @functools.wraps(function)
        def traced(*arguments):
            """Calls the function with the rules set, which holds while it is traced."""
            with axis_rules(self.mesh, self.rules):
                return function(*arguments)

        return jax.jit(traced, **options)

    def compile_step(
        self, train_step: Callable, *arguments: PyTree
    ) -> tuple[jax.stages.Compiled, float]:
        """Compiles the step of `lower_step`; returns the seconds, too."""
        began = time.perf_counter()
        return self.lower_step(train_step, *arguments).compile(), time.perf_counter() - began

    def lower_step(
        self,
        train_step: Callable,
        abstract_state: PyTree,
        abstract_batch: PyTree,
        compiler_options: CompilerOptions | None = None,
        abstract_frozen: Mapping[str, Any] | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the train step, see `trace_step`."""
        with without_garbage_collection():
            return self.trace_step(
                train_step, abstract_state, abstract_batch, compiler_options, abstract_frozen
            ).lower()

    def trace_step(
        self,
        train_step: Callable,
        abstract_state: PyTree,
        abstract_batch: PyTree,
        compiler_options: CompilerOptions | None = None,
        abstract_frozen: Mapping[str, Any] | None = None,
    ) -> jax.stages.Traced:
        """Traces the train step, with its state donated.

        Args:
          train_step: (state, batch) -> (state, metrics).
          abstract_state: Shapes and shardings.
          abstract_batch: Shapes and shardings.
          compiler_options: Of XLA.
          abstract_frozen: Shapes and shardings of the parameters that the objective reads and does
            not train: a third argument of the step, if there are any.
        """
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state), self.replicated
        options = {"donate_argnums": 0, "compiler_options": compiler_options or None}
        jitted = self.jit(train_step, out_shardings=shardings, **options)
        frozen = (abstract_frozen,) if abstract_frozen else ()
        with without_garbage_collection():
            return jitted.trace(abstract_state, abstract_batch, *frozen)


def _moment_sharding(
    shape: Sequence[int], param_shape: Sequence[int], param_sharding: NamedSharding
) -> NamedSharding:
    """Returns the sharding of a moment of a parameter (`ShardingPlan.state_shardings`)."""
    if tuple(shape) == tuple(param_shape):
        return param_sharding
    mesh = param_sharding.mesh
    axes = [split_axes(param_sharding, dim) for dim in range(len(param_shape))]
    spec: list[tuple[str, ...]]
    if len(shape) == len(param_shape) and all(
        size in (1, param_size) for size, param_size in zip(shape, param_shape, strict=True)
    ):
        spec = [dim_axes if size > 1 else () for size, dim_axes in zip(shape, axes, strict=True)]
    elif len(shape) == 3 and shape[1] == shape[2]:
        spec = [()] * len(shape)
        for axis in (axis for dim_axes in axes for axis in dim_axes):
            for dim, size in enumerate(shape):
                joined = (*spec[dim], axis)
                if size % math.prod(mesh.shape[name] for name in joined) == 0:
                    spec[dim] = joined
                    break
    else:
        spec = []
    return NamedSharding(mesh, PartitionSpec(*(dim_axes or None for dim_axes in spec)))


def process_batch_slice(
    sequences_by_process: Mapping[int, set[int]], process: int
) -> tuple[int, int]:
    """Returns (part, parts) of a batch's sequences for a process.

        `sequences_by_process` has the sequences that each process holds. Must agree with
    jax.make_array_from_process_local_data. If processes hold overlapping sets, returns (0, 1): each
    reads all sequences and places what it holds.
    """
    distinct = sorted({tuple(sorted(parts)) for parts in sequences_by_process.values()})
    are_disjoint = sum(map(len, distinct)) == len(set().union(*distinct))
    if not are_disjoint or len({len(parts) for parts in distinct}) > 1:
        return 0, 1
    return distinct.index(tuple(sorted(sequences_by_process[process]))), len(distinct)


def make_sharding_plan(
    config: MeshConfig, devices: Sequence[Any], pipeline: PipelineConfig = _DEFAULT_PIPELINE
) -> ShardingPlan:
    """Returns the mesh of the devices with the configuration's rules.

    Args:
      config: Of the mesh.
      devices: Of all processes; they may be those of another machine.
      pipeline: Number of microbatches, which the batch size has to be divisible by.

    Raises:
      UserError: The devices do not match the mesh sizes.
    """
    mesh = make_mesh(config, devices)
    axis = "data" if config.shard_optimizer_over_data else ""
    offloads = config.optimizer_memory_host_offload
    return ShardingPlan(mesh, config.logical_axis_rules, axis, pipeline, offloads)


def global_batch_size(config: BatchConfig, sharding: ShardingPlan, per_device: float) -> int:
    """Returns the number of sequences per step, of all devices and microbatches.

    Args:
      config: gradient_accumulation_steps.
      sharding: Of the mesh.
      per_device: Sequences per device and microbatch; may be a fraction.

    Raises:
      UserError: The mesh does not divide the batch.
    """
    batch_size = _batch_size(sharding, per_device, "per_device_batch_size")
    return batch_size * config.gradient_accumulation_steps


def microbatch_size(config: BatchConfig, sharding: ShardingPlan, per_device: float = 0.0) -> int:
    """Returns the number of sequences per microbatch, of all devices.

    Args:
      config: per_device_batch_size.
      sharding: Of the mesh.
      per_device: eval_per_device_batch_size; 0 for that of training.

    Raises:
      UserError: The mesh does not divide the batch.
    """
    key = "eval_per_device_batch_size" if per_device else "per_device_batch_size"
    return _batch_size(sharding, per_device or config.per_device_batch_size, key)


def _batch_size(sharding: ShardingPlan, per_device: float, key: str) -> int:
    """Returns per_device * devices as a number of sequences.

    Raises:
      UserError: It is no multiple of `ShardingPlan.batch_divisor`.
    """
    num_devices = sharding.mesh.size
    multiple = sharding.batch_divisor
    batch_size = per_device * num_devices
    if batch_size % multiple:
        better = max(multiple, round(batch_size / multiple) * multiple) / num_devices
        raise UserError(
            f"the batch does not divide: {key}={per_device:g} x {num_devices} devices = "
            f"{batch_size:g} sequences, not a multiple of {multiple} (mesh axes "
            f"{', '.join(sharding.batch_axes)}, stages and microbatches).\n"
            f"  What to do: set {key}={better:g}."
        )
    return int(batch_size)


def check_lengths(longest: int, config: BatchConfig, sharding: ShardingPlan) -> None:
    """Raises UserError if the mesh does not divide the sequence lengths.

    Args:
      longest: max_target_length.
      config: sequence_length_stages, the shorter lengths.
      sharding: Of the mesh, which may split tokens over devices.
    """
    lengths = [longest, *(length for _, length in config.sequence_length_stages)]
    parts = sharding.num_length_parts
    if (fits := math.gcd(parts, *lengths)) != parts:
        raise UserError(
            f"max_target_length={longest} and lengths in sequence_length_stages have to be "
            f"multiples of {parts}, the devices over which sequences are split (mesh axes "
            f"{', '.join(sharding.length_axes)}).\n"
            f"  What to do: set ici_context_parallelism={fits} dcn_context_parallelism=1."
        )


# What a dimension counts, where its logical name alone does not say it.
_COUNTED = {"q_heads": "query heads", "kv_heads": "key/value heads", "exp": "experts"}


def _undivided_dimensions(specs: Sequence[ParamSpec], sharding: ShardingPlan) -> str:
    """Returns sentences such as "2 key/value heads do not divide over 4 devices (tensor). "."""
    sentences = []
    for spec in specs:
        for name, size in zip(spec.logical_axes, spec.shape, strict=True):
            for rule_name, mesh_axes in sharding.rules:
                if rule_name != name:
                    continue
                devices = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes)
                if devices > 1 and size % devices:
                    sentences.append(
                        f"{size} {_COUNTED.get(str(name), str(name))} do not divide over {devices} "
                        f"devices ({' x '.join(mesh_axes)}). "
                    )
    return "".join(dict.fromkeys(sentences))


def assert_params_sufficiently_sharded(
    parameters: Mapping[str, ParamSpec], sharding: ShardingPlan, tolerance: float
) -> float:
    """Returns the share of parameters that every device holds; raises UserError above `tolerance`.

    Args:
      parameters: By name.
      sharding: Of the mesh. If it splits no parameters, the share is 0.
      tolerance: The largest share to accept.
    """
    if math.prod(sharding.mesh.shape[axis] for axis in WEIGHT_AXES) == 1:
        return 0.0
    shardings = sharding.parameter_shardings(parameters)
    replicated = {name: spec for name, spec in parameters.items() if not any(shardings[name].spec)}
    num_replicated = sum(spec.size for spec in replicated.values())
    share = num_replicated / sum(spec.size for spec in parameters.values())
    if share > tolerance:
        largest = sorted(replicated, key=lambda name: -replicated[name].size)[:5]
        undivided = _undivided_dimensions([replicated[name] for name in largest], sharding)
        descriptions = [
            f"    {name} {replicated[name].shape} {replicated[name].logical_axes}\n"
            for name in largest
        ]
        raise UserError(
            f"{undivided}{share:.1%} of the parameters are replicated on every device, more than "
            f"sharding_tolerance={tolerance:g}. The mesh is {sharding.mesh_sizes}; the largest:\n"
            + "".join(descriptions)
            + "  What to do: choose sizes (or an mlp_dim_multiple) that the mesh divides, another "
            "mesh (ici_data_parallelism copies on purpose), other logical_axis_rules, or a higher "
            "sharding_tolerance."
        )
    return share
