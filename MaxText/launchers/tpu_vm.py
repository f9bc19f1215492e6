"""Manages Cloud TPU VMs through gcloud: create, copy the working tree, set up, run, stop."""

import contextlib
import dataclasses
import os
import shlex
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from MaxText.config.config_files import REPOSITORY
from MaxText.config.keys import Count
from MaxText.config.program_options import option
from MaxText.errors import UserError
from MaxText.hardware.chips import find_hardware
from MaxText.launchers.commands import Commands, LaunchOptions
from MaxText.runtime.start_up import NUM_DEVICES_VARIABLE

FOLDER = "maxtext"  # on each host, below the home folder
_LOGS = "logs"
_ARCHIVE = "maxtext.tar.gz"

_QUEUED = "queued-resources"
_WAITING = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "CREATING")
POLL_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GcloudOptions(LaunchOptions):
    """gcloud ACTION ...: Cloud TPU VMs."""

    name: str = option("", "TPU VM name.", required=True)
    zone: str = option("", "Zone of the TPU VM.", required=True)
    project: str = option(os.environ.get("CLOUDSDK_CORE_PROJECT", ""), "Project of the TPU VM.")
    accelerator_type: str = option("", "Accelerator type, e.g. v5p-32.", metavar="TYPE")
    version: str = option("", "Runtime version.")
    spot: bool = option(False, "Spot VM: cheaper, preempted at any time.")
    preemptible: bool = option(False, "As spot, but for at most 24 hours; of create only.")
    best_effort: bool = option(False, "The best-effort tier of queued resources; of queue only.")
    service_account: str = option("", "Service account of the VM.")
    scopes: str = option("", "Scopes of the service account, separated by commas.")
    gcloud: tuple[str, ...] = option(
        (),
        "Extra flag of create and queue, e.g. --gcloud=--network=NAME; may be given several times.",
        metavar="FLAG",
        repeated=True,
    )
    tail: Count = option(50, "Number of log lines.", metavar="NUMBER")
    follow: bool = option(False, "Stream new log lines.")
    worker: str = option("all", "Worker to read logs from.")


# Flags of gcloud that exclude each other: the kinds of capacity of a request.
_TIERS = ("spot", "preemptible", "best-effort", "guaranteed", "reserved")
_TOGETHER = {"guaranteed", "reserved"}  # a reservation is guaranteed
# Tier -> the action whose gcloud command has it.
_TIER_ACTIONS = {"preemptible": "create", "best-effort": "queue", "guaranteed": "queue"}


def check_options(options: GcloudOptions, actions: Sequence[str]) -> None:
    """Refuses contradictory flags of the requested VM, before any action.

    Args:
      options: Options of the command line. Flags within --gcloud= count as well.
      actions: Actions of launch.py, such as ("create", "copy").

    Raises:
      UserError: Two kinds of capacity, a flag given twice, or one that an action does not have.
    """
    extra_flags = [
        argument[2:].partition("=")[0] for argument in options.gcloud if argument.startswith("--")
    ]
    own_flags = _given_flags(options)
    tiers = [name for name in _TIERS if name in (*own_flags, *extra_flags)]
    problems = _repeated_flags(own_flags, extra_flags)
    if len(tiers) > 1 and not _TOGETHER.issuperset(tiers):
        problems.append(
            f"{' and '.join(f'--{name}' for name in tiers)} contradict each other: they name "
            "different kinds of capacity. Keep one."
        )
    for name in tiers:
        for action in ("create", "queue"):
            if action in actions and _TIER_ACTIONS.get(name, action) != action:
                problems.append(
                    f"--{name} is a flag of the action {_TIER_ACTIONS[name]}, and gcloud's command "
                    f"for {action} does not have it. Use --spot, or {_TIER_ACTIONS[name]}."
                )
    if problems:
        raise UserError("\n  ".join(problems))


def _given_flags(options: GcloudOptions) -> list[str]:
    """Returns the names of gcloud's flags that launch.py's own options set."""
    flags = [name for name, _ in _vm_flags(options)]
    if options.zone:
        flags.append("zone")
    if options.project:
        flags.append("project")
    if options.accelerator_type:
        flags.append("accelerator-type")
    if options.version:
        flags += ["version", "runtime-version"]
    return flags


def _repeated_flags(own_flags: Sequence[str], extra_flags: Sequence[str]) -> list[str]:
    """Returns a message for each flag of --gcloud= that is given twice."""
    messages = []
    for name in dict.fromkeys(extra_flags):
        if name in own_flags:
            messages.append(f"--{name} is given both by itself and as --gcloud=--{name}: keep one.")
        elif extra_flags.count(name) > 1 and name in (*_TIERS, "service-account", "scopes"):
            messages.append(f"--gcloud=--{name} is given twice: keep one.")
    return messages


def _vm_flags(options: GcloudOptions) -> list[tuple[str, str]]:
    """Returns the name and the text for gcloud of each flag of a request."""
    switches = {
        "spot": options.spot,
        "preemptible": options.preemptible,
        "best-effort": options.best_effort,
    }
    values = {"service-account": options.service_account, "scopes": options.scopes}
    flags = [(name, f"--{name}") for name, is_set in switches.items() if is_set]
    return flags + [(name, f"--{name}={value}") for name, value in values.items() if value]


class TpuVm:
    """The actions of launch.py on a TPU VM: its public methods.

    Commands run on all hosts.
    """

    def __init__(self, options: GcloudOptions, commands: Commands):
        self._options = options
        self._commands = commands

    def create(self) -> None:
        """Creates the TPU VM; fails if there is no capacity, for which `queue` waits."""
        self._request(self._gcloud("tpu-vm", "create", self._options.name), "version")

    def queue(self) -> None:
        """Requests a queued resource, and waits until it is active.

        Raises:
          UserError: The request was refused, failed, or was preempted.
        """
        options = self._options
        create = [*self._gcloud(_QUEUED, "create", options.name), f"--node-id={options.name}"]
        if options.best_effort:
            create.insert(1, "alpha")  # whose API has this tier
        self._request(create, "runtime-version")
        describe = [*self._gcloud(_QUEUED, "describe", options.name), "--format=value(state.state)"]
        while (state := self._commands.output(describe, in_dry_run="ACTIVE")) in _WAITING:
            time.sleep(POLL_SECONDS)
        if state != "ACTIVE":
            raise UserError(
                f"the request for {options.name} ended in state {state}. Its name is taken until "
                "launch.py gcloud delete-queued deletes it; then request another zone or type."
            )

    def _request(self, command: list[str], version: str) -> None:
        options = self._options
        if not (options.accelerator_type and options.version):
            raise UserError(
                "create and queue require --accelerator-type and --version, e.g. "
                "--accelerator-type=v5p-32 --version=v2-alpha-tpuv5 "
                "(gcloud compute tpus versions list)."
            )
        machine_flags = [
            f"--accelerator-type={options.accelerator_type}",
            f"--{version}={options.version}",
        ]
        flags = [text for _, text in _vm_flags(options)]
        self._commands.run([*command, *machine_flags, *flags, *options.gcloud])

    def copy(self) -> None:
        """Copies the working tree, except git-ignored files, to every host."""
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / _ARCHIVE
            if not self._commands.dry_run:
                _archive_worktree(archive)
            target = f"{self._options.name}:{_ARCHIVE}"
            command = self._gcloud("tpu-vm", "scp", str(archive), target)
            self._commands.run([*command, "--worker=all"])
        self._ssh(f"mkdir -p {FOLDER} && tar -xzf {_ARCHIVE} -C {FOLDER}")

    def setup(self) -> None:
        """Installs the requirements on every host."""
        self._ssh(f"cd {FOLDER} && bash setup.sh DEVICE=tpu")

    def run(self, arguments: Sequence[str]) -> None:
        """Starts train.py on every host in the background."""
        launch = [".venv/bin/python", "MaxText/train.py", *arguments]
        with contextlib.suppress(UserError):  # no type given, or newer than the table
            num_devices = find_hardware(self._options.accelerator_type).num_devices
            launch = ["env", f"{NUM_DEVICES_VARIABLE}={num_devices}", *launch]
        self._ssh(
            f"cd {FOLDER} && mkdir -p {_LOGS} && "
            f"if [ -f {_LOGS}/pid ] && kill -0 $(cat {_LOGS}/pid) 2>/dev/null; then "
            "echo 'a run is active here: stop it first' >&2; exit 1; fi && "
            f"(nohup {shlex.join(launch)} >> {_LOGS}/train.log 2>&1 < /dev/null & "
            f"echo $! > {_LOGS}/pid)"
        )

    def logs(self) -> None:
        """Prints the end of the log of the hosts."""
        options = self._options
        follow_flag = "-F " if options.follow else ""
        self._ssh(f"tail -n {options.tail} {follow_flag}{FOLDER}/{_LOGS}/train.log", options.worker)

    def status(self) -> None:
        """Prints gcloud's description of the VM."""
        self._commands.run(self._gcloud("tpu-vm", "describe", self._options.name))

    def stop(self) -> None:
        """Asks every host to save and stop."""
        pid = f"{FOLDER}/{_LOGS}/pid"
        self._ssh(f"if [ -f {pid} ]; then kill -TERM $(cat {pid}) || true; fi")

    def delete(self) -> None:
        """Deletes the VM."""
        self._commands.run([*self._gcloud("tpu-vm", "delete", self._options.name), "--quiet"])

    def delete_queued(self) -> None:
        """Deletes the queued resource with its TPU VM."""
        command = self._gcloud(_QUEUED, "delete", self._options.name)
        self._commands.run([*command, "--force", "--quiet"])

    def _ssh(self, command: str, worker: str = "all") -> None:
        ssh = self._gcloud("tpu-vm", "ssh", self._options.name)
        self._commands.run([*ssh, f"--worker={worker}", f"--command={command}"])

    def _gcloud(self, kind: str, action: str, *operands: str) -> list[str]:
        options = self._options
        location_flags = [
            f"--zone={options.zone}",
            *([f"--project={options.project}"] if options.project else []),
        ]
        return ["gcloud", "compute", "tpus", kind, action, *operands, *location_flags]


def _archive_worktree(archive: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        raise UserError(
            f"{REPOSITORY} is not a git repository, so its files cannot be listed: "
            f"{listing.stderr.decode(errors='replace').strip()}. Clone it with git."
        )
    with tarfile.open(archive, "w:gz") as tar:
        for name in filter(None, listing.stdout.decode().split("\0")):
            path = REPOSITORY / name
            if path.exists():  # skips uncommitted deletions
                tar.add(path, arcname=name, recursive=False)
