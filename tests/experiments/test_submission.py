"""Runs as jobs of engines: what is submitted, what is refused, and a dry run without any client."""

import os
from pathlib import Path

import pytest
import yaml

from MaxText.errors import UserError
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.submission import check_folder, read_launch_options, submit_run
from MaxText.launchers.commands import Commands
from tests.experiments.small_comparison import compare

JOBSET = "--image=image --gpus-per-host=8 --claim=shared:{folder}"
SKY = "--accelerators=H100:8 --mount=gs://bucket:{folder}"


def submitted(launch, text, folder, monkeypatch, previous=""):
    """(id of the job, the client's arguments) of a run, with a stand-in for the client."""
    log = folder / "log"
    client = {"slurm": "sbatch", "jobset": "kubectl", "sky": "sky"}[launch]
    (folder / client).write_text(f'#!/bin/sh\necho "$@" >> {log}\necho 7\n')
    (folder / client).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    options, problems = read_launch_options(launch, text.format(folder=folder))
    assert options is not None
    assert not problems
    run = folder / "out" / "runs" / "wide_0"
    check_folder(options, run)
    job = submit_run(
        options,
        label="Wide_0",
        arguments=["wide_0.yml"],
        folder=run,
        previous=previous,
        commands=Commands(lambda line: None, dry_run=False),
        log=lambda line: None,
    )
    return job, log.read_text().strip()


def test_jobs_of_slurm_wait_for_each_other(tmp_path, monkeypatch):
    job, arguments = submitted("slurm", "--gpus-per-node=8", tmp_path, monkeypatch, previous="6")
    script = Path(arguments.split()[-1]).read_text()
    assert job == "7"
    assert "#SBATCH --dependency=afterok:6\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "train.py wide_0.yml" in script


def test_a_jobset_of_its_own_name(tmp_path, monkeypatch):
    job, arguments = submitted("jobset", JOBSET, tmp_path, monkeypatch)
    command, file = arguments.split("--filename=")
    assert command == "apply "
    manifest = yaml.safe_load(Path(file).read_text())
    assert manifest["metadata"]["name"] == job
    assert job.startswith("run-wide-0-")
    (template,) = manifest["spec"]["replicatedJobs"]
    container = template["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-1] == "wide_0.yml"
    # The same label in another comparison is another job.
    (tmp_path / "other").mkdir()
    other, _ = submitted("jobset", JOBSET, tmp_path / "other", monkeypatch)
    assert other != job


def test_a_managed_job_of_skypilot(tmp_path, monkeypatch):
    job, arguments = submitted("sky", SKY, tmp_path, monkeypatch)
    assert arguments.startswith("jobs launch --yes --detach-run ")
    task = yaml.safe_load(Path(arguments.split()[-1]).read_text())
    assert task["name"] == job
    assert task["file_mounts"] == {str(tmp_path): {"source": "gs://bucket", "mode": "MOUNT"}}
    assert "MaxText/train.py wide_0.yml" in task["run"]


@pytest.mark.parametrize(("launch", "text"), [("jobset", JOBSET), ("sky", SKY)])
def test_only_slurm_has_jobs_that_wait(launch, text, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Wide_0 continues another run.*launch=slurm"):
        submitted(launch, text, tmp_path, monkeypatch, previous="6")


@pytest.mark.parametrize(
    ("launch", "text", "words"),
    [
        ("jobset", "--image=i", "output=.* is in no folder.*--claim=CLAIM:PATH"),
        ("jobset", "--image=i --claim=shared:/elsewhere", "there: /elsewhere"),
        ("sky", "--accelerators=H100:8", "--mount=BUCKET:PATH"),
        ("jobset", "--claim=shared:/", "--image is needed"),
    ],
)
def test_a_folder_that_the_jobs_do_not_share(launch, text, words, tmp_path):
    options, _ = read_launch_options(launch, text)
    assert options is not None
    with pytest.raises(UserError, match=words):
        check_folder(options, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch=print", "launch_options=--nodes=2"], "are of launch=slurm, jobset, sky"),
        (["launch=sky", "launch_options=--acelerators=H100"], "acelerators: no option"),
        (["launch=slurm", "launch_options=--name=x submit"], "submit --name cannot be given"),
        (["launch=slurm", "launch_options='x"], "No closing quotation"),
    ],
)
def test_options_that_are_refused(arguments, words):
    _, problems = parse_args(["a.yml", "b.yml", *arguments])
    assert any(words in str(problem.message) for problem in problems), problems


def test_a_dry_run_needs_no_client(configs, monkeypatch):
    monkeypatch.setenv("PATH", str(configs))
    options = f"{JOBSET.format(folder=configs)} --dry-run"
    keys = ("match=tokens", "budget=640", "num_devices=1")
    lines = compare("a.yml", "b.yml", *keys, "launch=jobset", f"launch_options={options}")
    printed = "\n".join(lines)
    assert printed.count("kind: JobSet") == 2
    assert printed.count("+ kubectl apply") == 2
    assert not list(configs.rglob("*_job"))
