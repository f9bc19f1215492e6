"""What the aggregation over depth and its kernel agree on: fused norms, and memory on the chip."""

from typing import NamedTuple


class Norms(NamedTuple):
    """RMS norms to fuse with weighted sums y: y / sqrt(mean(y^2) + eps) * factor."""

    streams: tuple[int, ...] = ()  # indices of the normalized streams
    epsilon: float = 0.0


NO_NORMS = Norms()


def chip_memory(device_kind: str) -> int:
    """Returns the bytes of VMEM per TPU core available to a kernel."""
    if device_kind.startswith(("TPU v2", "TPU v3", "TPU v4")):
        return 16 * 2**20
    return 64 * 2**20  # or more, from v5 on (TpuInfo.vmem_capacity_bytes of Pallas)
