"""launch.py as it is typed."""

import shlex

import pytest

from tests.programs import run as start

RUN = ("--", "quickstart.yml", "base_output_directory=out", "prompt=it's")


def launch(tmp_path, users_environment, *arguments):
    return start("launch.py", arguments, tmp_path, users_environment)


def commands(result):
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("+ ")]


def test_local_processes(tmp_path, users_environment):
    result = launch(tmp_path, users_environment, "local", "2", "--devices=3", "--dry-run", *RUN)
    first, second = commands(result)
    assert first[0] == "env"
    assert "JAX_PROCESS_ID=0" in first
    assert {"JAX_PROCESS_ID=1", "JAX_NUM_PROCESSES=2", "MAXTEXT_NUM_DEVICES=6"} <= set(second)
    assert second[-3:] == list(RUN[1:])
    (alone,) = commands(launch(tmp_path, users_environment, "local", "1", "--dry-run", *RUN))
    assert alone[1].endswith("MaxText/train.py")
    assert not list(tmp_path.iterdir())


def test_a_name_made_of_the_time_is_fixed_here(tmp_path, users_environment):
    arguments = ["local", "2", "--dry-run", "--", "quickstart.yml", "run_name="]
    both = commands(launch(tmp_path, users_environment, *arguments))
    assert both[0][-1] == both[1][-1]
    assert both[0][-1].startswith("run_name=quickstart_2")


def test_gcloud(tmp_path, users_environment):
    result = launch(
        tmp_path, users_environment, "gcloud", "queue", "copy", "setup", "run", "--name=pod",
        "--zone=z", "--type=v5p-32", "--version=v", "--spot", "--dry-run", *RUN,
    )  # fmt: skip
    actions = [command[3:5] for command in commands(result)]
    assert actions == [
        ["queued-resources", "create"], ["queued-resources", "describe"], ["tpu-vm", "scp"],
        ["tpu-vm", "ssh"], ["tpu-vm", "ssh"], ["tpu-vm", "ssh"],
    ]  # fmt: skip


def test_slurm(tmp_path, users_environment):
    result = launch(
        tmp_path, users_environment, "slurm", "submit", "--nodes=2", "--logs=logs", "--dry-run",
        *RUN,
    )  # fmt: skip
    assert commands(result) == [["sbatch", "--parsable", f"{tmp_path}/logs/quickstart.sh"]]
    assert "#SBATCH --nodes=2" in result.stdout
    (cancel,) = commands(
        launch(tmp_path, users_environment, "slurm", "stop", "--job=7", "--dry-run")
    )
    assert cancel == ["scancel", "7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local", "2", "--", "quickstart.yml", "stepss=3"], "stepss"),
        (["local", "0", "--", "quickstart.yml"], "N: must be an integer of at least 1, not 0"),
        (["local", "two", "--", "quickstart.yml"], "N: must be an integer of at least 1, not two"),
        (["local", "2", "configs/quickstart.yml"], "Arguments of train.py follow --"),
        (["gcloud", "run", "--name=p", "--zone=z", "--dry-run"], "after --"),
        (["gcloud", "stop", "--name=p", "--zone=z", "--dry-run", *RUN], "for the action run"),
        (["gcloud", "create", "--name=p", "--zone=z", "--dry-run"], "--type and --version"),
        (["slurm", "stop", "--dry-run"], "needs --job=NUMBER"),
        ([], "required"),
    ],
)
def test_mistakes(arguments, message, tmp_path, users_environment):
    result = launch(tmp_path, users_environment, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
