"""Start-up; importing it does not import JAX."""

import collections
import faulthandler
import math
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from MaxText.errors import UserError, first_line
from MaxText.runtime import cluster, processes
from MaxText.runtime.cluster import NUM_DEVICES_VARIABLE

# Keys that may differ between machines of a run.
_MACHINE_SPECIFIC_KEYS = {
    "dataset_path", "jax_cache_dir", "prepare_num_workers", "grain_worker_count"
}  # fmt: skip


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
    found = cluster.find_cluster(os.environ, hardware)
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
        which = f"{found.source} describes several processes, and connecting them failed"
        if found.num_processes is not None:
            which = (
                f"process {found.process_id} of {found.num_processes} (by {found.source}) could "
                f"not be connected with the others over {found.address}"
            )
        raise UserError(
            f"{which}: {first_line(error)}\n"
            f"  What to do: check that all {found.num_processes or ''} processes are started, with "
            "the same coordinator and distinct ids, that process 0 runs on the coordinator's host, "
            "and that its port is free and open. Processes wait for each other for "
            f"{limits['initialization_timeout']} s (6 x heartbeat_timeout)."
        ) from error
    num_processes = found.num_processes or jax.process_count()
    processes.mark_initialized(num_processes)
    where = "" if found.address is None else f", coordinator {found.address}"
    return [f"process {jax.process_index()} of {num_processes} (by {found.source}){where}"]


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
