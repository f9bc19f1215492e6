"""Which runs a command line names."""

import json

import pytest

from MaxText.errors import UserError
from MaxText.monitoring.report.finding import find_runs
from tests.monitoring.report.run_files import completed


def names(found):
    return [run.name for run in found.runs]


def test_a_run_a_folder_of_runs_and_no_run_twice(tmp_path):
    for name in ("runs/lr10", "runs/lr9", "runs/a/deep", "alone"):
        completed(tmp_path / name)
    (tmp_path / "runs" / "lr9" / "checkpoints").mkdir()
    found = find_runs([str(tmp_path / "alone"), str(tmp_path / "runs"), str(tmp_path / "alone/")])
    assert names(found) == ["alone", "deep", "lr9", "lr10"]
    assert found.groups == {}
    assert found.problems == []


def test_a_comparison_says_what_belongs_together(tmp_path):
    for name in ("x/seed0", "x/seed1", "y/seed0"):
        completed(tmp_path / name)
    groups = {"x": ["x/seed0", "x/seed1"], "y": ["y/seed0", "y/not_yet"]}
    (tmp_path / "comparison.json").write_text(json.dumps({"groups": groups, "more": 1}))
    found = find_runs([str(tmp_path)])
    assert len(found.runs) == 3
    assert found.groups["x"] == [str(tmp_path / "x/seed0"), str(tmp_path / "x/seed1")]


def test_one_that_has_just_begun_does_not_hide_the_others(tmp_path):
    completed(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.jsonl").write_text('{"time"')
    found = find_runs([str(tmp_path)])
    assert names(found) == ["a"]
    (problem,) = found.problems
    assert "none of them is a start" in problem
    with pytest.raises(UserError, match="none of them is a start"):
        find_runs([str(tmp_path / "b")])


def test_links_that_lead_back_end(tmp_path):
    completed(tmp_path / "a")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "here").symlink_to(".")
    assert names(find_runs([str(tmp_path)])) == ["a"]


def test_mistakes_are_one_message(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        find_runs([str(tmp_path / "none")])
    with pytest.raises(UserError, match=r"has no events\.jsonl, and no folder in it has one"):
        find_runs([str(tmp_path)])
    file = completed(tmp_path / "a") / "events.jsonl"
    with pytest.raises(UserError, match="is a file"):
        find_runs([str(file)])
    (tmp_path / "comparison.json").write_text('{"groups": ["a"]}')
    with pytest.raises(UserError, match=r"comparison\.json is not of the form"):
        find_runs([str(tmp_path)])
    file.write_text("")
    with pytest.raises(UserError, match=r"(?s)No run in .* can be read\..*0 whole rows"):
        find_runs([str(tmp_path)])
