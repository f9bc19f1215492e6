"""The batch scripts for SLURM, given to a stand-in for sbatch, and run by the shell."""

import dataclasses
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.launchers.commands import TRAIN_COMMAND, Commands
from MaxText.launchers.job_array import JobArray
from MaxText.launchers.slurm import (
    SlurmOptions,
    active_tasks,
    render_array_script,
    render_batch_script,
    submit,
    submit_array,
)


@pytest.fixture
def programs(stand_in):
    return {name: stand_in(name) for name in ("sbatch", "srun", "scontrol")}


@pytest.fixture
def job(tmp_path):
    return SlurmOptions(
        name="first",
        nodes=2,
        processes_per_node=4,
        gpus_per_node=4,
        max_restarts=3,
        sbatch=("--partition=long",),
        log_dir=str(tmp_path / "logs here"),
    )


def test_what_is_asked_of_slurm(job):
    lines = render_batch_script(job, ["configs/a.yml", "prompt=it's"]).splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--partition=long",
        "--requeue",
        "--job-name=first",
        "--signal=TERM@180",
    } <= asked
    assert "export MAXTEXT_NUM_DEVICES=8" in lines


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 0), (75, 0, 1), (76, 2, 1), (76, 3, 0), (137, 0, 1)],
)
def test_the_job_is_queued_again_where_that_helps(job, programs, code, restarts, requeued):
    programs["srun"].will_answer((code, "", ""))
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", "-c", render_batch_script(job, ["prompt=it's"])], env=environment
    )
    assert done.returncode == code
    ((*_, program, argument),) = programs["srun"].calls
    assert program.endswith("MaxText/train.py")
    assert argument == "prompt=it's"
    assert programs["scontrol"].calls == [["requeue", "7"]] * requeued


@pytest.mark.parametrize(
    ("number", "requeued"), [("USR1", 1), ("USR2", 1), ("HUP", 1), ("TERM", 0)]
)
def test_a_signal_to_the_script_alone_reaches_the_processes(
    job, programs, tmp_path, number, requeued
):
    """As --signal=B:USR1@60 sends it; scancel sends SIGTERM, and such a job is not queued again."""
    srun = tmp_path / "bin" / "srun"
    srun.write_text("#!/bin/bash\ntrap 'sleep 0.2; exit 75' USR1\necho started\nsleep 60 & wait\n")
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    command = ["bash", "-c", render_batch_script(job, [])]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout.readline() == "started\n"
        script.send_signal(signal.Signals[f"SIG{number}"])
        script.send_signal(signal.SIGUSR1)
        assert script.wait(timeout=30) == 75
    assert programs["scontrol"].calls == [["requeue", "7"]] * requeued


def test_submitting(job, programs):
    shown = []
    # A dry run shows script and command.
    submit(job, ["a.yml"], Commands(shown.append, dry_run=True), shown.append)
    assert programs["sbatch"].calls == []
    assert not Path(job.log_dir).exists()
    assert render_batch_script(job, ["a.yml"]) in shown[0]
    programs["sbatch"].will_answer((0, "123;cluster\n", ""))
    submit(job, ["a.yml"], Commands(shown.append, dry_run=False), shown.append)
    file = Path(job.log_dir, "first.sh")
    assert programs["sbatch"].calls == [["--parsable", str(file)]]
    assert file.read_text() == render_batch_script(job, ["a.yml"])
    assert shown[-1].startswith("job 123; output in ")
    for answer, said in (((1, "", "no partition"), "code 1"), ((0, "what?", ""), "what?")):
        programs["sbatch"].will_answer(answer)
        with pytest.raises(UserError, match=re.escape(said)):
            submit(job, ["a.yml"], Commands(shown.append, dry_run=False), shown.append)


@pytest.fixture
def array(tmp_path):
    tasks = [[["a.yml"]], [["b1.yml", "prompt=it's"], ["b2.yml"]], [["c.yml"]]]
    return JobArray(name="sweep", tasks=tasks, folder=tmp_path / "array 1", max_parallel=2)


def test_submitting_an_array(job, programs, array):
    programs["sbatch"].will_answer((0, "55\n", ""))
    shown = []
    assert submit_array(job, array, Commands(shown.append, dry_run=False), shown.append) == "55"
    script = array.folder / "array.sh"
    assert programs["sbatch"].calls == [["--parsable", str(script)]]
    asked = {
        line.removeprefix("#SBATCH ")
        for line in script.read_text().splitlines()
        if line.startswith("#SBATCH ")
    }
    assert {
        "--array=0-2%2",
        "--job-name=sweep",
        "--requeue",
        "--gpus-per-node=4",
        f"--output={array.folder}/%A_%a.log",
    } <= asked
    everything = dataclasses.replace(array, max_parallel=None)
    assert "#SBATCH --array=0-2\n" in render_array_script(job, everything)


@pytest.mark.parametrize(
    ("task", "codes", "runs", "requeued"),
    [
        ("0", [0], ["a.yml"], 0),
        ("1", [0, 0], ["b1.yml", "b2.yml"], 0),
        ("1", [1], ["b1.yml"], 0),
        ("1", [0, 75], ["b1.yml", "b2.yml"], 1),
        ("3", [2], [], 0),
    ],
)
def test_a_task_of_an_array(job, programs, array, task, codes, runs, requeued):
    """It runs its own runs in order, up to one that fails, and requeues only itself."""
    array.folder.mkdir()
    array.command_file.write_text(array.commands(TRAIN_COMMAND))
    programs["srun"].will_answer(*((code, "", "") for code in codes))
    # The last task has the id of the array.
    ids = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
    done = subprocess.run(
        ["bash", "-c", render_array_script(job, array)],
        env=os.environ | ids,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == codes[-1]
    arguments = [call[call.index(TRAIN_COMMAND[1]) + 1 :] for call in programs["srun"].calls]
    assert [first for first, *_ in arguments] == runs
    if runs[:1] == ["b1.yml"]:
        assert arguments[0] == ["b1.yml", "prompt=it's"]
    assert programs["scontrol"].calls == [["requeue", f"7_{task}"]] * requeued


def test_tasks_that_slurm_still_has(stand_in):
    squeue = stand_in("squeue")
    squeue.will_answer(
        (0, "0\n12\n", ""),
        (0, "", ""),
        (1, "", "slurm_load_jobs error: Invalid job id specified\n"),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"),
    )
    commands = Commands(print, dry_run=False)
    assert [active_tasks("55", commands) for _ in range(3)] == [{0, 12}, set(), set()]
    assert "--jobs=55" in squeue.calls[0]
    with pytest.raises(UserError, match=r"squeue .* exited with code 1"):
        active_tasks("55", commands)
