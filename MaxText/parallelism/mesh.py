"""Mesh, and shardings of parameters, optimizer state and batches."""

import dataclasses
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.model_sections import PipelineConfig
from MaxText.config.training_sections import BatchConfig, MeshConfig
from MaxText.errors import UserError
from MaxText.parallelism.device_mesh import create_device_mesh
from MaxText.parallelism.logical_sharding import (
    ParamSpec,
    Rules,
    axis_rules,
    logical_to_mesh_axes,
    split_axes,
)

HOST_MEMORY = "pinned_host"  # kind of host memory that devices can fetch from
_DEFAULT_PIPELINE = PipelineConfig()
WEIGHT_AXES = ("fsdp", "fsdp_transpose", "context", "expert", "tensor")  # others replicate


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
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
        return math.prod(self.mesh.shape[axis] for axis in self.length_axes)

    @property
    def num_batch_parts(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def batch_divisor(self) -> int:
        """Divisor of the batch size, from shards, stages and microbatches."""
        num_stages = self.mesh.shape["stage"]
        return self.num_batch_parts * math.lcm(num_stages, self.pipeline.microbatches(num_stages))

    def named_sharding(self, names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, logical_to_mesh_axes(names, shape, self.rules, self.mesh))

    def parameter_shardings(self, parameters: Mapping[str, ParamSpec]) -> dict:
        return {
            name: self.named_sharding(spec.logical_axes, spec.shape)
            for name, spec in parameters.items()
        }

    def describe(self, parameters: Mapping[str, ParamSpec]) -> Callable[[str], str] | None:
        """Returns parameter name -> its mesh axes as text; None on one device."""
        if self.mesh.size == 1:
            return None
        shardings = self.parameter_shardings(parameters)

        def words(name: str) -> str:
            dims = range(len(shardings[name].spec))
            return ",".join("+".join(split_axes(shardings[name], dim)) or "-" for dim in dims)

        return words

    def state_shardings(self, abstract_state: Any, parameters: Mapping[str, ParamSpec]) -> Any:
        """Returns a tree like `abstract_state`, moments sharded as parameters.

        Everything else (counters, factored moments) is small and replicated. `optimizer_state_axis`
        splits the optimizer state further: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).
        `offloads_optimizer` places it in host memory, from where the train step fetches it.
        """
        shardings = self.parameter_shardings(parameters)

        def of(path, leaf):
            names = [str(getattr(entry, "key", "")) for entry in path]
            found = self.replicated
            for start in range(len(names)):
                spec = parameters.get("/".join(names[start:]))
                if spec is not None and spec.shape == leaf.shape:
                    found = shardings["/".join(names[start:])]
                    break
            if not any(getattr(entry, "name", "") == "opt_state" for entry in path):
                return found
            found = self._shard_over_data(found, leaf.shape)
            offloads = self.offloads_optimizer and leaf.ndim > 0  # not counters
            return found.with_memory_kind(HOST_MEMORY) if offloads else found

        return jax.tree_util.tree_map_with_path(of, abstract_state)

    def _shard_over_data(self, sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
        """Splits the longest divisible dimension over the axis, unsplit first."""
        axis = self.optimizer_state_axis
        axes = [split_axes(sharding, dim) for dim in range(len(shape))]
        if not axis or self.mesh.shape[axis] == 1 or any(axis in of for of in axes):
            return sharding
        parts = [math.prod(self.mesh.shape[name] for name in of) for of in axes]
        fitting = [i for i, n in enumerate(shape) if n % (parts[i] * self.mesh.shape[axis]) == 0]
        if not fitting:
            return sharding
        chosen = max(fitting, key=lambda i: (parts[i] == 1, shape[i]))
        spec: list[Any] = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
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
        held = {}
        for device, (rows, _) in self.batch_sharding(shape[0]).devices_indices_map(shape).items():
            held.setdefault(device.process_index, set()).add(rows.start or 0)
        return process_batch_slice(held, jax.process_index())

    def to_global_batch(self, batch: Any, batch_size: int) -> Any:
        """Returns global arrays from this process's NumPy part of a batch."""
        make = functools.partial(
            jax.make_array_from_process_local_data, self.batch_sharding(batch_size)
        )
        return jax.tree.map(lambda x: make(x, (batch_size, *x.shape[1:])), batch)

    def abstract_batch(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=self.batch_sharding(x.shape[0])), shapes)

    def abstract_state(
        self, initialize: Callable[[jax.Array], Any], parameters: Mapping[str, ParamSpec]
    ) -> Any:
        return self.with_shardings(jax.eval_shape(initialize, jax.random.key(0)), parameters)

    def with_shardings(self, shapes: Any, parameters: Mapping[str, ParamSpec]) -> Any:
        """Returns shapes of a state with the shardings of `state_shardings`."""
        shardings = self.state_shardings(shapes, parameters)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)

    def init_state(
        self, initialize: Callable[[jax.Array], Any], abstract_state: Any, seed: int
    ) -> Any:
        """Returns a fresh state; each device draws its own shard."""
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state)
        # On CPU, random draws compile 3 times faster and run as fast, with the same bits.
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 1} if is_cpu else None
        draw = jax.jit(initialize, out_shardings=shardings, compiler_options=options)
        return draw(jax.random.key(seed))

    def jit(self, function: Callable, **options: Any) -> Any:
        """Returns jax.jit of `function`, traced with the logical axis rules."""

        @functools.wraps(function)
        def traced(*arguments):
            with axis_rules(self.mesh, self.rules):
                return function(*arguments)

        return jax.jit(traced, **options)

    def compile_step(
        self, train_step: Callable, *arguments: Any
    ) -> tuple[jax.stages.Compiled, float]:
        """Compiles the step of `lower_step`; returns the seconds, too."""
        began = time.perf_counter()
        return self.lower_step(train_step, *arguments).compile(), time.perf_counter() - began

    def lower_step(
        self,
        train_step: Callable,
        abstract_state: Any,
        abstract_batch: Any,
        compiler_options: dict[str, Any] | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the train step, with its state donated."""
        shardings = jax.tree.map(lambda x: x.sharding, abstract_state), self.replicated
        options = {"donate_argnums": 0, "compiler_options": compiler_options or None}
        jitted = self.jit(train_step, out_shardings=shardings, **options)
        collects_garbage = gc.isenabled()
        gc.disable()  # a quarter of the time of tracing, which leaves little garbage
        try:
            return jitted.lower(abstract_state, abstract_batch)
        finally:
            if collects_garbage:
                gc.enable()


# Without them, the reduce-scatter of a layer's gradients overlaps nothing, and a quarter of the
# all-gathers: compiled for 8 H100s, a 1.4B model hides 0 of 25 and 144 of 194 behind matmuls, with
# them 23 of 24 and 188 of 193. Combining up to 128 MiB (MaxText) hides none.
_PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")


# XLA for TPU splits a matmul with gathered weights into one per device, to overlap communication.
# With weights sharded over 32 devices, each adds a product over 128 rows to an array in HBM: twice
# the time of the matmuls for 3 % of communication (7B on v5p, benchmarks/compiled.py).
_WINDOWED_MATMUL_MIB = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


def compiler_options(platform: str, num_devices: int) -> dict[str, bool | int | str]:
    """Returns XLA options of the train step.

    Options in XLA_FLAGS or LIBTPU_INIT_ARGS keep the user's values.
    """
    options: dict[str, bool | int | str] = {}
    if platform == "tpu" and num_devices > 1:
        options[_WINDOWED_MATMUL_MIB] = 1_000_000  # none
    if platform == "gpu" and num_devices > 1:
        if jax.__version_info__ < (0, 11, 1):
            options |= {f"xla_gpu_enable_pipelined_{name}": True for name in _PIPELINED}
        else:
            on = "COLLECTIVE_PIPELINING_MODE_ON"
            options |= {f"xla_gpu_pipeline_{name}": on for name in _PIPELINED}
    if platform == "gpu":  # cuBLAS: GPT-2 small 0.5 % faster, 1B 1.4 % (H200); 1B in fp8 3 % (H100)
        options["xla_gpu_enable_triton_gemm"] = False
    given = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in options.items() if name not in given}


def process_batch_slice(held: Mapping[int, set[int]], process: int) -> tuple[int, int]:
    """Returns (part, parts) of a batch's sequences for a process.

    `held` maps processes to their sequences. Must agree with
    jax.make_array_from_process_local_data. If processes hold overlapping sets, returns (0, 1): each
    reads all sequences and places what it holds.
    """
    distinct = sorted({tuple(sorted(parts)) for parts in held.values()})
    are_disjoint = sum(map(len, distinct)) == len(set().union(*distinct))
    if not are_disjoint or len({len(parts) for parts in distinct}) > 1:
        return 0, 1
    return distinct.index(tuple(sorted(held[process]))), len(distinct)


def make_sharding_plan(
    config: MeshConfig, devices: Sequence[Any], pipeline: PipelineConfig = _DEFAULT_PIPELINE
) -> ShardingPlan:
    """Returns the plan; raises UserError if the devices do not support it."""
    mesh = make_mesh(config, devices)
    axis = "data" if config.shard_optimizer_over_data else ""
    offloads = config.optimizer_memory_host_offload
    return ShardingPlan(mesh, config.logical_axis_rules, axis, pipeline, offloads)


def global_batch_size(config: BatchConfig, sharding: ShardingPlan, per_device: float) -> int:
    """Returns sequences per update; `per_device` is per microbatch."""
    batch_size = _batch_size(sharding, per_device, "per_device_batch_size")
    return batch_size * config.gradient_accumulation_steps


def microbatch_size(config: BatchConfig, sharding: ShardingPlan, per_device: float = 0.0) -> int:
    """Returns sequences per microbatch; raises UserError if not divisible."""
    key = "eval_per_device_batch_size" if per_device else "per_device_batch_size"
    return _batch_size(sharding, per_device or config.per_device_batch_size, key)


def _batch_size(sharding: ShardingPlan, per_device: float, key: str) -> int:
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
    """Raises UserError if the mesh does not divide the sequence lengths."""
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
            for mesh_axes in (axes for rule, axes in sharding.rules if rule == name):
                devices = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes)
                if devices > 1 and size % devices:
                    what = _COUNTED.get(str(name), str(name))
                    sentences.append(
                        f"{size} {what} do not divide over {devices} devices "
                        f"({' x '.join(mesh_axes)}). "
                    )
    return "".join(dict.fromkeys(sentences))


def assert_params_sufficiently_sharded(
    parameters: Mapping[str, ParamSpec], sharding: ShardingPlan, tolerance: float
) -> float:
    """Returns the replicated share; raises UserError above `tolerance`."""
    if math.prod(sharding.mesh.shape[axis] for axis in WEIGHT_AXES) == 1:
        return 0.0
    shardings = sharding.parameter_shardings(parameters)
    whole = {name: x for name, x in parameters.items() if not any(shardings[name].spec)}
    share = sum(x.size for x in whole.values()) / sum(x.size for x in parameters.values())
    if share > tolerance:
        largest = sorted(whole, key=lambda name: -whole[name].size)[:5]
        undivided = _undivided_dimensions([whole[name] for name in largest], sharding)
        raise UserError(
            f"{undivided}{share:.1%} of the parameters are replicated on every device, more than "
            f"sharding_tolerance={tolerance:g}. The mesh is {sharding.mesh_sizes}; the largest:\n"
            + "".join(f"    {x} {whole[x].shape} {whole[x].logical_axes}\n" for x in largest)
            + "  What to do: choose sizes (or an mlp_dim_multiple) that the mesh divides, another "
            "mesh (ici_data_parallelism copies on purpose), other logical_axis_rules, or a higher "
            "sharding_tolerance."
        )
    return share
