"""The train step of a configuration on devices that need not be there.

Legend: B sequences, T tokens.
"""

import dataclasses
import functools
import math
from typing import Any, get_args

import numpy as np
import optax
from jax.sharding import Mesh

from MaxText.configuration.axis_rules import MESH_AXES
from MaxText.configuration.layer_sections import SlotPlace
from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.configuration.pipeline_schedule import PipelineSchedule
from MaxText.configuration.schema import Config
from MaxText.input_pipeline.batch import Batch, batch_shapes
from MaxText.layers.model import Model
from MaxText.parallelism.device_mesh import MeshSizes, mesh_sizes
from MaxText.parallelism.mesh import Layout, check_lengths, rows_of_batch
from MaxText.training import backend_defaults
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """A device by name: enough to lay arrays out, not to compute."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What train.py would compile.

    Attributes:
      config: with the model section's `auto` resolved.
      choices: one line for each `auto`.
      layout: mesh and rules.
      sizes: of the mesh, inside a slice and across slices.
      model: the whole model.
      rows: B of a microbatch over all devices.
      length: T.
    """

    config: Config
    choices: tuple[str, ...]
    layout: Layout
    sizes: MeshSizes
    model: Model
    rows: int
    length: int

    @property
    def platform(self) -> str:
        """As jax names it."""
        return self.layout.mesh.devices.flat[0].platform

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.layout.mesh.size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an update."""
        return self.config.batch.gradient_accumulation_steps

    @property
    def tokens_per_update(self) -> int:
        """Tokens of an update over all devices."""
        return self.rows * self.num_microbatches * self.length

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the whole model."""
        schedule = learning_rate_schedule(self.config.schedule)
        return make_optimizer(self.config.optimizer, schedule, self.model.parameters)

    @functools.cached_property
    def abstract_state(self) -> Any:
        """Shapes and shardings of the TrainState."""
        initialize = make_initialize(self.model, self.optimizer, self.config.guard)
        return self.layout.abstract_state(initialize, self.model.parameters)

    @functools.cached_property
    def local_model(self) -> Model:
        """The model of which each device computes its rows of a batch, by tensor parallelism cut
        to its heads, MLP columns, slots and ids; other weights are gathered before they are used.
        Of a pipeline's stage, its layers between embedding and head.
        """
        return Model(_local(self.model.section, self.layout))

    @property
    def local_rows(self) -> int:
        """B of a microbatch on one device."""
        return self.rows // self.layout.num_batch_parts

    @property
    def schedule(self) -> PipelineSchedule | None:
        """How microbatches pass through the stages of a pipeline; None without one."""
        num_stages = self.layout.mesh.shape["stage"]
        return self.model.section.pipeline_schedule(num_stages) if num_stages > 1 else None

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage has nothing to do."""
        return 0.0 if self.schedule is None else self.schedule.bubble

    @property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.local_rows * self.length // self.layout.num_length_parts

    def local_batch(self) -> Batch:
        """Shapes of a microbatch on one device.

        A part of each of many sequences costs what as many tokens of whole ones do: attention
        multiplies as many pairs. Where there are fewer sequences than parts, those are the first
        tokens, and pairs with the other parts are left out.
        """
        parts = self.layout.num_length_parts
        rows = math.gcd(self.local_rows, parts)
        sizes = self.local_rows // rows, self.length * rows // parts
        return batch_shapes(*sizes, with_documents=False)


def make_program(
    config: Config, num_devices: int, platform: str, device_kind: str, num_slices: int = 1
) -> Program:
    """The program of a configuration.

    Args:
      num_devices: jax devices.
      platform: "cpu", "gpu" or "tpu".
      device_kind: as jax names it, "TPU v5".
      num_slices: parts of the devices that only a slow network connects.

    Raises:
      UserError: mesh or batch do not fit the devices.
    """
    devices = [
        AbsentDevice(number, platform, device_kind, slice_index=number * num_slices // num_devices)
        for number in range(num_devices)
    ]
    sizes = mesh_sizes(config.mesh, devices)
    # Only sizes matter: where a device lies in a slice is not planned.
    mesh = Mesh(np.array(devices).reshape(sizes.total), MESH_AXES)
    axis = "data" if config.mesh.shard_optimizer_over_data else ""
    # Absent devices have no memories to choose from: memory.py knows what lies in the host.
    layout = Layout(mesh, config.mesh.logical_axis_rules, axis, config.model.pipeline)
    section, choices = backend_defaults.resolve(config.model, platform)
    config = config.model_copy(update={"model": section})
    rows = rows_of_batch(config.batch, layout)
    length = section.shape.max_target_length
    check_lengths(length, config.batch, layout)
    return Program(config, tuple(choices), layout, sizes, _model(section), rows, length)


@functools.lru_cache(maxsize=64)
def _cached_model(section: str) -> Model:
    return Model(ModelSection.model_validate_json(section))


def _model(section: ModelSection) -> Model:
    """Searches ask for the same model again and again."""
    return _cached_model(section.model_dump_json())


def _local(section: ModelSection, layout: Layout) -> ModelSection:
    """The section with the sizes that one device computes with."""

    def part(name: str, size: int) -> int:
        # Of activations: what splits weights alone is gathered before it is used.
        name = f"activation_{name}"
        return layout.sharding((name,), (size,)).shard_shape((size,))[0]

    d = section.shape.dimensions
    num_layers = d.num_layers // layout.mesh.shape["stage"]
    heads, kv_heads = part("heads", d.num_query_heads), part("kv_heads", d.num_kv_heads)
    shape = section.shape.model_copy(
        update={
            "global_parameter_scale": 1,
            "base_emb_dim": d.emb_dim,
            "base_num_query_heads": heads,
            # Where heads of keys are not divided, a device uses those of its own queries.
            "base_num_kv_heads": kv_heads if heads % kv_heads == 0 else heads,
            "head_dim": d.head_dim,
            "base_mlp_dim": part("mlp", d.mlp_dim),
            "base_num_decoder_layers": num_layers,
            "vocab_size": part("vocab", d.vocab_size),
        }
    )
    experts, slots = section.mixture_of_experts, section.pattention
    if experts.moe_mlp_dim != -1:
        width = part("mlp", experts.moe_mlp_dim)
        experts = experts.model_copy(update={"moe_mlp_dim": width})
    places = get_args(SlotPlace)
    slots = slots.model_copy(
        update={
            f"{place}_slot_num": part("slots", slots.num_slots(place, d.emb_dim))
            for place in places
        }
    )
    return section.model_copy(
        update={"shape": shape, "mixture_of_experts": experts, "pattention": slots}
    )
