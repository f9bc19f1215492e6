"""Manifests for Kubernetes and SkyPilot: their schemas, and what they ask of the engine."""

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
from MaxText.launchers.jobset import JobSetOptions, jobset_manifest, jobset_name
from MaxText.launchers.skypilot import SkyPilotOptions, skypilot_task

_ARGUMENTS = ["configs/gpt2.yml", "prompt=it's", "base_output_directory=gs://b/out"]
_RUN = RunArguments(_ARGUMENTS, run_name="Big_run.1", folder="gs://b/out/Big_run.1")


def read_valid(text, schema):
    """Returns the manifest in a file's text, once its schema has accepted it."""
    schema = yaml.safe_load(Path(__file__).with_name("schemas").joinpath(schema).read_text())
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, schema)
    return manifest


def read_jobset(**options):
    options = JobSetOptions(image="registry/image:1", name="big", **options)
    jobset.check_options(options)
    manifest = read_valid(
        manifest_yaml(jobset_manifest(options, _ARGUMENTS)), "jobset_v1alpha2.yml"
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
    return read_valid(manifest_yaml(skypilot_task(options, _ARGUMENTS)), "skypilot_task.yml")


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
        ("sbatch", "log in to a node of the cluster"),
        ("kubectl", "gcloud components install kubectl"),
        ("sky", r"pip install 'skypilot\[gcp\]'"),
        ("gcloud", r"https://cloud\.google\.com/sdk/docs/install"),
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
