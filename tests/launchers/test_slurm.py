"""The batch script for SLURM, given to a stand-in for sbatch, and run by the shell."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.launchers.commands import Commands
from MaxText.launchers.slurm import SlurmOptions, render_batch_script, submit


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
    assert submit(job, ["a.yml"], Commands(shown.append, dry_run=True), shown.append) == ""
    assert programs["sbatch"].calls == []
    assert not Path(job.log_dir).exists()
    assert render_batch_script(job, ["a.yml"]) in shown[0]
    programs["sbatch"].will_answer((0, "123;cluster\n", ""))
    assert submit(job, ["a.yml"], Commands(shown.append, dry_run=False), shown.append) == "123"
    file = Path(job.log_dir, "first.sh")
    assert programs["sbatch"].calls == [["--parsable", str(file)]]
    assert file.read_text() == render_batch_script(job, ["a.yml"])
    assert "123" in shown[-1]
    for answer, said in (((1, "", "no partition"), "code 1"), ((0, "what?", ""), "what?")):
        programs["sbatch"].will_answer(answer)
        with pytest.raises(UserError, match=re.escape(said)):
            submit(job, ["a.yml"], Commands(shown.append, dry_run=False), shown.append)
