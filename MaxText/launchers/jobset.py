"""Submits a run as a Kubernetes JobSet, which Kueue can queue, and independent runs as an array.

The manifest of a run (JobSet v1alpha2) has one indexed Job per slice with one pod per host. A pod
that ends with an exit code after which the same command resumes, or by a signal, restarts the whole
JobSet, as all processes of a run belong together; one that ends with a mistake or a diverged loss
fails it. Runs that follow each other are the init containers of a pod and its container.

An array whose runs have one pod each is a JobSet with one indexed Job: an index for each task,
which is restarted, and fails, by itself. Replicas of a JobSet would not do: one that fails for good
ends the others, and GKE takes those with TPUs for the slices of one run. So an array of runs with
several pods is a file with a JobSet for each task, of which a queue of Kueue starts as many as fit.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
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
from MaxText.launchers.job_array import JobArray
from MaxText.runtime.start_up import DEFAULT_PORT, NUM_DEVICES_VARIABLE

_CONTAINER = "train"
_REPLICATED_JOB = "hosts"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_ARRAY_LABEL = "maxtext-array"  # has the array's name
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
    max_restarts: Natural = option(10, "Restarts of the JobSet.", metavar="NUMBER")
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


def jobset_manifest(options: JobSetOptions, runs: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the manifest of runs that follow each other.

    Args:
      options: Checked options; `name` is set.
      runs: Arguments of train.py of each run.
    """
    num_hosts = _num_hosts(options)
    commands = [[*_train_command(options), *arguments] for arguments in runs]
    job = {
        "parallelism": num_hosts,
        "completions": num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a process alone cannot rejoin its run
        "podFailurePolicy": _pod_failure_policy("FailJob"),
        "template": {"spec": _pod(options, commands, _run_environment(options))},
    }
    policy = {
        "maxRestarts": options.max_restarts,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    return _jobset(options, job, options.slices, policy)


def array_manifests(options: JobSetOptions, array: JobArray) -> list[dict[str, Any]]:
    """Returns the manifests of an array: one if its runs have one pod each, else one per task.

    Args:
      options: Checked options of a task.
      array: The tasks.

    Raises:
      UserError: The number of tasks at a time is limited, and only Kueue can do that.
    """
    if not has_single_pods(options):
        if array.max_parallel is not None:
            raise UserError(
                f"jobs={array.max_parallel} limits runs of one pod. Runs of several pods are "
                "limited by a queue of Kueue: leave out jobs=, and set --queue=NAME."
            )
        manifests = []
        for number, runs in enumerate(array.tasks):
            task = dataclasses.replace(options, name=f"{array.name}-{number}")
            manifests.append(_labeled(jobset_manifest(task, runs), array))
        return manifests
    options = dataclasses.replace(options, name=array.name)
    num_stages = max(map(len, array.tasks))
    job = {
        "parallelism": min(array.max_parallel or len(array.tasks), len(array.tasks)),
        "completions": len(array.tasks),
        "completionMode": "Indexed",
        "backoffLimitPerIndex": options.max_restarts,
        "podFailurePolicy": _pod_failure_policy("FailIndex"),
        "template": {
            "spec": _pod(
                options,
                [_array_command(array, stage) for stage in range(num_stages)],
                # The indices of the Job are no processes of one run.
                {**_run_environment(options), "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
            )
        },
    }
    # The Job ends when no index is left to run, and fails if one has failed.
    return [_labeled(_jobset(options, job, 1, {"maxRestarts": 0}), array)]


def has_single_pods(options: JobSetOptions) -> bool:
    """Returns whether a run is a single pod; one with TPUs counts as several, as slices do."""
    return not options.tpu and options.hosts == 1


def _train_command(options: JobSetOptions) -> list[str]:
    return [options.python, "MaxText/train.py"]


def _array_command(array: JobArray, stage: int) -> list[str]:
    """Returns the command of a container: a task's run of number `stage`, or nothing."""
    script = [
        array.read_commands("JOB_COMPLETION_INDEX"),
        f'command="$(printf \'%s\\n\' "$commands" | sed -n {stage + 1}p)"',
        'eval "exec $command"',  # train.py takes the place of the shell, and gets its signals
    ]
    return ["sh", "-c", "\n".join([*script, ""])]


def _num_hosts(options: JobSetOptions) -> int:
    """Returns the hosts of a slice, or of a run without TPUs."""
    return _num_chips(options) // options.chips_per_host if options.tpu else options.hosts


def _labeled(manifest: dict[str, Any], array: JobArray) -> dict[str, Any]:
    manifest["metadata"].setdefault("labels", {})[_ARRAY_LABEL] = array.name
    return manifest


def _pod_failure_policy(action: str) -> dict[str, Any]:
    """Returns the policy of pods whose runs would end in the same way again."""
    codes = {"operator": "In", "values": [exit_codes.DIVERGED, exit_codes.USER_ERROR]}
    return {"rules": [{"action": action, "onExitCodes": codes}]}


def _jobset(
    options: JobSetOptions, job: dict[str, Any], replicas: int, failure_policy: dict[str, Any]
) -> dict[str, Any]:
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
            "failurePolicy": failure_policy,
            "replicatedJobs": [
                {"name": _REPLICATED_JOB, "replicas": replicas, "template": {"spec": job}}
            ],
        },
    }


def _run_environment(options: JobSetOptions) -> dict[str, Any]:
    """Returns the variables of a run's processes: values, or sources of values.

    On a TPU, GKE tells JAX about the other hosts.
    """
    num_hosts = _num_hosts(options)
    environment: dict[str, Any] = {}
    if options.tpu:
        environment[NUM_DEVICES_VARIABLE] = str(_num_chips(options) * options.slices)
        return environment
    if options.gpus_per_host:
        environment[NUM_DEVICES_VARIABLE] = str(options.gpus_per_host * num_hosts)
    if num_hosts > 1:
        first_host = f"{options.name}-{_REPLICATED_JOB}-0-0.{options.name}"
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX_ANNOTATION}']"}}
        environment["JAX_COORDINATOR_ADDRESS"] = f"{first_host}:{DEFAULT_PORT}"
        environment["JAX_NUM_PROCESSES"] = str(num_hosts)
        environment["JAX_PROCESS_ID"] = index
    return environment


def _pod(
    options: JobSetOptions, commands: Sequence[Sequence[str]], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a pod that runs commands one after the other, until one fails."""
    shared: dict[str, Any] = {"image": options.image, "workingDir": options.folder}
    if environment:
        shared["env"] = [
            {"name": name, "value": value}
            if isinstance(value, str)
            else {"name": name, "valueFrom": value}
            for name, value in environment.items()
        ]
    if options.tpu or options.gpus_per_host:
        resources = {"nvidia.com/gpu": options.gpus_per_host}
        if options.tpu:
            resources = {"google.com/tpu": options.chips_per_host}
        shared["resources"] = {"requests": dict(resources), "limits": resources}
    if options.claim:
        shared["volumeMounts"] = [
            {"name": f"claim-{number}", "mountPath": path}
            for number, (_, path) in enumerate(_claims(options))
        ]
    *earlier, last = commands
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SECONDS_TO_SAVE,
    }
    if earlier:
        pod["initContainers"] = [
            {"name": f"{_CONTAINER}-{number}", **shared, "command": list(command)}
            for number, command in enumerate(earlier)
        ]
    pod["containers"] = [{"name": _CONTAINER, **shared, "command": list(last)}]
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
    return pod


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
    manifest = manifest_yaml([jobset_manifest(options, [run.arguments])])
    path = run.log_folder(options.log_dir) / f"{options.name}.jobset.yml"
    commands.write(path, manifest)
    commands.run(["kubectl", "apply", f"--filename={path}"])
    if not commands.dry_run:
        log(f"jobset {options.name}; logs: launch.py jobset logs --name={options.name}")


def submit_array(options: JobSetOptions, array: JobArray, commands: Commands, log: Log) -> None:
    """Writes the commands and the manifest of an array, and applies it.

    Args:
      options: Options of a task.
      array: The tasks.
      commands: Runs kubectl, or prints it in a dry run.
      log: Prints a line.

    Raises:
      UserError: The options are refused, a file cannot be written, or kubectl fails.
    """
    check_options(options)
    manifests = array_manifests(options, array)
    if has_single_pods(options):
        commands.write(array.command_file, array.commands(_train_command(options)))
    path = array.folder / "array.jobset.yml"
    commands.write(path, manifest_yaml(manifests))
    commands.run(["kubectl", "apply", f"--filename={path}"])
    if not commands.dry_run:
        log(f"{len(array.tasks)} tasks in {len(manifests)} JobSets of {_selector(array.name)}")


def _selector(array_name: str) -> str:
    return f"--selector={_ARRAY_LABEL}={array_name}"


def active_tasks(namespace: str, array_name: str, num_tasks: int, commands: Commands) -> set[int]:
    """Returns the tasks of an array whose JobSet has not ended.

    Args:
      namespace: Namespace of the array.
      array_name: Name of the array.
      num_tasks: Its number of tasks.
      commands: Runs kubectl.

    Raises:
      UserError: kubectl is missing or fails.
    """
    columns = '{range .items[*]}{.metadata.name} {.status.terminalState}{"\\n"}{end}'
    answer = commands.output(
        [
            "kubectl",
            f"--namespace={namespace}",
            "get",
            "jobset",
            _selector(array_name),
            f"--output=jsonpath={columns}",
        ]
    )
    rows = [line.split() for line in answer.splitlines()]
    names = {row[0] for row in rows if len(row) == 1}
    if array_name in names:
        return set(range(num_tasks))
    return {number for number in range(num_tasks) if f"{array_name}-{number}" in names}


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
