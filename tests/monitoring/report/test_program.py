"""report.py as a user runs it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.house.sources import REPOSITORY
from tests.monitoring.report.run_files import RunFiles, completed

PROGRAM = REPOSITORY / "MaxText" / "report.py"


@pytest.fixture
def report(users_environment, tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, str(PROGRAM), *map(str, words)],
            env=users_environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def test_one_run_and_several(report, tmp_path):
    a, b = completed(tmp_path / "a"), completed(tmp_path / "b")
    done = report("a")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "a/report/report.html"
    assert "loss_tokens.png" in done.stdout
    assert (a / "report" / "report.html").exists()
    done = report(a, b)
    assert done.returncode == 0
    assert (tmp_path / "report" / "report.html").exists()


def test_warnings_go_to_the_terminal_and_the_page(report, tmp_path):
    for name, tokenizer in (("a", "one"), ("b", "two")):
        run = RunFiles(tmp_path / name)
        run.start(data={"tokenizer": tokenizer, "vocab_size": 10})
        run.steps(0, 3)
        run.write()
    done = report("a", "b", "output=both")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: The runs have different tokenizers.")
    assert "different tokenizers" in (tmp_path / "both" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no run is named"),
        (["none"], "none: there is no such folder"),
        (["a", "outputs=x"], "outputs=x: no such option. Did you mean output=?"),
        (["a", "--watch"], "--watch: no such option. Did you mean watch=?"),
        (["a", "watch=soon"], "watch=soon: seconds must be a whole number, 1 or more"),
        (["a", "watch=0"], "watch=0: seconds must be a whole number, 1 or more"),
        (["a", "output="], "output= names no folder"),
    ],
)
def test_mistakes(report, words, message):
    done = report(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help(report):
    done = report("--help")
    assert done.returncode == 0
    assert "watch=SECONDS" in done.stdout


def test_it_starts_without_jax(tmp_path):
    completed(tmp_path / "a")
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from MaxText.monitoring.report.finding import find_runs\n"
        "from MaxText.monitoring.report.writing import write_report\n"
        "from pathlib import Path\n"
        f"write_report(find_runs([{str(tmp_path)!r}]).runs, Path({str(tmp_path)!r}) / 'out')\n"
        "assert not {'jax', 'flax', 'pandas', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_watching_ends_with_the_run(users_environment, tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 5)
    run.write(old=False)
    page = tmp_path / "run" / "report" / "report.html"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "run", "watch=1"],
        env=users_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    first = process.stdout.readline()
    assert first == "run/report/report.html\n"
    assert 'content="1"' in page.read_text()
    run.steps(5, 8)
    run.add("stop", 0.1, 7, reason="completed")
    run.write(old=False)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "completed" in page.read_text()


def test_ctrl_c_ends_watching(users_environment, tmp_path, ctrl_c_counts):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.write(old=False)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "run", "watch=600"],
        env=users_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.readline()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
