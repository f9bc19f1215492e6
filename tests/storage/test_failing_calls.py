"""Every file operation of a program fails in turn: one message, no hang, and a restart completes.

The operations of a small run are counted first, and then some of them fail (see failing_calls.py).
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from MaxText.checkpointing.checkpoint_files import finalized_steps
from MaxText.exit_codes import SUCCESS, USER_ERROR
from tests import programs

REASON = "Input/output error"
LAST_STEP = 5
SECONDS = 120.0  # a program that hangs is killed after this time
# The walks let one of so many operations fail. With 80 they take a minute, with 1 an hour.
STRIDE = int(os.environ.get("FAILING_CALLS", "80"))

MODEL = [
    "decoder_block=llama2",
    "vocab_size=512",
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=8",
    "base_mlp_dim=32",
    "base_num_decoder_layers=1",
    "max_target_length=16",
    "per_device_batch_size=2",
    "learning_rate=1e-3",
    "remat_policy=none",
]
PREPARE = ["prepare_source=text.jsonl", "tokenizer_path=bytes", "validation_fraction=0.3"]
TRAIN = [
    "train.py",
    *MODEL,
    *PREPARE,
    "dataset_path=out/data",
    "base_output_directory=out",
    "run_name=run",
    f"steps={LAST_STEP + 1}",
    "checkpoint_period=2",
    "eval_interval=3",
    "eval_steps=1",
    "sample_tokens=4",
    "jax_cache_dir=cache",
    "data_retry.delay=0",  # the default's tries take 31 seconds
]


@dataclasses.dataclass
class Commands:
    """Runs commands in a folder, with failing file operations below its folder `out`."""

    folder: Path

    def run(self, command, number=-1, times=0, folder="out"):
        """Returns exit code, output, and the operations of a command below `folder`."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        program, *arguments = command
        words = [self.folder / folder, number, times, calls, program, *arguments]
        process = programs.popen(
            [sys.executable, "-m", "tests.storage.failing_calls", *map(str, words)],
            cwd=self.folder,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with process:
            output, _ = process.communicate(timeout=SECONDS)
        made = calls.read_text().splitlines() if calls.exists() else []
        return process.returncode, output, made

    def check_failure(self, command, number, times):
        """Lets operations fail; checks how the command ends, and that it completes afterwards."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        code, output, made = self.run(command, number, times)
        assert len(made) > number, "fewer operations than before"
        what = f"{made[number]} failed: {output}"
        assert code in (SUCCESS, USER_ERROR), what
        assert "Traceback" not in output, what
        errors = [line for line in output.splitlines() if line.startswith("error:")]
        if code == USER_ERROR:
            assert len(errors) == 1, what
            assert "/out" in errors[0] or "out/" in errors[0], what
        # Nothing is lost if a folder exists already, or without Orbax's own record of times. Data
        # that cannot be read are read again.
        is_harmless = made[number].startswith("mkdir") or re.search(
            r"_CHECKPOINT_METADATA|^open .*/data/(train|validation)/", made[number]
        )
        assert REASON in output or (is_harmless and times == 1), what
        code, output, _ = self.run(command)
        assert code == SUCCESS, f"after {what}\nagain: {output}"


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    lines = (" ".join(f"word{i * j % 97}" for j in range(30)) for i in range(50))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return Commands(folder)


def end_of_run(folder):
    """The arrays of the last checkpoint, as checksums, and the reported steps."""
    text = (folder / "checkpoints" / str(LAST_STEP) / "metadata" / "metadata").read_text()
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    events = [row["step"] for row in rows if row["event"] == "step"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(text)["integrity"]["arrays"], events, [json.loads(x)["step"] for x in lines]


@pytest.fixture(scope="module")
def undisturbed(commands):
    """Operations and end of a run without failures."""
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    code, output, made = commands.run(TRAIN)
    assert code == SUCCESS, output
    return made, end_of_run(commands.folder / "out" / "run")


def first_of_each_kind(made):
    """Numbers of the first operation of each kind on each file, whatever its random name."""
    first = {}
    for number, call in enumerate(made):
        kind = re.sub(r"[0-9a-f]{8,}|checkpoints/\d+|tfevents.*", "*", call)
        first.setdefault(kind, number)
    return sorted(first.values())


def walked(numbers, times):
    """The operations that a walk lets fail: every STRIDE-th, at least one.

    "Once" and "from then on" take different ones.
    """
    first = times * (STRIDE // 2) % len(numbers)
    return numbers[first::STRIDE]


def check_training(commands, undisturbed, number, times):
    commands.check_failure(TRAIN, number, times)
    arrays, events, metrics = end_of_run(commands.folder / "out" / "run")
    assert arrays == undisturbed[1][0]
    assert events == metrics == [*range(LAST_STEP + 1)]


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        (r"write .*/start\.txt", 1),
        (r"write .*/events\.jsonl", 0),
        (r"fsync .*/tensorboard/", 1),
        pytest.param(r"write .*/tensorboard/", 0, marks=pytest.mark.slow),
        pytest.param(r"fsync .*build_spec", 0, marks=pytest.mark.slow),
        pytest.param(r"write .*/metrics\.jsonl", 1, marks=pytest.mark.slow),
        pytest.param(r"mkdir .*\.orbax-checkpoint-tmp/items$", 1, marks=pytest.mark.slow),
        pytest.param(r"rename .*/2\.orbax", 0, marks=pytest.mark.slow),
    ],
)
def test_some_operations_of_a_run(commands, undisturbed, pattern, times):
    made, _ = undisturbed
    number = next(i for i, call in enumerate(made) if re.match(pattern, call))
    check_training(commands, undisturbed, number, times)


def test_a_background_save_that_fails_does_not_keep_the_process(commands):
    """Orbax's threads wait for each other then; the run goes on, and ends with its own code.

    A process that waits for them is killed after SECONDS.
    """
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    code, output, _ = commands.run(TRAIN, r"mkdir .*checkpoints/2\.orbax-checkpoint-tmp/items$", 1)
    assert code == SUCCESS, output
    assert "WARNING: the checkpoint of step 2 could not be written" in output


def test_the_state_is_saved_where_data_cannot_be_read(commands, undisturbed):
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    command = [*TRAIN, "data_retry.attempts=0"]
    validation = "out/data/validation"
    _, _, made = commands.run([*command, "run_name=counted"], folder=validation)
    number = max(i for i, call in enumerate(made) if re.match(r"open .*/tokens-", call))
    code, output, _ = commands.run(command, number, 0, validation)
    assert code == USER_ERROR, output
    assert output.count("\nerror:") == 1
    assert "Traceback" not in output
    assert finalized_steps(epath.Path(commands.folder / "out/run/checkpoints")) == [0, 2]
    code, output, _ = commands.run(command)
    assert code == SUCCESS, output
    assert "Restored checkpoint of step 2" in output
    assert end_of_run(commands.folder / "out" / "run") == undisturbed[1]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 0], ids=["once", "from then on"])
def test_every_operation_of_a_run(commands, undisturbed, times):
    for number in walked(first_of_each_kind(undisturbed[0]), times):
        check_training(commands, undisturbed, number, times)


# --- Other programs -----------------------------------------------------------------------------


OTHERS = {
    "prepare": ["prepare_data.py", *PREPARE, "dataset_path=out/prepared"],
    "records": [
        "prepare_data.py",
        *PREPARE,
        "dataset_path=out/records",
        "prepare_output_format=tfrecord",
    ],
    "export": ["convert.py", "from=finished", "to=hf:out/exported"],
    "import": ["convert.py", "from=hf:exported", "to=out/imported"],
    "report": ["report.py", "finished", "output=out/report"],
}


@pytest.fixture(scope="module")
def finished(commands, undisturbed):
    """A finished run and its export, outside of the folder that fails."""
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    for command in (TRAIN, [*OTHERS["export"][:1], "from=out/run", "to=hf:exported"]):
        code, output, _ = commands.run(command)
        assert code == SUCCESS, output
    shutil.copytree(commands.folder / "out/run", commands.folder / "finished")


def calls_of(commands, name):
    shutil.rmtree(commands.folder / "out", ignore_errors=True)
    code, output, made = commands.run(OTHERS[name])
    assert code == SUCCESS, output
    return made


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "records" else name for name in OTHERS],
)
@pytest.mark.usefixtures("finished")
def test_the_last_operation_of_another_program(commands, name):
    """Most is written then, and none of it must look complete."""
    made = calls_of(commands, name)
    writes = [number for number, call in enumerate(made) if not call.startswith("open")]
    commands.check_failure(OTHERS[name], writes[-1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 0], ids=["once", "from then on"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("finished")
def test_every_operation_of_another_program(commands, name, times):
    for number in walked(first_of_each_kind(calls_of(commands, name)), times):
        commands.check_failure(OTHERS[name], number, times)
