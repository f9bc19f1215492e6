"""A training loop as train.py has it, with an update that costs nothing. Run by test_ends.py.

Arguments: heartbeat_timeout, then process:step:what for what goes wrong, where `what` is raise,
hang, kill or freeze.
"""

import os
import signal
import sys
import time
from contextlib import closing

from MaxText import exit_codes
from MaxText.runtime import peers, processes, start_up
from MaxText.runtime.preemption import PreemptionHandler
from MaxText.runtime.watchdog import Watchdog


def go_wrong(what: str, board: peers.StatusBoard, process: int, step: int) -> None:
    while board.row(process)["step"] != step:  # it says where
        time.sleep(0.01)
    if what == "raise":
        raise ValueError("a bug")
    if what == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)


def main() -> int:
    timeout, *wrong = sys.argv[1:]
    stop = PreemptionHandler.install()
    for line in start_up.initialize_distributed("cpu", float(timeout)):
        print(line, flush=True)
    start_up.assert_same_config({"run_name": "loop", "dataset_path": str(os.getpid())})
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    devices = start_up.find_devices("cpu")
    print("devices", len(devices))
    us = jax.process_index()
    store = peers.coordinator_client()
    assert store is not None
    board = peers.StatusBoard(store, jax.process_count())
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("data",)), jax.sharding.PartitionSpec("data")
    )
    update = jax.jit(lambda x: x.sum())
    watching = Watchdog(float(timeout), us, jax.process_count(), store=store).start()
    processes.set_watchdog(watching)
    with closing(watching) as watchdog:
        try:
            watchdog.enter("compile")
            multihost_utils.sync_global_devices("compiled")
            for step in range(2000):
                watchdog.enter("data", step)
                for fault in wrong:
                    process, at, what = fault.split(":")
                    if (us, step) == (int(process), int(at)):
                        go_wrong(what, board, us, step)
                mine = np.ones(jax.local_device_count(), np.float32)
                batch = jax.make_array_from_process_local_data(sharding, mine)
                watchdog.enter("step", step)
                total = float(update(batch))
                print(f"step {step}: {total:g}", flush=True)
                time.sleep(0.01)
                if stop.requested(step):
                    print("saving after", step, flush=True)
                    return exit_codes.PREEMPTED
                if not wrong and step == 100 and timeout == "100":
                    break
        except BaseException as error:
            processes.fail(error)
            raise
        watchdog.leave()
        processes.shutdown()
    if us == 0:
        time.sleep(1)  # a tracker that takes its time
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
