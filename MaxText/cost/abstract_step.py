"""The train step of a configuration on absent devices.

Legend: B sequences, T tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.layer_plan import LayerKinds, PipelineSchedule
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.schema import Config
from MaxText.config.training_sections import GuardConfig, OptimizerConfig, ScheduleConfig
from MaxText.hardware.chips import Hardware
from MaxText.input_pipeline.sequences.plan_batches import plan_batches, resolve_global_batch
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention import flash_attention
from MaxText.parallelism.device_mesh import MeshSizes, mesh_sizes
from MaxText.parallelism.logical_sharding import HIDDEN
from MaxText.parallelism.mesh import (
    ShardingPlan,
    assert_params_sufficiently_sharded,
    check_lengths,
    microbatch_size,
)
from MaxText.training import backend_defaults
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule, weight_decay_schedule
from MaxText.training.step import make_initialize

_Function = TypeVar("_Function", bound=Callable)


def cached(function: _Function) -> _Function:
    """Caches results; a functools.lru_cache typed for sections."""
    return cast(_Function, functools.lru_cache(maxsize=256)(function))


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device by name: enough to shard arrays, not to compute."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """The train step that train.py would compile for some hardware, as shapes and shardings."""

    config: Config  # with `auto` in the model section resolved
    hardware: Hardware
    auto_choices: tuple[str, ...]  # one line for each `auto`
    sharding: ShardingPlan  # mesh and sharding rules
    sizes: MeshSizes  # mesh sizes within and across slices
    model: Model
    rows: int  # B of a microbatch over all devices
    length: int  # T
    assumes_cudnn: bool = False  # whose kernel cannot be tried here

    @property
    def platform(self) -> str:
        """JAX's name of the platform: cpu, gpu or tpu."""
        return self.hardware.chip.platform

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an optimizer step."""
        return self.config.batch.gradient_accumulation_steps

    @property
    def tokens_per_update(self) -> int:
        """Tokens of an optimizer step over all devices."""
        return self.rows * self.num_microbatches * self.length

    @property
    def tokens_per_device(self) -> float:
        """Tokens of an optimizer step divided by the number of devices."""
        return self.tokens_per_update / self.sharding.mesh.size

    @functools.cached_property
    def optimizer_and_state(self) -> tuple[optax.GradientTransformation, Any]:
        """The optimizer, and shapes and shardings of the TrainState."""
        config = self.config
        # Plans with other policies, which do not change weights, share the result.
        memory = config.model.memory.model_copy(update={"remat_policy": "none"})
        model_config = config.model.model_copy(update={"memory": memory})
        optimizer, shapes = _optimizer_and_shapes(
            model_config, config.optimizer, config.schedule, config.guard
        )
        return optimizer, self.sharding.with_shardings(shapes, self.model.parameters)

    @functools.cached_property
    def local_model(self) -> Model:
        """The model at the sizes of one device.

        Tensor parallelism divides heads, MLP columns, slots and ids; other weights are gathered
        before use. A pipeline stage has its own layers between embedding and head.
        """
        return cached_model(_local(self.model.config, self.sharding))

    @functools.cached_property
    def model_of_all_stages(self) -> Model:
        """The `local_model` with the layers of all pipeline stages."""
        model_config = self.local_model.config
        layers = self.model.config.shape.dimensions.num_layers
        shape = model_config.shape.model_copy(update={"base_num_decoder_layers": layers})
        return cached_model(model_config.model_copy(update={"shape": shape}))

    @property
    def local_batch_size(self) -> int:
        """Sequences of a microbatch on one device, each possibly only in part."""
        return self.rows // self.sharding.num_batch_parts

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The pipeline schedule; None without pipeline stages."""
        num_stages = self.sharding.mesh.shape["stage"]
        return self.model.config.pipeline_schedule(num_stages) if num_stages > 1 else None

    @property
    def bubble(self) -> float:
        """Share of the time in which a pipeline stage waits."""
        return 0.0 if self.schedule is None else self.schedule.bubble

    @property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.local_batch_size * self.length // self.sharding.num_length_parts

    @property
    def num_hidden_parts(self) -> int:
        """Number of parts of a hidden state, split between layers.

        The devices of an axis such as `tensor` share it.
        """
        d = self.config.model.shape.dimensions.emb_dim
        shape = self.rows, self.length, d
        shard = self.sharding.named_sharding(HIDDEN, shape).shard_shape(shape)
        return self.local_tokens * d // math.prod(shard)

    @property
    def state_bytes(self) -> float:
        """Bytes of a hidden state of a microbatch on one device."""
        model_config = self.config.model
        width = np.dtype(model_config.numerics.dtype).itemsize
        return float(self.local_tokens * model_config.shape.dimensions.emb_dim * width)

    @property
    def local_shape(self) -> tuple[int, int]:
        """Sequences and length of a microbatch on one device.

        Parts of many sequences cost as much as whole ones of equal tokens. With fewer sequences
        than parts, these are the first tokens; step_time.context_parallel_attention_flops adds
        pairs with the other parts.
        """
        parts = self.sharding.num_length_parts
        rows = math.gcd(self.local_batch_size, parts)
        return self.local_batch_size // rows, self.length * rows // parts


def make_program(config: Config, hardware: Hardware) -> Program:
    """Returns the program of a configuration on hardware.

    Raises:
        UserError: mesh, batch, lengths or weights cannot be divided over the devices.
    """
    devices = _fake_devices(hardware)
    sizes = mesh_sizes(config.mesh, devices)
    # Only sizes matter: device placement within a slice is not modeled.
    mesh = Mesh(np.array(devices).reshape(sizes.total), MESH_AXES)
    axis = "data" if config.mesh.shard_optimizer_over_data else ""
    # Absent devices have no memory kinds; step_memory.py accounts for host memory.
    sharding = ShardingPlan(mesh, config.mesh.logical_axis_rules, axis, config.model.pipeline)
    config = resolve_global_batch(config, sharding)
    model_config, choices = backend_defaults.resolve_auto(
        config.model, hardware.chip.platform, sharding
    )
    assumes_cudnn = _assumes_cudnn(config.model, model_config, sharding)
    if assumes_cudnn:
        choices = [line for line in choices if not line.startswith("attention: ")]
        choices.append("attention: flash (assumes that cuDNN has a kernel for it)")
    config = config.model_copy(update={"model": model_config})
    rows = microbatch_size(config.batch, sharding)
    microbatch_size(config.batch, sharding, config.evaluation.eval_per_device_batch_size)
    length = model_config.shape.max_target_length
    plan_batches(config, sharding)  # raises for a batch that does not divide
    check_lengths(length, config.batch, sharding)
    model = cached_model(model_config)
    tolerance = config.mesh.sharding_tolerance
    assert_params_sufficiently_sharded(model.parameters, sharding, tolerance)
    return Program(
        config=config,
        hardware=hardware,
        auto_choices=tuple(choices),
        sharding=sharding,
        sizes=sizes,
        model=model,
        rows=rows,
        length=length,
        assumes_cudnn=assumes_cudnn,
    )


def configured_mesh_sizes(config: Config, hardware: Hardware) -> MeshSizes:
    """Returns a configuration's mesh on hardware; UserError if it misfits."""
    return mesh_sizes(config.mesh, _fake_devices(hardware))


def _assumes_cudnn(configured: ModelConfig, resolved: ModelConfig, sharding: ShardingPlan) -> bool:
    """Returns whether only the absence of a GPU keeps the model from cuDNN."""
    if sharding.mesh.devices.flat[0].platform != "gpu":
        return False
    refused = flash_attention.kernel_unsupported_reason(resolved, "gpu", sharding.num_length_parts)
    return configured.attention.attention in ("autoselected", "flash") and refused is None


@cached
def _fake_devices(hardware: Hardware) -> tuple[FakeDevice, ...]:
    chip = hardware.chip
    num_devices = hardware.num_devices
    slice_indices = (device * hardware.num_slices // num_devices for device in range(num_devices))
    return tuple(
        FakeDevice(device, chip.platform, chip.device_kind, slice_index=slice_index)
        for device, slice_index in enumerate(slice_indices)
    )


@cached
def cached_model(model_config: ModelConfig) -> Model:
    """Returns a model with abstract parameters, cached by its configuration."""
    return Model(model_config)


@cached
def _optimizer_and_shapes(
    model_config: ModelConfig, config: OptimizerConfig, schedule: ScheduleConfig, guard: GuardConfig
) -> tuple[optax.GradientTransformation, Any]:
    model = cached_model(model_config)
    optimizer = make_optimizer(
        config,
        learning_rate_schedule(schedule),
        model.parameters,
        weight_decay_schedule(schedule),
    )
    initialize = make_initialize(model, optimizer, guard, config.parameter_average)
    return optimizer, jax.eval_shape(initialize, jax.random.key(0))


def _local(model_config: ModelConfig, sharding: ShardingPlan) -> ModelConfig:
    """Returns the configuration of the part of a model that one device computes."""

    def share(axis: str, size: int) -> int:
        # Activation axes: weights sharded on their own are gathered before use.
        axis = f"activation_{axis}"
        return sharding.named_sharding((axis,), (size,)).shard_shape((size,))[0]

    def shares(sizes: Mapping[str, tuple[str, int]]) -> dict[str, int]:
        sizes_by_key = {key: share(axis, size) for key, (axis, size) in sizes.items()}
        heads = [sizes_by_key[key] for key, (axis, _) in sizes.items() if axis == "heads"]
        for key, (axis, _) in sizes.items():
            # If heads of keys, or groups, are not sharded, a device uses those of its own heads.
            if axis == "kv_heads" and heads and heads[0] % sizes_by_key[key]:
                sizes_by_key[key] = heads[0]
        return sizes_by_key

    def sizes_of(layer: LayerConfig) -> dict[str, int]:
        d = layer.dimensions
        attention_heads = {
            "base_num_query_heads": ("heads", d.num_query_heads),
            "base_num_kv_heads": ("kv_heads", d.num_kv_heads),
        }
        sizes_by_key = {
            **shares(attention_heads),
            "head_dim": d.head_dim,
            "base_mlp_dim": share("mlp", d.mlp_dim),
        }
        for part in layer.parts:
            sizes_by_key |= shares(part.sharded_sizes(layer))
        return sizes_by_key

    d = model_config.shape.dimensions
    sizes = sizes_of(LayerConfig(model_config, d))
    letter_keys = {
        letter: dict(keys) | sizes_of(model_config.layer(dict(keys)))
        for letter, keys in model_config.block.layer_kinds
    }
    model_sizes = {
        "parametrization": "standard",
        "global_parameter_scale": 1,
        "base_emb_dim": d.emb_dim,
        "base_num_decoder_layers": d.num_layers // sharding.mesh.shape["stage"],
        "vocab_size": share("vocab", d.vocab_size),
        "layer_kinds": LayerKinds.of(letter_keys),
    }
    return model_config.with_values(sizes | model_sizes)
