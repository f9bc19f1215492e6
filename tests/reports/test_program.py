"""report.py as a user runs it, and which runs a command line names."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from MaxText.errors import UserError
from MaxText.reports.entries import find_runs
from tests import programs
from tests.house.sources import REPOSITORY
from tests.reports.run_files import RunFiles, completed


@pytest.fixture
def report(monkeypatch, tmp_path, capsys):
    """Runs the program in process; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments, sleep=None):
        program = importlib.import_module("MaxText.report")
        monkeypatch.setattr(program, "time", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
        try:
            code = program.main() or 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def started(run):
    """A run that is running."""
    run.write(old=False)
    return run


def test_one_run_and_several(report, tmp_path):
    for name, tokenizer in (("a", "one"), ("b", "two")):
        run = RunFiles(tmp_path / name)
        run.start(data={"tokenizer": tokenizer, "vocab_size": 10})
        run.write()
    code, output, errors = report("a")
    assert (code, errors) == (0, "")
    assert output == "a/report/report.html\n"
    assert (tmp_path / "a" / "report" / "report.html").exists()
    # Warnings go to the terminal and the page.
    code, _, errors = report("a", "b")
    warning = "The runs have different tokenizers."
    assert (code, errors.partition(warning)[0]) == (0, "warning: ")
    page = (tmp_path / "report" / "report.html").read_text()
    assert warning in page
    assert '<a href="../a/report/report.html">a</a>' in page  # an index of the runs' own pages


def test_runs_are_grouped_by_any_key(report, tmp_path):
    for name in "abc":
        completed(tmp_path / name)
    (tmp_path / "c" / "config.yml").write_text("learning_rate: 0.001")
    assert report("a", "b", "c", "group_by=learning_rate")[0] == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "learning_rate=0.003 (mean of 2 seeds)" in page
    code, _, errors = report("a", "group_by=learning_rat")
    assert (code, "Did you mean learning_rate?" in errors) == (2, True)


def test_mistakes_and_help(report, told):
    messages = []
    for arguments in ([], ["none"], ["a", "outputs=x"], ["a", "--watch"], ["watch=0"], ["output="]):
        code, output, errors = report(*arguments)
        assert (code, output) == (2, "")
        messages.append(f"{arguments}\n{errors}")
    told("".join(messages))
    code, output, _ = report("--help")
    assert code == 0
    assert "watch=SECONDS" in output


def test_the_program_does_without_jax(started, tmp_path):
    program = f"""
import runpy, sys
sys.argv = ["report.py", {str(tmp_path / "run")!r}]
try:
    runpy.run_path({str(REPOSITORY / "MaxText" / "report.py")!r}, run_name="__main__")
except SystemExit as end:
    sys.exit(end.code or len({{"jax", "flax", "pandas", "tensorflow"}} & set(sys.modules)))
"""
    with programs.started(program, options=["-u"]) as process:
        code, output = programs.ended(process)
    assert code == 0, output
    assert (tmp_path / "run" / "report" / "report.html").exists()


def test_watching_ends_with_the_run(report, started, tmp_path):
    page = tmp_path / "run" / "report" / "report.html"

    def sleep(seconds):
        assert f'content="{seconds}"' in page.read_text()
        started.add("stop", 0.1, 0, reason="completed")
        started.write(old=False)

    assert report("run", "watch=7", sleep=sleep)[0] == 0
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "completed" in page.read_text()


def test_ctrl_c_ends_watching(report, started):
    def sleep(seconds):
        raise KeyboardInterrupt

    code, _, errors = report("run", "watch=600", sleep=sleep)
    assert (code, errors) == (130, "")


def names(discovered):
    return [run.name for run in discovered.runs]


def test_a_run_a_folder_of_runs_and_no_run_twice(tmp_path):
    for name in ("runs/lr10", "runs/lr9", "runs/a/deep", "alone"):
        completed(tmp_path / name)
    (tmp_path / "runs" / "lr9" / "checkpoints").mkdir()
    # Links that lead back end.
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "alone")
    (tmp_path / "runs" / "up").symlink_to(tmp_path)
    (tmp_path / "runs" / "here").symlink_to(".")
    discovered = find_runs(
        [str(tmp_path / "alone"), str(tmp_path / "runs"), str(tmp_path / "alone/")]
    )
    assert names(discovered) == ["alone", "deep", "lr9", "lr10"]
    assert (discovered.groups, discovered.problems) == ({}, [])
    # One that has just begun does not hide the others.
    (tmp_path / "runs" / "lr9" / "events.jsonl").write_text('{"time"')
    discovered = find_runs([str(tmp_path / "runs")])
    assert ("lr10" in names(discovered), "lr9" in names(discovered), len(discovered.problems)) == (
        True,
        False,
        1,
    )


def test_a_comparison_says_what_belongs_together(tmp_path):
    for name in ("x/seed0", "x/seed1", "y/seed0"):
        completed(tmp_path / name)
    groups = {"x": ["x/seed0", "x/seed1"], "y": ["y/seed0", "y/not_yet"]}
    (tmp_path / "comparison.json").write_text(json.dumps({"groups": groups, "more": 1}))
    discovered = find_runs([str(tmp_path)])
    assert len(discovered.runs) == 3
    assert discovered.groups["x"] == [str(tmp_path / "x/seed0"), str(tmp_path / "x/seed1")]
    (tmp_path / "comparison.json").write_text('{"groups": ["a"]}')
    with pytest.raises(UserError, match=r"comparison\.json"):
        find_runs([str(tmp_path)])


def test_folders_without_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    file = completed(tmp_path / "a") / "events.jsonl"
    for name, message in (("none", "no such"), ("empty", "contains no"), (file, "contains no")):
        with pytest.raises(UserError, match=message):
            find_runs([str(tmp_path / name)])
    file.write_text("")
    with pytest.raises(UserError, match=r"(?s)No run in .*0 complete rows"):
        find_runs([str(tmp_path)])
