"""Arrangement of devices: mesh sizes in a slice (ICI) and across (DCN).

A slice has a fast network: a TPU slice, or the GPUs of a server (`slice_index` in jax). If jax
knows one slice and `dcn_*` sizes ask for several, devices are split evenly in process order.
"""

import contextlib
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
        return [inner * outer for inner, outer in zip(*self, strict=True)]


def mesh_sizes(config: MeshConfig, devices: Sequence[Any]) -> MeshSizes:
    """Returns the sizes with -1 resolved; raises UserError if they misfit."""
    num_slices = len(_slices(config, devices))
    across = _fill_sizes(config, "dcn", num_slices)
    if across is None:
        raise _size_error(config, "dcn", num_slices, f"there are {num_slices}", "slices")
    per_slice = len(devices) // num_slices
    within = _fill_sizes(config, "ici", per_slice)
    if within is None:
        whose = "this machine has" if num_slices == 1 else f"each of {num_slices} slices has"
        kind = f"{whose} {per_slice} ({devices[0].device_kind})"
        raise _size_error(config, "ici", per_slice, kind, "devices")
    return MeshSizes(within, across)


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
    """Returns the devices of a slice as a mesh; UserError if it must split.

    Mesh axes take whole axes of the physical network if possible, else split ones. If jax knows no
    such arrangement, devices are in their order: slower collectives, but every mesh can be built.
    """
    named = zip(MESH_AXES, sizes, strict=True)
    mesh = " x ".join(f"{axis} {size}" for axis, size in named if size > 1)
    for options in ({}, {"allow_split_physical_axes": True}):
        if options and not allow_split:
            raise UserError(
                f"the mesh {mesh} does not fit this machine's network without splitting one of "
                "its axes. Choose other sizes, or set allow_split_physical_axes=true."
            )
        with contextlib.suppress(NotImplementedError):
            create_device_mesh = mesh_utils.create_device_mesh(sizes, devices, **options)
            if options:
                _log.warning("mesh %s: an axis of the TPU network is split over mesh axes", mesh)
            return create_device_mesh
    _log.warning("mesh %s does not follow the TPU network: devices are in order of id", mesh)
    return np.array(devices).reshape(sizes)


def _slices(config: MeshConfig, devices: Sequence[Any]) -> list[list[Any]]:
    known: dict[int, list[Any]] = {}
    for device in devices:
        known.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    asked = math.prod(max(size, 1) for size in _sizes(config, "dcn"))
    if len(known) == 1 and asked > 1:
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        per_slice, rest = divmod(len(ordered), asked)
        if rest or not per_slice:
            raise _size_error(
                config, "dcn", 1, f"{len(ordered)} devices make none such", "equal parts"
            )
        return [ordered[i : i + per_slice] for i in range(0, len(ordered), per_slice)]
    numbers = sorted({len(part) for part in known.values()})
    if len(numbers) > 1:
        raise UserError(
            f"slices have {' and '.join(map(str, numbers))} devices, and a mesh needs as many of "
            "each.\n  What to do: start on slices of one size."
        )
    return [known[index] for index in sorted(known)]


def _sizes(config: MeshConfig, network: str) -> list[int]:
    return [getattr(config, size_key(axis, network)) for axis in MESH_AXES]


def _fill_sizes(config: MeshConfig, network: str, number: int) -> tuple[int, ...] | None:
    """Returns the sizes with -1 resolved; None if they do not multiply."""
    sizes = _sizes(config, network)
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and number % fixed == 0:
        sizes[sizes.index(-1)] = number // fixed
    return tuple(sizes) if math.prod(sizes) == number else None


def _size_error(
    config: MeshConfig, network: str, number: int, present: str, things: str
) -> UserError:
    sizes = dict(zip(MESH_AXES, _sizes(config, network), strict=True))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    several = "a multiple of " if -1 in sizes.values() else ""
    filled = "fsdp" if network == "ici" else "data"
    asked = {axis: size for axis, size in sizes.items() if size != 1} or {filled: 1}
    proposal = {filled: -1} if network == "dcn" else {"data": 1, filled: -1}
    rest = number
    # Axes that are hardest to do without come first.
    for axis in ("expert", *reversed(MESH_AXES)):
        if axis not in proposal and sizes[axis] != 1:
            proposal[axis] = math.gcd(max(sizes[axis], 1), rest)
            rest //= proposal[axis]
    return UserError(
        f"the mesh does not match the devices: {_size_keys(asked, network, ' x ')} needs {several}"
        f"{fixed} {things}, {present}.\n"
        f"  What to do: use {_size_keys(proposal, network, ' ')}, which fits, or start on {several}"
        f"{fixed} {things}."
    )


def _size_keys(sizes: dict[str, int], network: str, between: str) -> str:
    ordered = [axis for axis in MESH_AXES if axis in sizes]
    return between.join(f"{size_key(axis, network)}={sizes[axis]}" for axis in ordered)
