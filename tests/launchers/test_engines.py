"""Manifests for Kubernetes and SkyPilot: their schemas, and what they ask of the engine."""

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from MaxText import exit_codes
from MaxText.errors import UserError
from MaxText.launchers import jobset, skypilot
from MaxText.launchers.commands import Commands, RunArguments, manifest_yaml
from MaxText.launchers.job_array import JobArray
from MaxText.launchers.jobset import JobSetOptions, jobset_manifest, jobset_name
from MaxText.launchers.skypilot import SkyPilotOptions, skypilot_task

_ARGUMENTS = ["configs/gpt2.yml", "prompt=it's", "base_output_directory=gs://b/out"]
_RUN = RunArguments(_ARGUMENTS, run_name="Big_run.1", folder="gs://b/out/Big_run.1")


def read_valid(text, schema):
    """Returns the only manifest in a file's text, once its schema has accepted it."""
    (manifest,) = read_all_valid(text, schema)
    return manifest


def read_all_valid(text, schema):
    schema = yaml.safe_load(Path(__file__).with_name("schemas").joinpath(schema).read_text())
    manifests = list(yaml.safe_load_all(text))
    for manifest in manifests:
        jsonschema.validate(manifest, schema)
    return manifests


def array_of(folder, **options):
    """An array of a run, and of two that follow each other."""
    tasks = [[["a.yml", "prompt=it's"]], [["b1.yml"], ["b2.yml"]]]
    return JobArray(name="sweep", tasks=tasks, folder=folder, **options)


def read_jobset(**options):
    options = JobSetOptions(image="registry/image:1", name="big", **options)
    jobset.check_options(options)
    manifest = read_valid(
        manifest_yaml([jobset_manifest(options, [_ARGUMENTS])]), "jobset_v1alpha2.yml"
    )
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return manifest, replicated, replicated["template"]["spec"]


def test_jobset_of_tpu_slices():
    manifest, replicated, job = read_jobset(
        tpu="tpu-v5p-slice", topology="2x2x4", slices=3, queue="tpus", max_restarts=7
    )
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpus"}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert replicated["replicas"] == 3
    assert job["parallelism"] == job["completions"] == 4
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x4"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["command"] == ["python", "MaxText/train.py", *_ARGUMENTS]
    # GKE tells the hosts of a slice about each other.
    assert container["env"] == [{"name": "MAXTEXT_NUM_DEVICES", "value": "48"}]


def test_jobset_of_gpu_hosts_that_find_each_other():
    _, replicated, job = read_jobset(hosts=2, gpus_per_host=8, claim=("shared:/data",))
    assert (replicated["replicas"], job["completions"]) == (1, 2)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values == {
        "MAXTEXT_NUM_DEVICES": "16",
        "JAX_COORDINATOR_ADDRESS": "big-hosts-0-0.big:1234",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": None,
    }
    assert container["volumeMounts"] == [{"name": "claim-0", "mountPath": "/data"}]
    assert pod["volumes"] == [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "shared"}}]
    _, _, alone = read_jobset(gpus_per_host=1)
    assert len(alone["template"]["spec"]["containers"][0]["env"]) == 1


def test_jobset_fails_for_good_only_where_starting_again_changes_nothing():
    manifest, _, job = read_jobset()
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    final_codes = rule["onExitCodes"]["values"]
    assert final_codes == [exit_codes.DIVERGED, exit_codes.USER_ERROR]
    assert not set(final_codes) & set(exit_codes.RESTARTABLE)
    assert manifest["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"image": ""}, "--image is needed"),
        ({"tpu": "tpu-v5p-slice"}, "--tpu and --topology"),
        ({"tpu": "t", "topology": "2x2y4"}, "2x2y4"),
        ({"tpu": "t", "topology": "1x3"}, "3 chips"),
        ({"tpu": "t", "topology": "2x2", "hosts": 2}, "excludes"),
        ({"slices": 2}, "--slices"),
        ({"name": "Big"}, "but big is"),
        ({"claim": ("shared",)}, "--claim=shared"),
    ],
)
def test_options_that_give_no_jobset(options, named):
    with pytest.raises(UserError, match=named):
        jobset.check_options(JobSetOptions(**{"image": "i"} | options))


def test_array_of_kubernetes_is_an_indexed_job(stand_in, tmp_path):
    """Each index restarts and fails by itself, and finds its runs by its number."""
    kubectl = stand_in("kubectl")
    options = JobSetOptions(image="i", gpus_per_host=1, python="echo", max_restarts=4)
    array = array_of(tmp_path, max_parallel=1)
    jobset.submit_array(options, array, Commands(print, dry_run=False), print)
    path = tmp_path / "array.jobset.yml"
    assert kubectl.calls == [["apply", f"--filename={path}"]]
    manifest = read_valid(path.read_text(), "jobset_v1alpha2.yml")
    assert manifest["metadata"]["name"] == "sweep"
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completions"], job["parallelism"]) == (1, 2, 1)
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimitPerIndex"] == 4
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailIndex"
    pod = job["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    # Its index is not the number of a process.
    variables = {variable["name"]: variable["value"] for variable in containers[0]["env"]}
    assert variables.items() >= {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}.items()

    def outputs(index):
        environment = {"JOB_COMPLETION_INDEX": str(index), "PATH": "/usr/bin:/bin"}
        done = [
            subprocess.run(container["command"], env=environment, capture_output=True, text=True)
            for container in containers
        ]
        return [(run.returncode, run.stdout) for run in done]

    assert outputs(0) == [(0, "MaxText/train.py a.yml prompt=it's\n"), (0, "")]
    assert outputs(1) == [(0, "MaxText/train.py b1.yml\n"), (0, "MaxText/train.py b2.yml\n")]
    assert outputs(2) == [(2, "")] * 2
    array.command_file.unlink()
    assert outputs(0) == [(2, "")] * 2


@pytest.mark.parametrize(
    "options", [{"hosts": 2}, {"tpu": "tpu-v5-lite-podslice", "topology": "2x2"}]
)
def test_array_of_kubernetes_with_several_pods_is_a_jobset_per_task(options, tmp_path):
    options = JobSetOptions(image="i", queue="q", **options)
    lines = []
    jobset.submit_array(options, array_of(tmp_path), Commands(lines.append, dry_run=True), print)
    text = lines[0].partition("\n")[2]
    first, second = read_all_valid(text, "jobset_v1alpha2.yml")
    assert [manifest["metadata"]["name"] for manifest in (first, second)] == ["sweep-0", "sweep-1"]
    assert first["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    (replicated,) = second["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    commands = [run["command"][2:] for run in (*pod["initContainers"], *pod["containers"])]
    assert commands == [["b1.yml"], ["b2.yml"]]
    with pytest.raises(UserError, match=r"jobs=3 .* a queue of Kueue: leave out jobs="):
        jobset.array_manifests(options, array_of(tmp_path, max_parallel=3))


def test_tasks_that_kubernetes_still_has(stand_in):
    kubectl = stand_in("kubectl")
    kubectl.will_answer(
        (0, "sweep \n", ""),
        (0, "sweep Failed\n", ""),
        (0, "", "No resources found\n"),
        (0, "sweep-0 Completed\nsweep-1 \n", ""),
    )
    commands = Commands(print, dry_run=False)
    active = [jobset.active_tasks("research", "sweep", 2, commands) for _ in range(4)]
    assert active == [{0, 1}, set(), set(), {1}]
    assert kubectl.calls[0][:4] == [
        "--namespace=research",
        "get",
        "jobset",
        "--selector=maxtext-array=sweep",
    ]


def test_names_for_kubernetes():
    assert jobset_name("Big_run.1") == "big-run-1"
    assert len(jobset_name("a" * 90)) == 40
    with pytest.raises(UserError, match="--name"):
        jobset_name("7b")


def test_jobset_is_applied_and_found_again(stand_in, tmp_path, capsys):
    kubectl = stand_in("kubectl")
    options = JobSetOptions(image="i", log_dir=str(tmp_path), namespace="research")
    jobset.submit(options, _RUN, Commands(print, dry_run=False), print)
    path = tmp_path / "big-run-1.jobset.yml"
    read_valid(path.read_text(), "jobset_v1alpha2.yml")
    named = JobSetOptions(name="big-run-1", namespace="research")
    for action in ("status", "logs", "stop"):
        jobset.act(action, named, Commands(print, dry_run=False))
    applied, *calls = kubectl.calls
    assert applied == ["apply", f"--filename={path}"]
    assert [call[:2] for call in calls] == [
        ["--namespace=research", action] for action in ("get", "logs", "delete")
    ]
    assert not capsys.readouterr().err
    local = RunArguments([], run_name="r", folder="maxtext_output/r")
    jobset.submit(options, local, Commands(print, dry_run=True), print)
    assert "ends with it" in capsys.readouterr().err


def read_task(**options):
    options = SkyPilotOptions(name="big", **options)
    return read_valid(manifest_yaml([skypilot_task(options, _ARGUMENTS)]), "skypilot_task.yml")


def test_skypilot_task_of_gpu_nodes():
    task = read_task(accelerators="H100:8", nodes=2, spot=True, infra="k8s")
    assert (task["num_nodes"], task["setup"]) == (2, "bash setup.sh DEVICE=gpu\n")
    assert task["resources"]["use_spot"]
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert codes == list(exit_codes.RESTARTABLE)
    environment = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NUM_NODES": "2"}
    environment |= {"SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin"}
    script = task["run"].replace("exec .venv/bin/python", "env; printf '%s\\n'")
    done = subprocess.run(["bash", "-c", script], env=environment, stdout=subprocess.PIPE)
    lines = done.stdout.decode().splitlines()
    assert {
        "JAX_COORDINATOR_ADDRESS=10.0.0.5:1234",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
        "prompt=it's",
    } <= set(lines)


def test_skypilot_task_of_a_tpu():
    task = read_task(accelerators="tpu-v5p-32", version="v2-alpha-tpuv5")
    assert task["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5"}
    assert task["setup"] == "bash setup.sh DEVICE=tpu\n"
    assert "JAX_COORDINATOR" not in task["run"]


def test_skypilot_job_is_launched_and_found_again(stand_in, tmp_path):
    sky = stand_in("sky")
    options = SkyPilotOptions(accelerators="H100:8", log_dir=str(tmp_path))
    skypilot.submit(options, _RUN, Commands(print, dry_run=False), print)
    for action in ("status", "logs", "stop"):
        named = SkyPilotOptions(name="Big_run.1")
        skypilot.act(action, named, Commands(print, dry_run=False))
    launched, *calls = sky.calls
    assert launched[:2] == ["jobs", "launch"]
    assert launched[-1] == str(tmp_path / "Big_run.1.sky.yml")
    assert [call[:2] for call in calls] == [
        ["jobs", "queue"],
        ["jobs", "logs"],
        ["jobs", "cancel"],
    ]


def test_array_of_skypilot(stand_in, tmp_path):
    """Jobs of one task file, which find their runs by their rank."""
    sky = stand_in("sky")
    options = SkyPilotOptions(accelerators="H100:8", mount=(f"gs://bucket:{tmp_path}",))
    array = array_of(tmp_path)
    skypilot.submit_array(options, array, Commands(print, dry_run=False), print)
    path = tmp_path / "array.sky.yml"
    assert sky.calls == [["jobs", "launch", "--yes", "--detach-run", "--num-jobs=2", str(path)]]
    task = read_valid(path.read_text(), "skypilot_task.yml")
    assert task["name"] == "sweep"

    def run(rank, command):
        text = array.commands(command)
        array.command_file.write_text(text)
        environment = {"SKYPILOT_JOB_RANK": str(rank), "PATH": "/usr/bin:/bin"}
        command = ["bash", "-c", task["run"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout

    assert run(0, ["echo"]) == (0, "a.yml prompt=it's\n")
    assert run(1, ["echo"]) == (0, "b1.yml\nb2.yml\n")
    assert run(1, ["sh", "-c", "echo $0; exit 75"]) == (75, "b1.yml\n")
    assert run(2, ["echo"]) == (2, "")
    with pytest.raises(UserError, match="leave out jobs="):
        skypilot.submit_array(
            options, array_of(tmp_path, max_parallel=2), Commands(print, dry_run=True), print
        )


def test_tasks_that_skypilot_still_has(stand_in):
    states = ["SUCCEEDED", "RUNNING", "FAILED_SETUP", "CANCELLED", "RECOVERING"]
    jobs = [
        {"job_id": 10 + rank, "job_name": "sweep", "status": state}
        for rank, state in enumerate(states)
    ]
    jobs.append({"job_id": 3, "job_name": "other", "status": "RUNNING"})
    sky = stand_in("sky")
    sky.will_answer((0, json.dumps(jobs[::-1]), ""), (0, "Fetching...", ""))
    commands = Commands(print, dry_run=False)
    assert skypilot.active_tasks("sweep", commands) == {1, 4}
    with pytest.raises(UserError, match=r"Update SkyPilot to 0\.14"):
        skypilot.active_tasks("sweep", commands)


@pytest.mark.parametrize(
    ("options", "folder", "named"),
    [
        ({}, "gs://b/r", "--accelerators"),
        ({"accelerators": "H100:8", "version": "v2"}, "gs://b/r", "TPU VMs"),
        ({"accelerators": "H100:8"}, "maxtext_output/r", "bucket"),
    ],
)
def test_options_that_give_no_skypilot_job(options, folder, named):
    run = RunArguments([], run_name="r", folder=folder)
    with pytest.raises(UserError, match=named):
        skypilot.submit(SkyPilotOptions(**options), run, Commands(print, dry_run=True), print)


@pytest.mark.parametrize(
    ("client", "remedy"),
    [
        ("sbatch", "sudo apt-get install slurm-client"),
        ("squeue", "sudo apt-get install slurm-client"),
        ("kubectl", "gcloud components install kubectl"),
        ("sky", r"pip install 'skypilot\[gcp\]'"),
        ("gcloud", r"curl https://sdk\.cloud\.google\.com \| bash"),
    ],
)
def test_missing_client(client, remedy, tmp_path, monkeypatch):
    """One message that says how to get it; a dry run needs none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = []
    for call in ("run", "output"):
        with pytest.raises(UserError) as refusal:
            getattr(Commands(lines.append, dry_run=False), call)([client, "x"])
        (line,) = str(refusal.value).splitlines()
        assert line.startswith(f"{client} is not installed or not on PATH. ")
        assert re.search(remedy, line)
        assert "--dry-run" in line
        getattr(Commands(lines.append, dry_run=True), call)([client, "x"])
    assert lines == [f"+ {client} x"] * 4


@pytest.mark.parametrize(
    ("errors", "remedy"),
    [
        ('error: no matches for kind "JobSet" in version "v1alpha2"', "no JobSet controller"),
        (
            'Error from server (BadRequest): strict decoding error: unknown field "spec.a"',
            "refuses the file: compare the fields",
        ),
        ("Error from server (Forbidden): jobsets is forbidden: User x cannot create", "Ask for"),
        ("ERROR: PERMISSION_DENIED: you may not", "Ask for the right"),
        ("The connection to the server localhost:8080 was refused", "use-context NAME"),
        ("You do not currently have an active account selected.", "gcloud auth login"),
        ("- set the property `core/project`", "Set --project=NAME"),
        ("RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded", "larger quota"),
        ("There is no more capacity in the zone", "action queue, which waits"),
        ("Segmentation fault", None),
    ],
)
def test_what_a_client_refuses(errors, remedy, stand_in, capfd):
    """Its own words are on the terminal, and the message says what to do about them."""
    stand_in("kubectl").will_answer((1, "", errors), (1, "", errors))
    for call in ("run", "output"):
        with pytest.raises(UserError) as refusal:
            getattr(Commands(print, dry_run=False), call)(["kubectl", "apply"])
        assert errors in capfd.readouterr().err
        first, *others = str(refusal.value).splitlines()
        assert first == "kubectl apply exited with code 1; see above."
        assert bool(others) == (remedy is not None)
        if remedy is not None:
            assert others[0].startswith("  What to do: ")
            assert remedy in others[0]
