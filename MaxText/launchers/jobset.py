"""Submits a run as a Kubernetes JobSet, which Kueue can queue.

The manifest (JobSet v1alpha2) has one indexed Job per slice with one pod per host. A pod that ends
with an exit code after which the same command resumes, or by a signal, restarts the whole JobSet,
as all processes of a run belong together; one that ends with a mistake or a diverged loss fails it.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from MaxText import exit_codes
from MaxText.config.keys import Count, Natural
from MaxText.config.program_options import option
from MaxText.errors import UserError
from MaxText.launchers.commands import (
    Commands,
    LaunchOptions,
    Log,
    RunArguments,
    manifest_yaml,
)
from MaxText.runtime.start_up import DEFAULT_PORT, NUM_DEVICES_VARIABLE

_CONTAINER = "train"
_REPLICATED_JOB = "hosts"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_SECONDS_TO_SAVE = 180  # between SIGTERM and SIGKILL
# A JobSet's name is part of the host names of its pods: NAME-hosts-0-0.NAME, at most 63 characters.
_LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSetOptions(LaunchOptions):
    """jobset submit, status, logs or stop: a Kubernetes JobSet."""

    name: str = option("", "Name of the JobSet, by default made of run_name.", metavar="NAME")
    image: str = option("", "Container image with the project and its dependencies.")
    tpu: str = option("", "GKE's TPU label, e.g. tpu-v5p-slice.", metavar="LABEL")
    topology: str = option("", "TPU topology of a slice, e.g. 2x2x4.", metavar="AxBxC")
    chips_per_host: Count = option(4, "TPU chips of a host.", metavar="NUMBER")
    slices: Count = option(1, "TPU slices.", metavar="NUMBER")
    hosts: Count = option(1, "Hosts with GPUs or CPUs; TPU slices have theirs.", metavar="NUMBER")
    gpus_per_host: Natural = option(0, "GPUs of a host.", metavar="NUMBER")
    namespace: str = option("default", "Namespace.", metavar="NAME")
    queue: str = option("", "Kueue's local queue.", metavar="NAME")
    claim: tuple[str, ...] = option(
        (),
        "Persistent volume claim and where to mount it, e.g. --claim=shared:/data; may be given "
        "several times.",
        metavar="CLAIM:PATH",
        repeated=True,
    )
    python: str = option("python", "Python in the image.", metavar="PATH")
    folder: str = option("/app", "The project's folder in the image.", metavar="PATH")
    log_dir: str = option("", "Folder of the manifest.", metavar="DIR")


def jobset_name(run_name: str) -> str:
    """Returns a run's name as a DNS label, which names of Kubernetes are.

    Raises:
      UserError: Nothing of the name is allowed in a label.
    """
    label = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    label = label[:_LONGEST_NAME].rstrip("-")
    if not label or not label[0].isalpha():
        raise UserError(
            f"run_name {run_name!r} gives no name that Kubernetes accepts (letters, digits and -, "
            "with a letter first). Set --name."
        )
    return label


def check_options(options: JobSetOptions) -> None:
    """Refuses options of a manifest that contradict each other or are missing.

    Raises:
      UserError: One message with all problems.
    """
    problems = []
    if not options.image:
        problems.append(
            "--image is needed: an image with the project and its dependencies "
            "(docs/how-to/run_on_tpu_gpu_slurm.md has a Dockerfile)"
        )
    if bool(options.tpu) != bool(options.topology):
        problems.append(
            "--tpu and --topology go together, e.g. --tpu=tpu-v5p-slice --topology=2x2x4"
        )
    if options.topology and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", options.topology):
        problems.append(f"--topology={options.topology} is not of the form 4x4 or 2x2x4")
    elif options.topology and _num_chips(options) % options.chips_per_host:
        problems.append(
            f"--topology={options.topology} has {_num_chips(options)} chips, which hosts of "
            f"--chips-per-host={options.chips_per_host} do not divide"
        )
    if options.tpu and (options.gpus_per_host or options.hosts > 1):
        problems.append("--tpu excludes --hosts and --gpus-per-host: a topology has its hosts")
    if not options.tpu and options.slices > 1:
        problems.append("--slices is of TPUs: set --tpu and --topology, or --hosts")
    if options.name and options.name != jobset_name(options.name):
        problems.append(
            f"--name={options.name} is not a name for Kubernetes, but "
            f"{jobset_name(options.name)} is"
        )
    problems += [
        f"--claim={claim} is not of the form CLAIM:/PATH"
        for claim in options.claim
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/.*", claim)
    ]
    if problems:
        raise UserError("; ".join(problems) + ".")


def _num_chips(options: JobSetOptions) -> int:
    return math.prod(int(size) for size in options.topology.split("x"))


def jobset_manifest(options: JobSetOptions, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the manifest of a run.

    Args:
      options: Checked options; `name` is set.
      arguments: Arguments of train.py.
    """
    num_hosts = options.hosts
    if options.tpu:
        num_hosts = _num_chips(options) // options.chips_per_host
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SECONDS_TO_SAVE,
        "containers": [_container(options, num_hosts, arguments)],
    }
    if options.tpu:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": options.tpu,
            "cloud.google.com/gke-tpu-topology": options.topology,
        }
    if options.claim:
        pod["volumes"] = [
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
            for number, (name, _) in enumerate(_claims(options))
        ]
    job = {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a process alone cannot rejoin its run
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "In",
                        "values": [exit_codes.DIVERGED, exit_codes.USER_ERROR],
                    },
                }
            ]
        },
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": options.name, "namespace": options.namespace}
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    if options.tpu:
        # A slice's pods share a node pool, and no two slices do.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {"name": _REPLICATED_JOB, "replicas": options.slices, "template": {"spec": job}}
            ],
        },
    }


def _container(options: JobSetOptions, num_hosts: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the container that runs train.py; on a TPU, GKE tells JAX about the other hosts."""
    environment: list[dict[str, Any]] = []
    resources = {}
    if options.tpu:
        resources = {"google.com/tpu": options.chips_per_host}
        num_devices = _num_chips(options) * options.slices
        environment = [{"name": NUM_DEVICES_VARIABLE, "value": str(num_devices)}]
    elif options.gpus_per_host:
        resources = {"nvidia.com/gpu": options.gpus_per_host}
        num_devices = options.gpus_per_host * num_hosts
        environment = [{"name": NUM_DEVICES_VARIABLE, "value": str(num_devices)}]
    if not options.tpu and num_hosts > 1:
        first_host = f"{options.name}-{_REPLICATED_JOB}-0-0.{options.name}"
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX_ANNOTATION}']"}}
        environment += [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{first_host}:{DEFAULT_PORT}"},
            {"name": "JAX_NUM_PROCESSES", "value": str(num_hosts)},
            {"name": "JAX_PROCESS_ID", "valueFrom": index},
        ]
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": options.image,
        "workingDir": options.folder,
        "command": [options.python, "MaxText/train.py", *arguments],
    }
    if environment:
        container["env"] = environment
    if resources:
        container["resources"] = {"requests": dict(resources), "limits": resources}
    if options.claim:
        container["volumeMounts"] = [
            {"name": f"claim-{number}", "mountPath": path}
            for number, (_, path) in enumerate(_claims(options))
        ]
    return container


def _claims(options: JobSetOptions) -> list[tuple[str, str]]:
    """Returns the name and the path of each claim."""
    claims = []
    for claim in options.claim:
        name, _, path = claim.partition(":")
        claims.append((name, path))
    return claims


def submit(options: JobSetOptions, run: RunArguments, commands: Commands, log: Log) -> None:
    """Writes the manifest to the log folder and applies it.

    Args:
      options: Options of the JobSet.
      run: Arguments of train.py.
      commands: Runs kubectl, or prints it in a dry run.
      log: Prints a line.

    Raises:
      UserError: The options are refused, the manifest cannot be written, or kubectl fails.
    """
    check_options(options)
    options = dataclasses.replace(options, name=options.name or jobset_name(run.run_name))
    if "://" not in run.folder and not options.claim:
        sys.stderr.write(
            f"warning: {run.folder} is a folder of a pod, and ends with it. Set "
            "base_output_directory to a bucket, or to a folder of a --claim.\n"
        )
    manifest = manifest_yaml(jobset_manifest(options, run.arguments))
    path = run.log_folder(options.log_dir) / f"{options.name}.jobset.yml"
    commands.write(path, manifest)
    commands.run(["kubectl", "apply", f"--filename={path}"])
    if not commands.dry_run:
        log(f"jobset {options.name}; logs: launch.py jobset logs --name={options.name}")


def act(action: str, options: JobSetOptions, commands: Commands) -> None:
    """Describes a JobSet, prints its first host's log, or deletes it.

    Deleting sends SIGTERM to the processes, which save and exit.

    Args:
      action: "status", "logs" or "stop".
      options: Options with `name` and `namespace`.
      commands: Runs kubectl, or prints it in a dry run.

    Raises:
      UserError: No name is set, or kubectl fails.
    """
    if not options.name:
        raise UserError(f"{action} requires --name (printed by submit).")
    first_host = f"{options.name}-{_REPLICATED_JOB}-0"
    command = {
        "status": [
            "get",
            "jobset,pods",
            f"--selector=jobset.sigs.k8s.io/jobset-name={options.name}",
        ],
        "logs": ["logs", f"job/{first_host}", "--follow"],
        "stop": ["delete", "jobset", options.name],
    }[action]
    commands.run(["kubectl", f"--namespace={options.namespace}", *command])
