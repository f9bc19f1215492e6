"""Cloud TPU VMs by gcloud: made, filled, set up, started on all hosts at once, looked at, ended."""

import shlex
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from MaxText.config.config_files import REPOSITORY
from MaxText.cost.hardware import find
from MaxText.errors import UserError
from MaxText.launchers.commands import Commands, Retry
from MaxText.runtime.cluster import NUM_DEVICES_VARIABLE

# On each host, below the home folder.
FOLDER = "maxtext"
_LOGS = "logs"
_ARCHIVE = "maxtext.tar.gz"

_WAITING = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "CREATING")


class TpuVm(NamedTuple):
    """Which TPU, and how it is asked for.

    Attributes:
      name: of the TPU VM, and of the queued resource.
      zone: such as us-central2-b.
      project: of the cloud; empty for gcloud's own setting.
      accelerator_type: such as v5p-32; for create and queue.
      version: of the runtime; for create and queue.
      spot: cheaper, and taken away at any time.
      retry: while there is no capacity.
      flags: further ones of gcloud, for create and queue.
    """

    name: str
    zone: str
    project: str = ""
    accelerator_type: str = ""
    version: str = ""
    spot: bool = False
    retry: Retry = Retry(1, 60.0)
    flags: tuple[str, ...] = ()


class TpuVmLaunch:
    """The actions on one TPU VM, each a method; every command is run on all of its hosts."""

    def __init__(self, tpu: TpuVm, commands: Commands):
        """
        Args:
          tpu: which one.
          commands: runs or prints them.
        """
        self._tpu = tpu
        self._commands = commands

    def create(self) -> None:
        """Makes the TPU VM; asks again while there is no capacity."""
        tpu = self._need_type("create")
        spot = ["--spot"] if tpu.spot else []
        self._commands.run(
            [
                *self._vm("create", tpu.name),
                f"--accelerator-type={tpu.accelerator_type}",
                f"--version={tpu.version}",
                *spot,
                *tpu.flags,
            ],
            retry=tpu.retry,
        )

    def queue(self) -> None:
        """Asks for the TPU VM and waits in the queue until it is there; asks again if refused."""
        tpu = self._need_type("queue")
        spot = ["--spot"] if tpu.spot else []
        for number in range(1, tpu.retry.tries + 1):
            self._commands.run(
                [
                    *self._queued("create", tpu.name),
                    f"--node-id={tpu.name}",
                    f"--accelerator-type={tpu.accelerator_type}",
                    f"--runtime-version={tpu.version}",
                    *spot,
                    *tpu.flags,
                ],
                retry=tpu.retry,
            )
            state = self._wait_in_queue()
            if state == "ACTIVE":
                return
            # What was refused or taken away holds the name.
            self._commands.run([*self._queued("delete", tpu.name), "--force", "--quiet"])
            if number < tpu.retry.tries:
                time.sleep(tpu.retry.seconds)
        raise UserError(
            f"the request for {tpu.name} ended in state {state}, {tpu.retry.tries} times. Try "
            "another zone or type, or more --tries."
        )

    def _wait_in_queue(self) -> str:
        describe = [*self._queued("describe", self._tpu.name), "--format=value(state.state)"]
        while True:
            state = self._commands.output(describe, in_dry_run="ACTIVE")
            if state not in _WAITING:
                return state
            time.sleep(self._tpu.retry.seconds)

    def copy(self) -> None:
        """Copies this working tree, without what git ignores, to ~/maxtext on every host."""
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / _ARCHIVE
            if not self._commands.dry_run:
                _pack(archive)
            self._commands.run(
                [*self._vm("scp", str(archive), f"{self._tpu.name}:{_ARCHIVE}"), "--worker=all"]
            )
        self._ssh(f"mkdir -p {FOLDER} && tar -xzf {_ARCHIVE} -C {FOLDER}")

    def setup(self) -> None:
        """Installs the requirements on every host."""
        self._ssh(f"cd {FOLDER} && bash setup.sh DEVICE=tpu")

    def run(self, arguments: Sequence[str], max_restarts: int) -> None:
        """Starts training on every host, in the background; each host restarts its process.

        Args:
          arguments: of train.py.
          max_restarts: of each host, in a row without a new checkpoint.
        """
        launch = [
            *self._expected_devices(),
            ".venv/bin/python", "MaxText/launch.py", "local", "1", "--supervise",
            f"--max-restarts={max_restarts}", f"--logs={_LOGS}", "--", *arguments,
        ]  # fmt: skip
        self._ssh(
            f"cd {FOLDER} && mkdir -p {_LOGS} && "
            f"if [ -f {_LOGS}/pid ] && kill -0 $(cat {_LOGS}/pid) 2>/dev/null; then "
            "echo 'a run is at work here: stop it first' >&2; exit 1; fi && "
            f"(nohup {shlex.join(launch)} >> {_LOGS}/launch.log 2>&1 < /dev/null & "
            f"echo $! > {_LOGS}/pid)"
        )

    def _expected_devices(self) -> list[str]:
        """Sets the number of jax devices for the run, where --type tells it."""
        try:
            number = find(self._tpu.accelerator_type).num_devices
        except UserError:  # not given, or newer than the table
            return []
        return ["env", f"{NUM_DEVICES_VARIABLE}={number}"]

    def logs(self, lines: int, follow: bool, worker: str) -> None:
        """Shows the end of what the hosts print."""
        option = "-F " if follow else ""
        self._ssh(f"tail -n {lines} {option}{FOLDER}/{_LOGS}/launch.log", worker)

    def stop(self) -> None:
        """Asks every host to save and stop."""
        pid = f"{FOLDER}/{_LOGS}/pid"
        self._ssh(f"if [ -f {pid} ]; then kill -TERM $(cat {pid}) || true; fi")

    def status(self) -> None:
        """Shows what gcloud knows of the TPU VM."""
        self._commands.run(self._vm("describe", self._tpu.name))

    def delete(self) -> None:
        """Deletes the TPU VM."""
        self._commands.run([*self._vm("delete", self._tpu.name), "--quiet"])

    def delete_queued(self) -> None:
        """Deletes the queued resource with its TPU VM."""
        self._commands.run([*self._queued("delete", self._tpu.name), "--force", "--quiet"])

    def _ssh(self, command: str, worker: str = "all") -> None:
        self._commands.run(
            [*self._vm("ssh", self._tpu.name), f"--worker={worker}", f"--command={command}"]
        )

    def _vm(self, action: str, *operands: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", action, *operands, *self._place()]

    def _queued(self, action: str, *operands: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", action, *operands, *self._place()]

    def _place(self) -> list[str]:
        project = [f"--project={self._tpu.project}"] if self._tpu.project else []
        return [f"--zone={self._tpu.zone}", *project]

    def _need_type(self, action: str) -> TpuVm:
        tpu = self._tpu
        if not (tpu.accelerator_type and tpu.version):
            raise UserError(
                f"{action} needs --type and --version, as --type=v5p-32 "
                "--version=v2-alpha-tpuv5 (gcloud compute tpus versions list)."
            )
        return tpu


def _pack(archive: Path) -> None:
    """The files of the working tree that git does not ignore, as a tar archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        raise UserError(
            f"{REPOSITORY} is no git repository, so it is not known which files belong to it: "
            f"{listed.stderr.decode(errors='replace').strip()}. Clone it with git."
        )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            path = Path(REPOSITORY) / name
            if path.exists():  # not one that is deleted and not yet committed
                tar.add(path, arcname=name, recursive=False)
