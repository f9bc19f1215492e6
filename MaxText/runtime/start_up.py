"""Start-up of a run: selects the platform, connects processes, lists devices.

Importing it does not import JAX, because the platform must be chosen first. Environment variables
say whether a process has others, and jax.distributed.initialize finds them where it can:

  OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK       Open MPI's mpirun; version 5 needs mpi4py
  SLURM_NTASKS, SLURM_PROCID                       srun
  metadata, TPU_WORKER_HOSTNAMES, MEGASCALE_*      TPU VMs and GKE
  JOB_COMPLETION_INDEX                             indexed Jobs of Kubernetes; needs jax[k8s]

JAX does not read these. They come first, and need a coordinator, the host and a free port of
process 0, from JAX_COORDINATOR_ADDRESS (host:port) or JAX_COORDINATOR_IP and JAX_COORDINATOR_PORT:

  JAX_NUM_PROCESSES, JAX_PROCESS_ID                launch.py local, jobset and sky
  NNODES, NODE_RANK                                MaxText's, of GPU nodes
  PMI_SIZE, PMI_RANK                               MPICH, Intel MPI
"""

import collections
import dataclasses
import faulthandler
import glob
import importlib.util
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.errors import UserError, first_line
from MaxText.runtime import peers, processes

DEFAULT_PORT = "1234"  # MaxText's
# XLA_FLAGS of processes that examine programs: they compile fast, not well. XLA's counts stay.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Expected number of devices over all processes; set by launch.py.
NUM_DEVICES_VARIABLE = "MAXTEXT_NUM_DEVICES"

_EXPLICIT = (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("NNODES", "NODE_RANK"))
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
_PMI = ("PMI_SIZE", "PMI_RANK")
# Set by srun, but not in the batch script itself, which is not a process of a run.
_SLURM_STEP_NODES = "SLURM_STEP_NODELIST"
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
# Keys that may differ between machines of a run.
_MACHINE_SPECIFIC_KEYS = {
    "dataset_path",
    "jax_cache_dir",
    "prepare_num_workers",
    "grain_worker_count",
}
_CONFIG = "maxtext/config"  # prefix of keys of the coordinator
_CONFIG_SECONDS = 300.0  # until all processes that have just been connected have said theirs


def choose_platform(hardware: str) -> list[str]:
    """Selects JAX's platform, before JAX is imported.

    Args:
      hardware: The configuration's key: "auto" leaves the choice to JAX; else "cpu", "gpu", "tpu".

    Returns:
      Log lines with the environment variables that affect JAX and XLA.
    """
    if hardware != "auto":
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(hardware, hardware)
    names = ("GLIBC_TUNABLES", "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    return [f"environment: {name}={os.environ[name]}" for name in names if os.environ.get(name)]


def initialize_distributed(hardware: str, heartbeat_timeout: float) -> list[str]:
    """Connects this process to the others of its run, if the environment names several.

    Call it in every process, after `PreemptionHandler.install` and before anything asks JAX for
    devices. From here on JAX swallows SIGTERM, which `PreemptionHandler.requested` reports.

    Args:
      hardware: The configuration's key of this name.
      heartbeat_timeout: Seconds; 0 keeps JAX's limits. Processes wait for each other up to six
        times as long, because the time for data preparation varies.

    Returns:
      Log lines; none for a single process.

    Raises:
      UserError: The processes could not be connected.
    """
    cluster = find_cluster(os.environ, hardware)
    if cluster is None:
        return []
    import jax

    # Longer than the watchdog's timeout, which reports a lost process with a table.
    limits: dict[str, Any] = {"initialization_timeout": 300}
    if heartbeat_timeout > 0:
        seconds = math.ceil(heartbeat_timeout)
        limits["initialization_timeout"] = 6 * seconds
        limits["heartbeat_timeout_seconds"] = seconds + max(10, min(60, seconds))
        limits["shutdown_timeout_seconds"] = seconds
    # If JAX itself aborts the process, the stack is dumped.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    try:
        jax.distributed.initialize(**_initialize_arguments(cluster), **limits)
    # JAX's metadata client raises errors of requests, which are OSErrors.
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        if not cluster.is_certain:
            return [f"single process: {cluster.source} lists no others ({first_line(error)})"]
        raise _connection_error(cluster, error, limits["initialization_timeout"]) from error
    num_processes = cluster.num_processes or jax.process_count()
    processes.mark_initialized(num_processes)
    coordinator = "" if cluster.address is None else f", coordinator {cluster.address}"
    return [f"process {jax.process_index()} of {num_processes} (by {cluster.source}){coordinator}"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run, as this process's environment describes them.

    Attributes:
      source: Variables that it was detected from, for messages.
      address: host:port of the coordinator; None if JAX detects the cluster.
      num_processes: Processes of the run; None if only JAX knows.
      process_id: Id of this process, from 0; None if only JAX knows.
      local_device_ids: GPUs of this process, () for all of the machine; None leaves them to JAX:
        the one of the process's number on its node with SLURM and Open MPI, else all.
      is_certain: Whether failing to connect is an error. A machine with TPU chips may be alone.
    """

    source: str
    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None
    is_certain: bool = True


def _initialize_arguments(cluster: Cluster) -> dict[str, Any]:
    """Returns the arguments of jax.distributed.initialize; none if JAX detects the cluster."""
    arguments: dict[str, Any] = {}
    if cluster.local_device_ids is not None:
        arguments["local_device_ids"] = cluster.local_device_ids
    if cluster.address is None:
        return arguments
    arguments |= {
        "coordinator_address": cluster.address,
        "num_processes": cluster.num_processes,
        "process_id": cluster.process_id,
        "cluster_detection_method": "deactivate",
    }
    host = cluster.address.rpartition(":")[0]
    if host in ("localhost", "[::1]") or host.startswith("127."):
        # No other machine needs to reach it.
        arguments["coordinator_bind_address"] = cluster.address
    return arguments


def _connection_error(cluster: Cluster, error: Exception, timeout: int) -> UserError:
    process = "this process"
    if cluster.num_processes is not None:
        process = f"process {cluster.process_id} of {cluster.num_processes}"
    coordinator = "" if cluster.address is None else f" over {cluster.address}"
    remedy = ""
    if cluster.address is None and cluster.num_processes is not None:
        remedy = " JAX_COORDINATOR_ADDRESS=HOST:PORT sets the coordinator where JAX finds none."
    return UserError(
        f"{process} (by {cluster.source}) could not be connected with the others{coordinator}: "
        f"{first_line(error)}\n"
        f"  What to do: check that all {cluster.num_processes or ''} processes are started, with "
        "the same coordinator and distinct ids, that process 0 runs on the coordinator's host, "
        "and that its port is free and open. Processes wait for each other for "
        f"{timeout} s (6 x heartbeat_timeout).{remedy}"
    )


def find_cluster(environment: Mapping[str, str], hardware: str) -> Cluster | None:
    """Returns the cluster that environment variables describe; None for a single process.

    Raises:
      UserError: The variables are incomplete or contradict each other.
    """
    for variables in (*_EXPLICIT, _OPEN_MPI, _SLURM, _PMI):
        if variables == _SLURM and _SLURM_STEP_NODES not in environment:
            continue
        set_names = [name for name in variables if environment.get(name)]
        # Many schedulers set NNODES alone for other purposes.
        if (
            not set_names
            or set_names == ["NNODES"]
            or (len(set_names) == 1 and variables not in _EXPLICIT)
        ):
            continue
        if len(set_names) == 1:
            (present,) = set_names
            (missing,) = set(variables) - {present}
            raise UserError(
                f"{present}={environment[present]} is set but {missing} is not. Set both, or "
                "unset both to run a single process."
            )
        count_name, rank_name = variables
        count = _integer(environment, count_name)
        rank = _integer(environment, rank_name)
        if not 0 <= rank < count:
            raise UserError(
                f"{rank_name}={rank} is not a process of {count_name}={count}: ids range from 0 "
                f"to {count - 1}."
            )
        if count == 1:
            return None
        address = _coordinator(environment)
        if address is None and variables not in (_SLURM, _OPEN_MPI):
            raise UserError(
                f"{count_name}={count} requests several processes, but no coordinator is set. Set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT (or JAX_COORDINATOR_IP and "
                "JAX_COORDINATOR_PORT) to the host of process 0 and a free port there, the same "
                "for all processes."
            )
        ids = _local_device_ids(environment, variables)
        return Cluster(" and ".join(variables), address, count, rank, ids)
    return _tpu(environment, hardware) or _kubernetes(environment)


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name}={environment[name]} is not an integer.") from None


def _coordinator(environment: Mapping[str, str]) -> str | None:
    """Returns host:port of the coordinator that the user or a launcher set; None without one."""
    address = environment.get("JAX_COORDINATOR_ADDRESS") or environment.get("JAX_COORDINATOR_IP")
    if not address:
        return None
    is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if is_bare_ipv6:
        address = f"[{address}]"
    port = environment.get("JAX_COORDINATOR_PORT") or DEFAULT_PORT
    return address if re.search(r":\d+$", address) else f"{address}:{port}"


def _local_device_ids(
    environment: Mapping[str, str], variables: tuple[str, str]
) -> tuple[int, ...] | None:
    """Returns the GPUs of a process: one of its own if its node has several processes, else all.

    JAX gives each process of SLURM and Open MPI one GPU, also a process that has a node to itself,
    and one to which the scheduler shows only its own.
    """
    if environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None  # read by JAX
    variable_names = {
        _SLURM: ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
        _OPEN_MPI: ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    }.get(variables)
    if variable_names is None:
        return None
    *tasks_per_node, local_rank = (environment.get(name, "") for name in variable_names)
    # e.g. "4(x2),1"; the largest number counts.
    numbers = re.findall(r"(?<!x)\b\d+", next(filter(None, tasks_per_node), ""))
    if max(map(int, numbers), default=1) == 1 or not local_rank.isdecimal():
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) <= int(local_rank):
        return ()  # the scheduler gave each process its own
    return (int(local_rank),)


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


def _kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Returns that JAX asks Kubernetes about the other pods of an indexed Job, if it can."""
    is_indexed_job = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment)
    if is_indexed_job and importlib.util.find_spec("kubernetes") is not None:
        return Cluster("the Job of this pod")
    return None


def find_devices(hardware: str) -> list[Any]:
    """Returns the devices of all processes.

    Raises:
      UserError: There are none, the processes have different numbers of them, or their number is
        not what the launcher expects (NUM_DEVICES_VARIABLE).
    """
    import jax

    try:
        devices = jax.devices()
    # If there is no GPU at all, JAX 0.10 fails an assertion without message.
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error, "it sees none on this machine")
        raise UserError(
            f"hardware={hardware}: jax finds no such device ({reason}).\n"
            "  What to do: install the requirements for it (setup.sh DEVICE=tpu|gpu), or set "
            "hardware=cpu."
        ) from error
    devices_by_process = collections.Counter(device.process_index for device in devices)
    device_counts = [devices_by_process[process] for process in range(processes.count())]
    if len(set(device_counts)) > 1:
        counts = ", ".join(
            f"process {process} has {num_devices}"
            for process, num_devices in enumerate(device_counts)
        )
        raise UserError(
            f"processes have different numbers of devices: {counts}. Check for hidden, busy or "
            "failed devices."
        )
    expected = os.environ.get(NUM_DEVICES_VARIABLE, "")
    if expected and expected != str(len(devices)):
        raise UserError(
            f"{NUM_DEVICES_VARIABLE}={expected}, and jax finds {len(devices)} devices "
            f"({devices[0].device_kind}) in {processes.count()} processes. Start on that many "
            "devices, or request as many as there are."
        )
    return devices


def assert_same_config(config_flat: Mapping[str, Any]) -> None:
    """Raises UserError in all processes if their configurations differ. Collective.

    Call it once, right after `initialize_distributed`: what processes do together depends on their
    configurations, and one with another configuration may wait for the others where they never
    come. The processes compare through the coordinator, before they initialize devices.

    Args:
      config_flat: Values by key; keys that may differ between machines are not compared.
    """
    if processes.count() == 1:
        return
    client = peers.connected_client()
    process = peers.coordinator_process()
    timeout = peers.milliseconds(_CONFIG_SECONDS)
    digests = {
        name: zlib.crc32(repr(value).encode())
        for name, value in config_flat.items()
        if name not in _MACHINE_SPECIFIC_KEYS
    }
    client.key_value_set(f"{_CONFIG}/{process}", json.dumps(digests))
    if process == 0:
        digests_by_process = [
            json.loads(client.blocking_key_value_get(f"{_CONFIG}/{number}", timeout))
            for number in range(processes.count())
        ]
        client.key_value_set(f"{_CONFIG}/difference", json.dumps(_difference(digests_by_process)))
    difference = json.loads(client.blocking_key_value_get(f"{_CONFIG}/difference", timeout))
    if difference:
        peers.wait_until_told(f"{_CONFIG}/told")
        raise UserError(difference)


def _difference(digests_by_process: Sequence[Mapping[str, int]]) -> str:
    """Returns which processes have another configuration than process 0; "" if none has.

    Args:
      digests_by_process: A digest of each value, by key, of each process.
    """
    first = digests_by_process[0]
    of_other_versions = [
        process
        for process, digests in enumerate(digests_by_process)
        if digests.keys() != first.keys()
    ]
    if of_other_versions:
        return (
            f"process {', '.join(map(str, of_other_versions))} knows other configuration keys than "
            "process 0: it runs a different version of this program. Deploy the same version to "
            "all machines."
        )
    different = [process for process, digests in enumerate(digests_by_process) if digests != first]
    if not different:
        return ""
    names = sorted(
        name
        for name in first
        if any(digests[name] != first[name] for digests in digests_by_process)
    )
    return (
        f"process {', '.join(map(str, different))} has other values of {', '.join(names)} than "
        "process 0. Give all processes the same configuration, and a run_name that does not "
        "contain the time."
    )
