"""Runs as arrays of engines: what is submitted and when, and what is refused."""

import json
import os
import shlex
from pathlib import Path

import pytest
import yaml

from MaxText.errors import UserError
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.submission import check_folder, read_launch_options
from tests.experiments import stand_in as stand_in_for_train
from tests.experiments.small_comparison import compare
from tests.launchers.conftest import StandIn

JOBSET = "--image=image --gpus-per-host=8 --claim=shared:{folder}"
SKY = "--accelerators=H100:8 --mount=gs://bucket:{folder}"
# a.yml and b.yml are one run, c.yml is two stages.
COMMAND = ("a.yml", "b.yml", "c.yml", "match=tokens", "budget=640", "num_devices=1")


@pytest.fixture
def client(configs, monkeypatch):
    """Makes a stand-in for the client of an engine."""
    folder = configs / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda name: StandIn(folder, name)


def submit(launch, text, folder, *arguments):
    options = f"launch_options={text.format(folder=folder)}"
    return compare(*COMMAND, f"launch={launch}", options, *arguments)


def tasks_of(folder):
    """Names of the configurations of each task, in order, and of the submission's tasks."""
    tasks = {}
    for line in (folder / "commands.txt").read_text().splitlines():
        number, *command = shlex.split(line)
        tasks.setdefault(int(number), []).append(str(Path(command[-1]).relative_to(Path.cwd())))
    submission = json.loads((folder / "submission.json").read_text())
    assert len(submission["tasks"]) == len(tasks)
    return [tasks[number] for number in range(len(tasks))]


def test_slurm_gets_an_array_of_what_is_unfinished(client, configs):
    sbatch, squeue = client("sbatch"), client("squeue")
    sbatch.will_answer((0, "7\n", ""), (0, "8\n", ""))
    lines = submit("slurm", "--gpus-per-node=8", configs, "jobs=2")
    first = Path("out/submitted/1")
    assert tasks_of(first) == [
        ["out/a/seed_0.yml"],
        ["out/b/seed_0.yml"],
        ["out/c/seed_0/stage_1.yml", "out/c/seed_0/stage_2.yml"],
    ]
    assert sbatch.calls == [["--parsable", str(first.absolute() / "array.sh")]]
    script = (first / "array.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert lines[-1] == "Run the same command again once the jobs are done."
    assert not squeue.calls
    # All are queued or running.
    squeue.will_answer((0, "0\n1\n2\n", ""))
    lines = submit("slurm", "", configs)
    assert "Still queued or running: 3 tasks submitted earlier." in lines
    assert len(sbatch.calls) == 1
    # The first has ended well, the second without a result, the third is still running.
    train("out/a/seed_0.yml")
    squeue.will_answer((0, "2\n", ""))
    lines = submit("slurm", "", configs)
    assert "Still queued or running: 1 task submitted earlier." in lines
    assert tasks_of(Path("out/submitted/2")) == [["out/b/seed_0.yml"]]
    # Of the third, only the last stage is left.
    train("out/c/seed_0/stage_1.yml")
    train("out/b/seed_0.yml")
    squeue.will_answer((1, "", "slurm_load_jobs error: Invalid job id specified"))
    sbatch.will_answer((0, "9\n", ""))
    submit("slurm", "", configs)
    assert squeue.calls[-1][0] == "--jobs=7"  # nothing of 8 is left to ask about
    assert tasks_of(Path("out/submitted/3")) == [["out/c/seed_0/stage_2.yml"]]


def train(config):
    config = yaml.safe_load(Path(config).read_text())
    stand_in_for_train.train(config)


def test_kubernetes_gets_an_indexed_job(client, configs):
    kubectl = client("kubectl")
    submit("jobset", JOBSET, configs, "jobs=2")
    folder = Path("out/submitted/1")
    assert kubectl.calls == [["apply", f"--filename={folder.absolute() / 'array.jobset.yml'}"]]
    manifest = yaml.safe_load((folder / "array.jobset.yml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completions"], job["parallelism"]) == (3, 2)
    assert len(tasks_of(folder)) == 3
    # The same name in another folder is another array, as is another submission.
    name = manifest["metadata"]["name"]
    assert name.startswith("runs-out-")
    kubectl.will_answer((0, f"{name} Failed\n", ""))
    submit("jobset", JOBSET, configs)
    again = yaml.safe_load(Path("out/submitted/2/array.jobset.yml").read_text())
    assert again["metadata"]["name"] != name


def test_skypilot_gets_one_task_file_for_all_jobs(client, configs):
    sky = client("sky")
    submit("sky", SKY, configs)
    file = Path("out/submitted/1/array.sky.yml").absolute()
    assert sky.calls == [["jobs", "launch", "--yes", "--detach-run", "--num-jobs=3", str(file)]]
    task = yaml.safe_load(file.read_text())
    assert task["file_mounts"] == {str(configs): {"source": "gs://bucket", "mode": "MOUNT"}}
    jobs = [{"job_id": 4, "job_name": task["name"], "status": "RUNNING"}]
    sky.will_answer((0, json.dumps(jobs), ""))
    lines = submit("sky", SKY, configs)
    assert "Still queued or running: 1 task submitted earlier." in lines
    assert "--num-jobs=2" in sky.calls[-1]


def test_a_damaged_submission(client, configs):
    client("sbatch").will_answer((0, "7\n", ""))
    submit("slurm", "", configs)
    Path("out/submitted/1/submission.json").write_text("{")
    with pytest.raises(UserError, match=r"out/submitted/1/submission.json is damaged.* Delete "):
        submit("slurm", "", configs)


def test_a_folder_that_cannot_be_written(client, configs, monkeypatch):
    client("sbatch")
    Path("out").mkdir()
    Path("out/submitted").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*out/submitted"):
        submit("slurm", "", configs)


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


@pytest.mark.parametrize(
    ("launch", "text", "submission"),
    [
        ("slurm", "", "+ sbatch --parsable"),
        ("jobset", JOBSET, "+ kubectl apply"),
        ("sky", SKY, "+ sky jobs launch"),
    ],
)
def test_a_dry_run_needs_no_client(launch, text, submission, configs, monkeypatch):
    monkeypatch.setenv("PATH", str(configs))
    lines = submit(launch, f"{text} --dry-run", configs)
    (command,) = [line for line in lines if line.startswith("+ ")]
    assert command.startswith(submission)
    assert any("2 " in line and "out/c/seed_0/stage_2.yml" in line for line in lines)
    assert not Path("out/submitted").exists()
    with pytest.raises(UserError, match="is not installed or not on PATH"):
        submit(launch, text, configs)
