"""Checksums do not depend on how an array lies on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpointing.checksums import array_checksums, host_checksum

pytestmark = pytest.mark.multi_device


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sharded_arrays_have_the_checksum_of_the_whole(dtype):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(auto, auto))
    array = np.random.default_rng(0).normal(size=(4, 160, 120)).astype(dtype)
    specs = [(), ("fsdp",), (None, "fsdp", "tensor"), (None, None, ("tensor", "fsdp"))]
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs
    ] + [jax.device_put(array, jax.devices()[3])]
    assert set(array_checksums(placed).values()) == {host_checksum(array)}
