"""The programs with everything in a bucket, also while it fails, and killed in the midst."""

import subprocess

import pytest

from MaxText import exit_codes
from tests import programs
from tests.several_processes.group import CONFIG, rows, wait_until
from tests.storage.emulator import Fault

KEYS = """
tokenizer_type: byte
validation_fraction: 0.2
steps: 12
eval_interval: 4
checkpoint_period: 3
max_to_keep: 2
sample_tokens: 0
loss_curve: false
"""


# Runs a program whose gcsfs tries again at once, as often as ever.
AT_ONCE = """
import runpy, sys
from unittest import mock
import gcsfs.retry
gcsfs.retry.asyncio = mock.Mock(sleep=mock.AsyncMock())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Workplace:
    """A folder with a configuration and text, and a bucket."""

    def __init__(self, folder, bucket, emulator, environment):
        self.folder, self.bucket, self.emulator = folder, bucket, emulator
        self.environment = environment | emulator.environment | {"JAX_PLATFORMS": "cpu"}
        self.environment.pop("M_JAX_CACHE_DIR", None)  # compiled programs are in the bucket too
        (folder / "tiny.yml").write_text(CONFIG + KEYS)
        (folder / "text").mkdir()
        for number in range(10):
            (folder / "text" / f"{number}.txt").write_text(f"text number {number}. " * 60)

    def arguments(self, place, *keys):
        return [
            "tiny.yml",
            f"base_output_directory={place}/runs",
            f"dataset_path={place}/data",
            "prepare_source=text",
            f"data_cache_dir={self.folder}/cache",
            *keys,
        ]

    def run(self, program, *arguments, code=0):
        """What a program says until it ends with a code."""
        done = programs.run(
            program, arguments, self.folder, self.environment, options=["-c", AT_ONCE]
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        assert "Traceback" not in said
        return said

    def train(self, place, *keys, code=0):
        return self.run("train.py", *self.arguments(place, *keys), code=code)

    def begin(self, log, *keys):
        return programs.start(
            "train.py",
            self.arguments(self.bucket, *keys),
            self.folder,
            self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def losses(self, run):
        return losses(self.emulator.read(f"{self.bucket}/runs/{run}/metrics.jsonl"))

    def local_losses(self, run):
        return losses((self.folder / "runs" / run / "metrics.jsonl").read_text())

    def has_begun_to_save(self, run, step):
        return bool(self.emulator.names(f"{self.bucket}/runs/{run}/checkpoints/{step}/"))

    def steps(self, run):
        """Finished checkpoints, and all folders that look like one."""
        prefix = f"runs/{run}/checkpoints/"
        names = self.emulator.names(f"{self.bucket}/{prefix}")
        parts = [name.removeprefix(prefix).split("/") for name in names]
        folders = {int(part[0]) for part in parts if part[0].isdigit()}
        return {int(part[0]) for part in parts if part[1:] == ["commit_success.txt"]}, folders


def losses(text):
    return {row["step"]: row["learning/loss"] for row in rows(text)}


@pytest.fixture
def place(tmp_path, bucket, emulator, users_environment):
    return Workplace(tmp_path, bucket, emulator, users_environment)


def test_a_run_in_a_bucket(place):
    place.train(place.bucket, "run_name=a", "steps=7")
    assert place.steps("a") == ({3, 6}, {3, 6})
    names = place.emulator.names(place.bucket)
    for part in (
        "data/manifest.json",
        "runs/a/config.yml",
        "runs/a/tokenizer/",
        "runs/a/events.jsonl",
        "runs/a/tensorboard/events.out",
        "runs/jax_cache/",
        "runs/a/checkpoints/healthy.json",
    ):
        assert any(name.startswith(part) for name in names), part
    assert sorted(place.losses("a")) == [*range(7)]


@pytest.mark.slow
def test_the_other_programs(place):
    place.train(place.bucket, "run_name=a", "steps=4")
    run, cache = f"{place.bucket}/runs/a", f"data_cache_dir={place.folder}/cache"
    trained = ("tiny.yml", f"load_parameters_path={run}", cache)
    scored = place.run("eval.py", *trained, f"dataset_path={place.bucket}/data")
    assert "written to gs://" in scored
    place.run("decode.py", *trained, "prompt=text")
    place.run("report.py", run, "output=page")
    assert (place.folder / "page" / "report.html").stat().st_size > 10_000
    place.run("inspect_data.py", f"{place.bucket}/data", cache)
    step = f"compiled_trainstep_file={place.bucket}/steps/step.bin"
    place.environment["MAXTEXT_SIGNING_KEY_FILE"] = str(place.folder / "key")
    keys = place.arguments(
        place.bucket, "run_name=b", f"load_parameters_path={run}", step, "steps=2"
    )
    assert "no such file. Create it by train_compile.py" in place.run("train.py", *keys, code=2)
    place.run("train_compile.py", *keys, "compile_topology=cpu-1")
    assert f"parameters of {run}/checkpoints/3" in place.run("train.py", *keys)


@pytest.mark.slow
def test_killed_while_saving_it_has_the_losses_of_a_run_on_a_disk(place):
    log = place.folder / "log"
    # Answers come late, so that a save is in flight for long; then the process is killed.
    for step in ("3", "6"):
        saving = f"POST /upload.*checkpoints.*{step}.*(items|commit)"
        late = place.emulator.failing(Fault(200, saving, seconds=1, after=True))
        with late, log.open("w") as output, place.begin(output, "run_name=a") as run:
            wait_until(lambda step=step: place.has_begun_to_save("a", step), run, log)
            run.kill()
        assert int(step) not in place.steps("a")[0]
    place.train(place.bucket, "run_name=a")
    assert place.steps("a") == ({9, 11}, {9, 11})
    place.train(place.folder, "run_name=a")
    assert place.losses("a") == place.local_losses("a")


@pytest.mark.slow
def test_a_bucket_that_never_answers(place):
    with place.emulator.failing(Fault(503)):
        said = place.train(place.bucket, "run_name=a", code=exit_codes.USER_ERROR)
    assert "gs://" in said
    # In mid-run: TensorStore goes on trying, and the watchdog ends the process.
    with place.emulator.failing(Fault(503, "POST /upload.*name=runs.*checkpoints.*items.*ocdbt")):
        place.train(place.bucket, "run_name=a", "heartbeat_timeout=10", code=exit_codes.STALLED)
    place.train(place.bucket, "run_name=a")
    assert place.steps("a")[0] >= {11}
