"""launch.py as it is typed: what it would run, and once a run."""

import shlex

import pytest

from tests.house.sources import run_main

RUN = ("--", "quickstart.yml", "base_output_directory=out", "prompt=it's")


@pytest.fixture
def launch(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def launch(place, *others, dry_run=True):
        """Exit code, output and errors."""
        code = run_main("launch.py", [place, *(["--dry-run"] * dry_run), *others])
        return code, *capsys.readouterr()

    return launch


def commands(result):
    code, output, errors = result
    assert (code, errors) == (0, "")
    return [shlex.split(line[2:]) for line in output.splitlines() if line.startswith("+ ")]


def test_local_processes(launch, tmp_path):
    first, second = commands(launch("local", "2", "--devices-per-process=3", *RUN))
    assert first[0] == "env"
    assert "JAX_PROCESS_ID=0" in first
    assert {"JAX_PROCESS_ID=1", "JAX_NUM_PROCESSES=2", "MAXTEXT_NUM_DEVICES=6"} <= set(second)
    assert second[-3:] == list(RUN[1:])
    (alone,) = commands(launch("local", "1", *RUN))
    assert alone[1].endswith("MaxText/train.py")
    assert not list(tmp_path.iterdir())
    # A name made of the time is fixed here.
    both = commands(launch("local", "2", "--", "quickstart.yml", "run_name="))
    assert both[0][-1] == both[1][-1]
    assert both[0][-1].startswith("run_name=quickstart_2")


def test_gcloud(launch):
    result = launch(
        "gcloud",
        "queue",
        "copy",
        "setup",
        "run",
        "--name=pod",
        "--zone=z",
        "--accelerator-type=v5p-32",
        "--version=v",
        "--spot",
        *RUN,
    )
    assert [command[3:5] for command in commands(result)] == [
        ["queued-resources", "create"],
        ["queued-resources", "describe"],
        ["tpu-vm", "scp"],
        ["tpu-vm", "ssh"],
        ["tpu-vm", "ssh"],
        ["tpu-vm", "ssh"],
    ]


def test_slurm(launch, tmp_path):
    result = launch("slurm", "submit", "--nodes=2", "--log-dir=logs", *RUN)
    assert commands(result) == [["sbatch", "--parsable", f"{tmp_path}/logs/quickstart.sh"]]
    assert "#SBATCH --nodes=2" in result[1]
    assert commands(launch("slurm", "stop", "--job-id=7")) == [["scancel", "7"]]


def test_engines(launch):
    remote = ("--", "quickstart.yml", "base_output_directory=gs://b/out", "run_name=a.b")
    result = launch("jobset", "submit", "--image=i", "--hosts=2", *remote)
    assert commands(result) == [
        ["kubectl", "apply", "--filename=maxtext_output/logs/a.b/a-b.jobset.yml"]
    ]
    assert "completions: 2" in result[1]
    result = launch("sky", "submit", "--accelerators=H100:8", *remote)
    ((*launched, file),) = commands(result)
    assert launched[:3] == ["sky", "jobs", "launch"]
    assert file == "maxtext_output/logs/a.b/a.b.sky.yml"
    assert "H100:8" in result[1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("local 2 -- quickstart.yml stepss=3", "stepss"),
        ("local 0 -- quickstart.yml", "not 0"),
        ("local two -- quickstart.yml", "not two"),
        ("local 2 configs/quickstart.yml", "follow --"),
        ("gcloud run --name=p --zone=z", "after --"),
        ("gcloud stop --name=p --zone=z -- quickstart.yml", "action run"),
        ("gcloud create --name=p --zone=z", "--accelerator-type and --version"),
        ("slurm stop", "--job-id=NUMBER"),
        ("jobset stop", "--name"),
        ("jobset submit -- quickstart.yml", "--image"),
        ("sky logs", "--name"),
        ("sky submit -- quickstart.yml", "--accelerators"),
        ("nowhere", "nowhere"),
    ],
)
def test_mistakes(line, named, launch):
    code, _, errors = launch(*line.split())
    assert code == 2
    assert named in errors


def test_a_run(launch, tmp_path, monkeypatch):
    """It gets as far as jax, and exits with the code of a mistake that only train.py can find."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, output, errors = launch(
        "local",
        "1",
        "--devices-per-process=2",
        "--log-dir=logs",
        "--",
        "quickstart.yml",
        "run_name=first",
        "dataset_type=synthetic",
        "dataset_path=",
        "prepare_source=",
        "ici_fsdp_parallelism=3",
        dry_run=False,
    )
    assert (code, errors) == (2, "")
    for shown in ((tmp_path / "logs" / "0.log").read_text(), output):
        assert "ici_fsdp_parallelism=3" in shown
        assert "there are 2" in shown


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (("--min-processes=2",), ("global_batch_size=12",)),
        (("--min-processes=2", "--supervise"), ()),
        (("--min-processes=4", "--supervise"), ("global_batch_size=12",)),
        (("--min-processes=3", "--supervise"), ("global_batch_size=4",)),
    ],
    ids=["not supervised", "no batch", "not fewer", "none divides"],
)
def test_process_counts_that_cannot_be(options, keys, launch, told):
    code, output, errors = launch("local", "4", *options, *RUN, *keys)
    assert code == 2
    told(output + errors)


def test_process_counts_that_a_run_can_go_on_with(launch):
    options = ("--supervise", "--min-processes=2")
    keys = ("global_batch_size=4", "base_num_decoder_layers=1")
    code, output, errors = launch("local", "4", *options, *RUN, *keys)
    assert (code, errors) == (0, "")
    assert "launch: 3 of 4 processes could not go on: global_batch_size=4 does not fit 3" in output
