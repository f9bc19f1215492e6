"""Detection of a run's processes from environment variables.

  JAX_NUM_PROCESSES, JAX_PROCESS_ID                JAX's names; launch.py local
  NNODES, NODE_RANK                                MaxText's, of GPU nodes
  SLURM_NTASKS, SLURM_PROCID                       srun
  OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK       Open MPI's mpirun
  PMI_SIZE, PMI_RANK                               MPICH, Intel MPI
  metadata, TPU_WORKER_HOSTNAMES, MEGASCALE_*      TPU VMs and GKE; read by JAX itself

All but the last need a coordinator, the host and a free port of process 0, from
JAX_COORDINATOR_ADDRESS (host:port) or JAX_COORDINATOR_IP and JAX_COORDINATOR_PORT; with SLURM it is
the first node.
"""

import dataclasses
import glob
import importlib.util
import re
from collections.abc import Mapping

from MaxText.errors import UserError

DEFAULT_PORT = "1234"  # MaxText's
# Expected number of devices over all processes; set by launch.py.
NUM_DEVICES_VARIABLE = "MAXTEXT_NUM_DEVICES"

_EXPLICIT = (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("NNODES", "NODE_RANK"))
_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID")
# Set by srun, but not in the batch script itself, which is not a process of a run.
_SLURM_STEP_NODES = "SLURM_STEP_NODELIST"
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run."""

    source: str  # variables it was detected from, for messages
    address: str | None = None  # host:port of the coordinator; None if JAX asks the TPU's metadata
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None  # GPUs of this process; None for all
    is_certain: bool = True  # whether failing to connect is an error; TPU chips may be a lone host


def find_cluster(environment: Mapping[str, str], hardware: str) -> Cluster | None:
    """Returns the cluster in the environment, None for a single process."""
    for count_name, rank_name in (*_EXPLICIT, _SLURM, *_MPI):
        pair = (count_name, rank_name)
        if pair == _SLURM and _SLURM_STEP_NODES not in environment:
            continue
        given = [name for name in pair if environment.get(name)]
        if not given:
            continue
        if len(given) == 1:
            # Many schedulers set NNODES alone for other purposes.
            if pair not in _EXPLICIT or given == ["NNODES"]:
                continue
            (missing,) = set(pair) - set(given)
            raise UserError(
                f"{given[0]}={environment[given[0]]} is set but {missing} is not. Set both, or "
                "unset both to run a single process."
            )
        count, rank = (_integer(environment, name) for name in pair)
        if not 0 <= rank < count:
            raise UserError(
                f"{rank_name}={rank} is not a process of {count_name}={count}: ids range from 0 to "
                f"{count - 1}."
            )
        if count == 1:
            return None
        address = _coordinator(environment, pair)
        source = f"{count_name} and {rank_name}"
        return Cluster(source, address, count, rank, _local_device_ids(environment, pair))
    return _tpu(environment, hardware)


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name}={environment[name]} is not an integer.") from None


def _coordinator(environment: Mapping[str, str], pair: tuple[str, str]) -> str:
    port = environment.get("JAX_COORDINATOR_PORT") or DEFAULT_PORT
    address = environment.get("JAX_COORDINATOR_ADDRESS") or environment.get("JAX_COORDINATOR_IP")
    if not address and pair == _SLURM:
        address = _first_host(environment[_SLURM_STEP_NODES])
        if not environment.get("JAX_COORDINATOR_PORT"):
            # Jobs may share a node; these ports are above most systems' ephemeral range.
            port = str(
                61440 + int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0) % 4096
            )
    if not address:
        raise UserError(
            f"{pair[0]}={environment[pair[0]]} requests several processes, but no coordinator is "
            "set. Set JAX_COORDINATOR_ADDRESS=HOST:PORT (or JAX_COORDINATOR_IP and "
            "JAX_COORDINATOR_PORT) to the host of process 0 and a free port there, the same for "
            "all processes."
        )
    is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if is_bare_ipv6:
        address = f"[{address}]"
    return address if re.search(r":\d+$", address) else f"{address}:{port}"


def _first_host(nodes: str) -> str:
    """Parses SLURM's node list: "gpu[007-012,20],cpu3" -> "gpu007"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None  # matches the empty string
    return "".join(part or "" for part in match.groups())


def _local_device_ids(
    environment: Mapping[str, str], pair: tuple[str, str]
) -> tuple[int, ...] | None:
    """Assigns one GPU per process, unless the environment did."""
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # read by JAX
    if pair == _SLURM:
        sharing = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
            "SLURM_NTASKS_PER_NODE", "1"
        )
        local = environment.get("SLURM_LOCALID")
    elif pair == _MPI[0]:
        sharing = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        local = environment.get("OMPI_COMM_WORLD_LOCAL_RANK")
    else:
        return None
    # e.g. "4(x2),1"; the largest number counts.
    most = max((int(number) for number in re.findall(r"(?<!x)\b\d+", sharing)), default=1)
    if most == 1 or local is None or not local.isdecimal():
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) <= int(local):
        return None  # the scheduler gave each process its own
    return (int(local),)


def _tpu(environment: Mapping[str, str], hardware: str) -> Cluster | None:
    platforms = environment.get("JAX_PLATFORMS", "")
    if hardware not in ("auto", "tpu") or (platforms and "tpu" not in platforms):
        return None
    for name in _TPU_HOSTS:
        if "," in environment.get(name, ""):
            return Cluster(name)
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    if slices.isdecimal() and int(slices) > 1:
        return Cluster("MEGASCALE_NUM_SLICES")
    if environment.get("TPU_SKIP_MDS_QUERY") or importlib.util.find_spec("libtpu") is None:
        return None
    # Devices of other kinds use /dev/vfio, too.
    has_chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return Cluster("the metadata of this TPU VM", is_certain=False) if has_chips else None
