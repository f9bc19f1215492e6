"""What libtpu knows of absent machines: their names, meshes, and kernels on them."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


def run(program: str, *given: str) -> list[list[str]]:
    """The words of its lines; libtpu starts once in a process, and without other devices."""
    done = subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


TARGETS = """
import itertools
from MaxText.compilation import targets
from MaxText.config.training_sections import MeshConfig
from MaxText.parallelism.device_mesh import create_device_mesh

targets.prepare_environment(targets.find_target("v5e-4"))
for name in targets.tpu_names():
    number = 0
    target = targets.find_target(name)
    devices = targets.devices(target)
    assert len(devices) == target.num_devices, name
    for num_slices in (1, 2) if 8 <= len(devices) <= 1024 else ():
        all_devices = list(targets.devices(target._replace(num_slices=num_slices)))
        assert len(all_devices) == num_slices * len(devices)
        sizes = [2**power for power in range(11) if target.num_devices % 2**power == 0]
        for one, other in itertools.product(sizes, sizes):
            if target.num_devices % (one * other):
                continue
            for axes in ("tensor", "context"), ("pipeline", "tensor"), ("expert", "data"):
                keys = (f"ici_{axis}_parallelism" for axis in axes)
                found = create_device_mesh(MeshConfig(**dict(zip(keys, (one, other)))), all_devices)
                assert len({device.id for device in found.flat}) == len(all_devices), (name, axes)
                number += 1
    print(name, number, devices[0].device_kind)
"""


def test_every_machine_of_the_table_and_its_meshes():
    lines = run(TARGETS)
    kinds = {name: " ".join(kind) for name, _, *kind in lines}
    assert kinds["v4-8"] == "TPU v4"
    assert kinds["v5e-16"] == "TPU v5 lite"
    assert kinds["v5p-128"] == "TPU v5"
    assert kinds["v6e-8"] == "TPU v6 lite"
    assert sum(int(number) for _, number, *_ in lines) > 1000


# Kernels of dense connections at their largest size: forward, backward, backward that accumulates.
KERNELS = """
import sys
from MaxText.compilation import targets
target = targets.find_target(sys.argv[1])
targets.prepare_environment(target)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from MaxText.layers.depth import kernel as kernels
from MaxText.layers.depth.aggregate import kernel_unsupported_reason, vmem_bytes_per_token
from MaxText.layers.depth.norms import Norms
from MaxText.parallelism.logical_sharding import axis_rules

device, N, C = targets.devices(target)[0], 256, 4
norms = Norms((0, 1, 2), 1e-5)

def arrays(number, *shape, dtype=jnp.bfloat16):
    one = jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
    return [one] * number

def all_kernels(weights, factors, sources, so_far, grad_sums):
    given = {"weights": weights, "sources": sources, "factors": factors}
    grads = given | {"grad_sums": grad_sums}
    return (
        kernels.forward(given, norms),
        kernels.backward(grads, norms),
        kernels.backward(grads | {"accumulated": so_far}, norms),
    )

with axis_rules(Mesh(np.array([device]), ("data",)), []):
    for D in (512, 2048, 4096, 5120):
        S = max(
            n for n in range(2, 50)
            if not kernel_unsupported_reason(
                D, "tpu", bytes_per_token=vmem_bytes_per_token(n, C, 2 * D),
                device_kind=device.device_kind,
            )
        )
        (weights,) = arrays(1, N, C * S, dtype=jnp.float32)
        (factors,) = arrays(1, 3, D, dtype=jnp.float32)
        states, ways = arrays(S, N, D), arrays(C, N, D)
        jax.jit(all_kernels).trace(weights, factors, states, states, ways).lower().compile()
        print(D, S, flush=True)
"""


@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-8"])
def test_the_largest_kernels_compile(name):
    sources = {int(width): int(number) for width, number in run(KERNELS, name)}
    assert sources[512] == 49 or name == "v4-8"
    # Those of the published models, but for wide ones on v4.
    assert sources[2048] >= 25
    assert sources[4096] >= (33 if name != "v4-8" else 8)
