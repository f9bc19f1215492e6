"""Engines of preparations: the same bytes with each, and a message where one cannot run."""

import os
import stat
import sys

import pytest

from tests.house.sources import REPOSITORY
from tests.input_pipeline.prepare.small_corpus import byte_options, made, split_small, write_texts
from tests.input_pipeline.small_data import contents
from tests.refusals import refused

# Runs the tasks of an array one after the other, as SLURM would for a partition of one core.
SBATCH = r"""#!/bin/bash
script=${!#}
cp "$script" "$(dirname "$0")/last_script"
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "$script")
grep -q merge_stats "$script" && { echo Submitted batch job 8; exit; }
for task in $(seq 0 "$last"); do
  SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here bash "$script" >&2 || exit 1
done
echo Submitted batch job 7
"""
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do if [ "$1" = -n ]; then shift; fi; shift; done
exec "$@"
"""
PROGRAMS = {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/sh\necho here\n"}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    write_texts(tmp_path / "text", count=12)
    split_small(monkeypatch, 1500)
    return tmp_path / "text"


@pytest.fixture
def expected(corpus, tmp_path):
    """The files of a preparation without an engine."""
    manifest = made(byte_options(corpus), tmp_path / "local")
    assert len(manifest.splits["train"].files) > 1
    return contents(tmp_path / "local")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for SLURM's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return folder


def datatrove(corpus, text="", **keys):
    return byte_options(
        corpus, **{"prepare.runner": "datatrove", "prepare.datatrove_options": text}, **keys
    )


@pytest.mark.parametrize(
    ("runner", "package"), [("beam", "apache_beam"), ("datatrove", "datatrove.executor.local")]
)
def test_packages_that_are_not_installed(runner, package, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    keys = byte_options(corpus, **{"prepare.runner": runner})
    refused(rf"jaxpretrain\[{runner}\]", made, keys, tmp_path / "d")


@pytest.mark.filterwarnings("ignore")  # Beam's own, which change with each of its versions.
def test_same_bytes_with_beam(corpus, expected, tmp_path):
    pytest.importorskip("apache_beam", reason="prepare.runner=beam needs it")
    keys = {"prepare.runner": "beam", "prepare.beam_options": "--runner=DirectRunner"}
    made(byte_options(corpus, **keys), tmp_path / "beam")
    assert contents(tmp_path / "beam") == expected


@pytest.mark.filterwarnings("ignore")  # datatrove's own.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_same_bytes_with_local_processes_of_datatrove(workers, corpus, expected, tmp_path):
    made(datatrove(corpus, f"workers={workers}"), tmp_path / "datatrove")
    assert contents(tmp_path / "datatrove") == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_same_bytes_with_slurm(corpus, expected, slurm, tmp_path):
    options = "executor=slurm partition=cpu time=00:10:00 tasks_per_job=3"
    made(datatrove(corpus, options), tmp_path / "slurm")
    assert contents(tmp_path / "slurm") == expected


@pytest.mark.filterwarnings("ignore")
def test_a_failed_task_fails_the_command_which_resumes(corpus, expected, slurm, tmp_path):
    keys = datatrove(corpus, "executor=slurm partition=cpu time=00:10:00")
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    refused(r"sbatch.*exit status 3.*The same command resumes", made, keys, tmp_path / "d")
    made(datatrove(corpus, "workers=1"), tmp_path / "d")
    assert contents(tmp_path / "d") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("executor=ray", "executor=ray is none of local, slurm"),
        ("fast", "'fast' is no name=value"),
        ("worker=3", "unexpected keyword argument 'worker'"),
        ("executor=slurm", "executor=slurm needs sbatch"),
    ],
)
def test_options_that_no_executor_knows(options, message, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(message, made, datatrove(corpus, options), tmp_path / "d")
