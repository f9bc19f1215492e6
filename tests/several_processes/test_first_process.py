"""What the processes of a run share: the first one works, and the others use its result."""

import pytest

from MaxText.exit_codes import USER_ERROR
from tests.input_pipeline.faults import write
from tests.several_processes.group import CONFIG, started

ARGUMENTS = """
import os, sys, time
from pathlib import Path
from MaxText.errors import UserError
from MaxText.runtime import first_process, processes, start_up

place = Path(sys.argv[1])
process = int(os.environ["JAX_PROCESS_ID"])
"""

CONNECTED = (
    ARGUMENTS
    + """
os.environ["HOME"] = str(place / f"home{process}")  # of another host
start_up.initialize_distributed("cpu", 60.0)
"""
)

BLOCKS = """
def enter(folder):
    with first_process.first_process_first("working", str(folder)) as is_first:
        done = place / "done"
        print(Path(folder).name, is_first, done.exists(), flush=True)
        if is_first:
            time.sleep(0.5)
            done.touch()
    time.sleep(0.5)
    done.unlink(missing_ok=True)

first_process._SECONDS_BEFORE_NOTICE = 0.1
enter(place / "shared" / "disk")
enter(place / f"disk{process}")
enter("gs://bucket/folder")
enter("/proc/unwritable")
print(os.listdir(place / "shared" / "disk"), os.listdir(place / f"disk{process}"))
late = place / "late"
with first_process.first_process_first("working", str(place / f"disk{process}")):
    if process == 1:
        time.sleep(0.5)
        late.touch()
print("left", late.exists(), flush=True)
first_process._MAX_WAIT_HOURS = 0.1 / 3600
try:
    enter(place / "shared")
except UserError as error:
    print(error)
"""


def test_the_first_process_that_sees_a_folder_works_before_the_others(tmp_path):
    with started(["-c", CONNECTED + BLOCKS, str(tmp_path)], tmp_path) as group:
        assert group.codes() == [0, 0]
        outputs = [group.output(process).splitlines() for process in range(2)]
    assert "process 1 waits for process 0: working" in outputs[1]
    first, second = ([line for line in lines if " waits for " not in line] for lines in outputs)
    disk, own_disk, bucket, unwritable, markers, left, *_ = first
    assert disk == "disk True False"
    assert own_disk == "disk0 True False"
    assert bucket == "folder True False"
    assert unwritable == "unwritable True False"
    assert markers == "[] []"
    assert second[:4] == [
        "disk False True",
        "disk1 True False",
        "folder False True",
        "unwritable False True",
    ]
    assert left == second[5] == "left True", "they leave together"
    assert second[-1].startswith("process 0 did not finish working within ")


FAILING = """
try:
    with first_process.first_process_first("working", str(place / "disk")) as is_first:
        assert is_first
        raise UserError("the disk is full")
except UserError as error:
    processes.fail(error)
"""


def test_what_fails_in_the_first_process_is_told_to_the_others(tmp_path):
    with started(["-c", CONNECTED + FAILING, str(tmp_path)], tmp_path) as group:
        assert group.codes() == [USER_ERROR] * 2
        assert "error: the disk is full" in group.output(0)
        told = "error: process 0 failed while working: the disk is full"
        assert group.output(1).splitlines() == [told]


DIFFERENT = """
from MaxText.run.training_program import train_from_command_line

sys.argv = ["train.py", str(place / "run.yml")]
if process == 1:
    sys.argv.append("prepare_source=")  # the data are there
processes.run(lambda: train_from_command_line(""))
"""


def test_configurations_are_compared_before_a_process_prepares_data(tmp_path):
    """Otherwise process 0 waits where devices are found, and process 1 where data are opened."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words. " * 200)
    (tmp_path / "run.yml").write_text(
        f"{CONFIG}run_name: run\nbase_output_directory: {tmp_path}/out\n"
        f"dataset_path: {tmp_path}/data\nprepare_source: {tmp_path}/text\n"
    )
    with started(["-c", ARGUMENTS + DIFFERENT, str(tmp_path)], tmp_path) as group:
        assert group.codes() == [USER_ERROR] * 2
        told = "error: process 1 has other values of prepare_source than process 0. "
        for process in range(2):
            last = group.output(process).splitlines()[-1]
            assert last.startswith(told), group.output(process)
    assert not (tmp_path / "data").exists()


DATA = """
from MaxText.config.loading import load
from MaxText.input_pipeline.data_sources import check_sources, prepare_sources

def keys(data, cache):
    return [f"dataset_path={data}", f"data_cache_dir={cache}", "vocab_size=50257"]

text = [f"prepare_source={place}/text", "tokenizer_type=byte", "validation_fraction=0.5"]
local = place / f"disk{process}"
print("-- shared disk", flush=True)
prepare_sources(load([*keys(place / "data", place / "cache"), *text]).config)
check_sources(load([*keys(place / "records", place / "cache"), "eval_interval=-1"]).config)
print("-- local disks", flush=True)
prepare_sources(load([*keys(local / "data", "~/cache"), *text]).config)
check_sources(load([*keys(place / "records", "~/cache"), "eval_interval=-1"]).config)
"""


@pytest.mark.slow
def test_text_and_records_are_read_once_on_each_disk(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"some words of {name}. " * 200)
    write("tfrecord", tmp_path / "records")
    with started(["-c", CONNECTED + DATA, str(tmp_path)], tmp_path) as group:
        assert group.codes() == [0, 0], [group.output(process) for process in range(2)]
        outputs = [group.output(process).split("-- ")[1:] for process in range(2)]
    for line in ("Read 2 documents", "Wrote ", "Importing 3 files"):
        counts = [[part.count(line) for part in parts] for parts in outputs]
        assert counts == [[1, 1], [0, 1]], (line, outputs)
