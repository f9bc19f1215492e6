"""An installed wheel, without the clone: programs, shipped configs, training from any folder."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.sources import REPOSITORY


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_program_has_a_command():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    programs = {
        path.stem
        for path in (REPOSITORY / "MaxText").glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert project["scripts"] == {
        f"maxtext-{name.replace('_', '-')}": f"MaxText.{name}:main" for name in programs
    }


@pytest.mark.slow
def test_a_wheel_trains_from_an_empty_folder(tmp_path):
    """Builds with pip, which fetches the build backend as setup.sh does."""
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        tmp_path,
        REPOSITORY,
        folder=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (REPOSITORY / "configs").rglob("*.yml"):
        assert f"MaxText/{path.relative_to(REPOSITORY).as_posix()}" in names

    # The dependencies are those of this environment; the package itself comes from the wheel alone.
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        wheel,
        folder=tmp_path,
    )
    # Only the folder itself: its own .pth files, which name the clone, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    empty = tmp_path / "empty"
    empty.mkdir()
    keys = (
        "dataset_type=synthetic",
        "steps=3",
        "run_name=wheel",
        "eval_interval=-1",
        "prepare_source=",
        "dataset_path=",
        "hardware=cpu",
        "base_num_decoder_layers=1",
        "per_device_batch_size=2",
    )
    shown = run(
        environment / "bin" / "maxtext-train", "configs/quickstart.yml", *keys, folder=empty
    )
    assert "completed step: 2" in shown
    assert (empty / "maxtext_output" / "wheel" / "metrics.jsonl").is_file()
    planned = ("model_name=gpt2-124m", "hardware=cpu", "--show-config")
    shown = run(python, "-m", "MaxText.plan", *planned, folder=empty)
    assert "gpt2-124m" in shown
    where = run(python, "-c", "import MaxText; print(MaxText.__file__)", folder=empty)
    assert where.startswith(str(packages))
