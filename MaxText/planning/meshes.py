"""Meshes that a search tries: sizes of all axes, and how rows flow through stages."""

import itertools
import math
from collections.abc import Iterator

from MaxText.configuration.axis_rules import MESH_AXES, NETWORKS, size_key
from MaxText.configuration.model_sections import Pipeline
from MaxText.configuration.schema import Config
from MaxText.planning.hardware import Hardware
from MaxText.planning.program import model_of
from MaxText.training import backend_defaults

LARGEST_TENSOR = 8
MOST_STAGES = 16
# Tokens from which on sequences are split though there are enough of them, and over how many.
LONG_SEQUENCE = 8192
LARGEST_CONTEXT = 8
# Of a weight in float32: itself, two moments, and its gradient.
_BYTES_OF_A_WEIGHT = 16

_PIPELINE = tuple(Pipeline.model_fields)
MESH_KEYS = (*(size_key(axis, network) for network in NETWORKS for axis in MESH_AXES), *_PIPELINE)

Keys = dict[str, int]


def candidates(config: Config, hardware: Hardware) -> Iterator[Keys]:
    """Keys of meshes, and of pipelines where they have stages.

    Weights are split over all devices of a slice, over a half of them, or copied; across slices
    copied, split, or by layers. Sizes that a model, a batch or a rule refuses are among them.
    """
    num_devices = hardware.num_devices // hardware.num_slices
    for within, across in itertools.product(
        _within(config, hardware, num_devices), _across(hardware.num_slices)
    ):
        sizes = _transposed(within, across, config.model.shape.dimensions.emb_dim)
        mesh = {
            size_key(axis, network): of.get(axis, 1)
            for network, of in zip(NETWORKS, (sizes, across), strict=True)
            for axis in MESH_AXES
        }
        mesh["dcn_data_parallelism"] = -1  # as is the default: it fills
        num_stages = sizes.get("stage", 1) * across["stage"]
        for pipeline in _pipelines(num_stages):
            yield mesh | pipeline


def sequences_of(config: Config, hardware: Hardware) -> int:
    """Sequences of an update over all devices."""
    batch = config.batch
    per_device = batch.per_device_batch_size * batch.gradient_accumulation_steps
    return round(per_device * hardware.num_devices)


def _within(config: Config, hardware: Hardware, num_devices: int) -> Iterator[Keys]:
    """Sizes inside of a slice."""
    for expert, tensor, context, stage in itertools.product(
        _experts(config),
        _powers(LARGEST_TENSOR),
        _contexts(config, hardware),
        _stages(config, hardware, num_devices),
    ):
        rest, left = divmod(num_devices, expert * tensor * context * stage)
        if left:
            continue
        for fsdp in dict.fromkeys((rest, max(rest // 2, 1), 1)):
            if rest % fsdp == 0:
                yield {
                    "data": rest // fsdp, "stage": stage, "fsdp": fsdp, "context": context,
                    "expert": expert, "tensor": tensor,
                }  # fmt: skip


def _across(num_slices: int) -> Iterator[Keys]:
    """Sizes across slices."""
    for stage in (n for n in range(1, MOST_STAGES + 1) if num_slices % n == 0):
        rest = num_slices // stage
        for fsdp in dict.fromkeys((1, rest)):
            yield {"data": rest // fsdp, "stage": stage, "fsdp": fsdp}


def _experts(config: Config) -> list[int]:
    experts = config.model.mixture_of_experts
    if experts.num_experts == 1 or experts.capacity_factor <= 0:
        return [1]
    return [n for n in _powers(8) if experts.num_experts % n == 0]


def _contexts(config: Config, hardware: Hardware) -> list[int]:
    """Parts of sequences: several where these are long, or fewer than devices."""
    length = config.model.shape.max_target_length
    most = LARGEST_CONTEXT if length >= LONG_SEQUENCE else 1
    waiting = -(-hardware.num_devices // max(sequences_of(config, hardware), 1))
    if waiting > 1:
        most = max(most, 2 ** (waiting - 1).bit_length())
    return [n for n in _powers(most) if length % n == 0]


def _stages(config: Config, hardware: Hardware, num_devices: int) -> list[int]:
    """Stages inside of a slice: several where weights do not fit into it otherwise."""
    section, _ = backend_defaults.resolve(config.model, hardware.platform)
    needed = _BYTES_OF_A_WEIGHT * model_of(section).num_parameters / num_devices
    return _powers(MOST_STAGES if needed > hardware.memory else 1)


def _transposed(within: Keys, across: Keys, width: int) -> Keys:
    """With as much of fsdp as does not divide the model's width in fsdp_transpose."""
    fsdp, others = within["fsdp"], across["fsdp"] * within["context"]
    divides = math.gcd(fsdp, width // others if width % others == 0 else 1)
    return within | {"fsdp": divides, "fsdp_transpose": fsdp // divides}


def _pipelines(num_stages: int) -> Iterator[Keys]:
    """How rows flow through stages: in one run of layers or in the shortest, and in how many parts.

    More parts leave stages idle for less of the time, and need more rows.
    """
    several = (1, 2, 4) if num_stages > 1 else ()
    choices = itertools.product((1, -1), (n * num_stages for n in several))
    for repeats, parts in choices if several else [(-1, -1)]:
        yield dict(zip(_PIPELINE, (parts, repeats, -1), strict=True))


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]
