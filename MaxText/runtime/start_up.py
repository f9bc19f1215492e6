"""Start-up: platform, processes and devices.

Importing it does not import JAX. The processes of a run are detected from environment variables.

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

import collections
import dataclasses
import faulthandler
import glob
import importlib.util
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from MaxText.errors import UserError, first_line
from MaxText.runtime import processes

DEFAULT_PORT = "1234"  # MaxText's
# Expected number of devices over all processes; set by launch.py.
NUM_DEVICES_VARIABLE = "MAXTEXT_NUM_DEVICES"

_EXPLICIT = (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("NNODES", "NODE_RANK"))
_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID")
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


def choose_platform(hardware: str) -> list[str]:
    """Selects JAX's platform; returns relevant variables as log lines."""
    if hardware != "auto":
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(hardware, hardware)
    names = ("GLIBC_TUNABLES", "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    return [f"environment: {name}={os.environ[name]}" for name in names if os.environ.get(name)]


def initialize_distributed(hardware: str, heartbeat_timeout: float) -> list[str]:
    """Connects the processes of the environment; returns log lines.

    Call it in every process, after `PreemptionHandler.install` and before anything asks JAX for
    devices. Processes wait up to six times heartbeat_timeout (seconds; 0 keeps JAX's limits),
    because data preparation varies. From here on JAX swallows SIGTERM, which
    `PreemptionHandler.requested` reports.
    """
    found = find_cluster(os.environ, hardware)
    if found is None:
        return []
    import jax

    # Longer than the watchdog's timeout, which reports a lost process with a table.
    limits: dict[str, Any] = {"initialization_timeout": 300}
    if heartbeat_timeout > 0:
        seconds = math.ceil(heartbeat_timeout)
        limits["initialization_timeout"] = 6 * seconds
        limits["heartbeat_timeout_seconds"] = seconds + max(10, min(60, seconds))
        limits["shutdown_timeout_seconds"] = seconds
    given: dict[str, Any] = {}
    if found.address is not None:
        given = {
            "coordinator_address": found.address,
            "num_processes": found.num_processes,
            "process_id": found.process_id,
            "cluster_detection_method": "deactivate",
        }
        host = found.address.rpartition(":")[0]
        if host in ("localhost", "[::1]") or host.startswith("127."):
            # No other machine needs to reach it.
            given["coordinator_bind_address"] = found.address
        if found.local_device_ids is not None:
            given["local_device_ids"] = found.local_device_ids
    # If JAX itself aborts the process, the stack is dumped.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    try:
        jax.distributed.initialize(**given, **limits)
    # JAX's metadata client raises errors of requests, which are OSErrors.
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        if not found.is_certain:
            return [f"single process: {found.source} lists no others ({first_line(error)})"]
        which = "this process"
        over = ""
        if found.num_processes is not None:
            which = f"process {found.process_id} of {found.num_processes}"
            over = f" over {found.address}"
        raise UserError(
            f"{which} (by {found.source}) could not be connected with the others{over}: "
            f"{first_line(error)}\n"
            f"  What to do: check that all {found.num_processes or ''} processes are started, with "
            "the same coordinator and distinct ids, that process 0 runs on the coordinator's host, "
            "and that its port is free and open. Processes wait for each other for "
            f"{limits['initialization_timeout']} s (6 x heartbeat_timeout)."
        ) from error
    num_processes = found.num_processes or jax.process_count()
    processes.mark_initialized(num_processes)
    where = "" if found.address is None else f", coordinator {found.address}"
    return [f"process {jax.process_index()} of {num_processes} (by {found.source}){where}"]


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
    for pair in (*_EXPLICIT, _SLURM, *_MPI):
        if pair == _SLURM and _SLURM_STEP_NODES not in environment:
            continue
        given = [name for name in pair if environment.get(name)]
        # Many schedulers set NNODES alone for other purposes.
        if not given or given == ["NNODES"] or (len(given) == 1 and pair not in _EXPLICIT):
            continue
        if len(given) == 1:
            (missing,) = set(pair) - set(given)
            raise UserError(
                f"{given[0]}={environment[given[0]]} is set but {missing} is not. Set both, or "
                "unset both to run a single process."
            )
        count, rank = (_integer(environment, name) for name in pair)
        if not 0 <= rank < count:
            raise UserError(
                f"{pair[1]}={rank} is not a process of {pair[0]}={count}: ids range from 0 to "
                f"{count - 1}."
            )
        if count == 1:
            return None
        ids = _local_device_ids(environment, pair)
        return Cluster(" and ".join(pair), _coordinator(environment, pair), count, rank, ids)
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
            job = int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0)
            port = str(61440 + job % 4096)
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
    names = {
        _SLURM: ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"),
        _MPI[0]: ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    }.get(pair, ("",))
    *sharing, local = (environment.get(name, "") for name in names)
    # e.g. "4(x2),1"; the largest number counts.
    numbers = re.findall(r"(?<!x)\b\d+", next(filter(None, sharing), ""))
    if max(map(int, numbers), default=1) == 1 or not local.isdecimal():
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


def find_devices(hardware: str) -> list[Any]:
    """Returns all processes' devices; UserError if none or unequal."""
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
    of_process = collections.Counter(device.process_index for device in devices)
    numbers = [of_process[process] for process in range(processes.count())]
    if len(set(numbers)) > 1:
        words = ", ".join(f"process {process} has {n}" for process, n in enumerate(numbers))
        raise UserError(
            f"processes have different numbers of devices: {words}. Check for hidden, busy or "
            "failed devices."
        )
    asked = os.environ.get(NUM_DEVICES_VARIABLE, "")
    if asked and asked != str(len(devices)):
        raise UserError(
            f"{NUM_DEVICES_VARIABLE}={asked}, and jax finds {len(devices)} devices "
            f"({devices[0].device_kind}) in {processes.count()} processes. Start on that many "
            "devices, or request as many as there are."
        )
    return devices


def assert_same_config(config_flat: Mapping[str, Any]) -> None:
    """Raises UserError if configurations differ between processes."""
    if processes.count() == 1:
        return
    import numpy as np
    from jax.experimental import multihost_utils

    names = sorted(set(config_flat) - _MACHINE_SPECIFIC_KEYS)
    # Names first: another version has different keys, and then values do not line up.
    texts = ["\n".join(names)]
    for compared in (texts, [repr(config_flat[name]) for name in names]):
        digests = np.array([zlib.crc32(text.encode()) for text in compared], np.uint32)
        of_all = np.asarray(multihost_utils.process_allgather(digests))
        others = np.flatnonzero((of_all != of_all[0]).any(axis=1))
        if not len(others):
            continue
        which = "process " + ", ".join(map(str, others))
        if compared is texts:
            raise UserError(
                f"{which} knows other configuration keys than process 0: it runs a different "
                "version of this program. Deploy the same version to all machines."
            )
        keys = np.flatnonzero((of_all != of_all[0]).any(axis=0))
        raise UserError(
            f"{which} has other values of {', '.join(names[key] for key in keys)} than process 0. "
            "Give all processes the same configuration, and a run_name that does not contain the "
            "time."
        )
