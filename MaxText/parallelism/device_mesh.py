"""Arrangement of devices: mesh sizes in a slice (ICI) and across (DCN).

A slice has a fast network: a TPU slice, or the GPUs of a server (`slice_index` in jax). If jax
knows one slice and `dcn_*` sizes ask for several, devices are split evenly in process order.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils

from MaxText.config.axis_rules import MESH_AXES, size_key
from MaxText.config.training_sections import MeshConfig
from MaxText.errors import UserError

_log = logging.getLogger(__name__)


class MeshSizes(NamedTuple):
    """Sizes of the axes of MESH_AXES, inside a slice and across slices."""

    ici: tuple[int, ...]
    dcn: tuple[int, ...]

    @property
    def total(self) -> list[int]:
        """Sizes of the axes over all devices."""
        return [inner * outer for inner, outer in zip(*self, strict=True)]


def mesh_sizes(config: MeshConfig, devices: Sequence[Any]) -> MeshSizes:
    """Returns the sizes of all axes, with -1 resolved.

    Args:
      config: Of the mesh.
      devices: Of all processes.

    Raises:
      UserError: The product of the sizes is not the number of devices per slice, or of slices.
    """
    slices = _slices(config, devices)
    across = _fill_sizes(config, "dcn", len(slices), "slices")
    kind = f"devices per slice ({devices[0].device_kind})"
    return MeshSizes(_fill_sizes(config, "ici", len(slices[0]), kind), across)


def create_device_mesh(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices as a mesh, close ones adjacent.

    Along each axis slices are contiguous: of 2 slices of 4, the first has positions 0 to 3.
    """
    sizes = mesh_sizes(config, devices)
    slices = [
        _arrange_slice(sizes.ici, part, config.allow_split_physical_axes)
        for part in _slices(config, devices)
    ]
    blocks = np.stack(slices).reshape(*sizes.dcn, *sizes.ici)
    rank = len(MESH_AXES)
    order = [dim for axis in range(rank) for dim in (axis, rank + axis)]
    return blocks.transpose(order).reshape(sizes.total)


def _arrange_slice(sizes: tuple[int, ...], devices: list[Any], allow_split: bool) -> np.ndarray:
    """Returns the devices of a slice as a mesh, arranged by jax if it can."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=allow_split)
    except NotImplementedError as error:
        named = zip(MESH_AXES, sizes, strict=True)
        mesh = " x ".join(f"{axis} {size}" for axis, size in named if size > 1)
        if not allow_split:
            raise UserError(
                f"the mesh {mesh} does not fit this machine's network without splitting one of "
                "its axes. Choose other sizes, or set allow_split_physical_axes=true."
            ) from error
    _log.warning("mesh %s does not follow the TPU network: devices are in order of id", mesh)
    return np.array(devices).reshape(sizes)


def _slices(config: MeshConfig, devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of each slice, of which all have as many.

    If jax knows one slice, it is split evenly into as many as the dcn_* sizes ask for.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    num_slices = math.prod(max(size, 1) for size in _sizes(config, "dcn"))
    if len(slices) == 1 and num_slices > 1 and len(devices) % num_slices == 0:
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        per_slice = len(devices) // num_slices
        return [ordered[i : i + per_slice] for i in range(0, len(ordered), per_slice)]
    numbers = sorted({len(part) for part in slices.values()})
    if len(numbers) > 1:
        raise UserError(
            f"slices have {' and '.join(map(str, numbers))} devices, and a mesh needs as many of "
            "each.\n  What to do: start on slices of one size."
        )
    return [slices[index] for index in sorted(slices)]


def _sizes(config: MeshConfig, network: str) -> list[int]:
    """Returns the configured sizes of all axes in one network, -1 among them."""
    return [getattr(config, size_key(axis, network)) for axis in MESH_AXES]


def _fill_sizes(
    config: MeshConfig, network: str, num_members: int, members: str
) -> tuple[int, ...]:
    """Returns the sizes of all axes in one network, -1 resolved; raises UserError if they misfit.

    Args:
      config: Of the mesh.
      network: "ici", inside a slice, or "dcn", across slices.
      num_members: What the product of the sizes has to be.
      members: What these are, for the error: "slices", or "devices per slice".
    """
    sizes = _sizes(config, network)
    fixed = math.prod(size for size in sizes if size != -1)
    fills = -1 in sizes
    if fills and num_members % fixed == 0:
        sizes[sizes.index(-1)] = num_members // fixed
    if math.prod(sizes) != num_members:
        requested = [
            f"{size_key(axis, network)}={size}"
            for axis, size in zip(MESH_AXES, sizes, strict=True)
            if size != 1
        ]
        needed = f"a multiple of {fixed}" if fills else f"{fixed}"
        raise UserError(
            f"the mesh does not match the devices: {' x '.join(requested) or 'every size 1'} needs "
            f"{needed} {members}, and there are {num_members}.\n"
            f"  What to do: choose {size_key('*', network)} sizes whose product is {num_members}, "
            "or set one of them to -1, which fills."
        )
    return tuple(sizes)
