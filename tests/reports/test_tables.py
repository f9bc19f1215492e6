"""What the tables say about runs and models."""

import re

import pytest

from MaxText.formatting import ABSENT, format_table
from MaxText.monitoring.run_record import read_run
from MaxText.reports import run_tables
from MaxText.reports.curves import Axes
from MaxText.reports.entries import all_runs, differing_keys, group_runs
from MaxText.reports.page import PageSection
from MaxText.reports.report_writer import write_report
from MaxText.reports.run_charts import loss_chart, loss_charts, quantity_charts
from tests.reports.run_files import RunFiles, completed


def entries_of(*folders, groups=None):
    return group_runs([read_run(folder) for folder in folders], groups)


def overview_of(entries):
    table = run_tables.overview(entries, {})
    return {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.rows}


def charts_of(entries, draw):
    return draw(entries, Axes([*all_runs(entries).values()]))


def started(folder, *, steps=3, **facts):
    run = RunFiles(folder)
    run.start(**facts)
    run.steps(0, steps)
    return run.write()


def as_text(sections):
    lines = []
    for section in sections:
        table = (
            section.table
            and format_table(section.table.header, section.table.rows, max_width=None).splitlines()
        )
        texts = [verbatim.text for verbatim in section.texts]
        facts = [f"{name} = {value}" for name, value in section.facts.items()]
        lines += [f"-- {section.title}", *section.paragraphs, *facts, *(table or []), *texts]
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<local time>", "\n".join(lines))


def test_all_tables(completed_run, eventful_run, told):
    """Of one run and of two; differences that the table of runs shows are not repeated."""
    one_run, two_runs = entries_of(eventful_run), entries_of(completed_run, eventful_run)
    sections = [
        PageSection("Runs", table=run_tables.overview(two_runs, differing_keys(two_runs))),
        PageSection("Time", table=run_tables.goodput_table(two_runs)),
        *run_tables.event_table(one_run),
        *run_tables.provenance(two_runs),
        *run_tables.configuration(one_run, {}),
        *run_tables.cost(two_runs),
        *run_tables.configuration(two_runs, differing_keys(two_runs)),
        *run_tables.memory(one_run),
    ]
    assert run_tables.lineage(one_run) == run_tables.configuration(two_runs, {}) == []
    told(as_text(sections))


def test_runs_show_the_keys_they_share_once_and_what_replaced_auto(tmp_path):
    """The first keys that differ are shown with their runs, main keys first."""
    other_keys = {f"key_{n}": n for n in range(12)}
    folders = []
    for name, resolved in (("a", "float32"), ("b", "bfloat16")):
        run = RunFiles(tmp_path / name)
        changed = {"mlp_dim": "8", "run_name": name}
        run.start(changed_keys=changed, resolved_keys={"attention": "flash", "dtype": resolved})
        config = {"attention": "autoselected", "dtype": "auto", "steps": 5, "mlp_dim": 8}
        other_keys = {key: value + 1 for key, value in other_keys.items()}
        folders.append(run.write(config={"run_name": name, "head_dim": 8, **other_keys, **config}))
    (section,) = run_tables.configuration(entries_of(folders[0]), {})
    shared = {
        "steps": "5 (default)",
        "attention": "flash (autoselected, default)",
        "mlp_dim": "8",
    }
    assert section.facts == shared | {"dtype": "float32 (auto, default)", "run_name": "a"}
    entries = entries_of(*folders)
    differences = differing_keys(entries)
    assert [*differences] == ["dtype", *sorted(other_keys)]
    same, different = run_tables.configuration(entries, differences)
    assert same.facts == shared
    assert different.table.rows[0] == ["dtype", "float32", "bfloat16"]
    page = write_report([read_run(folder) for folder in folders], tmp_path / "page").read_text()
    assert "Of 13 keys that differ, 12 are shown here" in page
    assert "Validation loss against" not in page  # without a loss


@pytest.mark.parametrize(("facts", "dtype"), [({}, "auto"), ({"resolved_keys": {}}, "float32")])
def test_runs_show_what_replaced_auto_only_if_all_did_so(tmp_path, facts, dtype):
    """Not next to a run of a version that does not know it, or a run where it was set."""
    folders = []
    all_facts = {"changed_keys": {"steps": "5"}, "resolved_keys": {"dtype": "float32"}}
    for name, recorded, shown_dtype in (("a", all_facts, "auto"), ("b", facts, dtype)):
        run = RunFiles(tmp_path / name)
        run.start(**recorded)
        folders.append(run.write(config={"dtype": shown_dtype, "steps": 5}))
    entries = entries_of(*folders)
    assert differing_keys(entries) == {}
    (same,) = run_tables.configuration(entries, {})
    assert same.facts == {"steps": "5", "dtype": dtype}


def blown_up(folder, **arguments):
    """A run whose loss is finite and back above its first."""
    run = RunFiles(folder, **arguments)
    run.start()
    run.steps(0, 40, every=20)
    run.steps(40, 60, **{"learning/lm_loss": 74.5})
    run.evaluate(59, 74.5)
    run.add("stop", reason="diverged")
    return run.write()


def test_seeds_have_a_mean_that_contains_no_run_that_blew_up(tmp_path):
    folders = [completed(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    folders.append(blown_up(tmp_path / "c", seed=3))
    entries = entries_of(*folders, groups={"all": map(str, folders)})
    rows = overview_of(entries)
    assert rows["c"]["state"] == "diverged"
    losses = [read_run(folder).final_loss for folder in folders[:2]]
    assert rows["all"]["validation loss"].startswith(f"{sum(losses) / 2:.4f} ± ")
    for series in charts_of(entries, loss_chart).series:
        if series.kind in ("line", "dots"):
            assert max(series.high) < 20


@pytest.mark.parametrize("source", ["measured here", "data sheet"])
def test_mfu_of_peaks_that_were_measured_differently_is_not_compared(tmp_path, source):
    folders = [
        started(tmp_path / str(n), steps=30, peak_tflops=0.02 + 0.01 * n, peak_source=source)
        for n in range(2)
    ]
    entries, drawn = entries_of(*folders), source == "data sheet"
    assert ("mfu" in [chart.name for chart in charts_of(entries, quantity_charts)]) == drawn
    assert all((row["MFU"] != ABSENT) == drawn for row in overview_of(entries).values())
    notes = " ".join(run_tables.cost(entries)[0].paragraphs)
    assert ("MFU is not compared" in notes) == (not drawn)


def test_losses_of_different_kinds_are_on_no_common_axis(tmp_path):
    folders = [completed(tmp_path / name) for name in "abcd"]
    other_configs = {"b": "loss_type: entmax\nentmax_alpha: 1.3\n", "c": "mlm_training: true\n"}
    for name, keys in other_configs.items():
        (tmp_path / name / "config.yml").write_text(keys)
    entries = entries_of(*folders)
    charts = charts_of(entries, loss_charts)
    owners = [{series.owner for series in chart.series} for chart in charts]
    assert owners == [{"a", "d"}, {"b"}, {"c"}]
    assert charts[1].title.startswith("Loss: entmax, alpha 1.3")
    assert len({chart.name for chart in charts}) == 3
    losses = {name: row["validation loss"] for name, row in overview_of(entries).items()}
    assert "(entmax, alpha 1.3" in losses["b"]
    assert "of masked tokens" in losses["c"]
    assert "(" not in overview_of(entries_of(folders[0], folders[3]))["a"]["validation loss"]


def test_a_running_run_says_how_long_it_takes_and_what_its_loss_is_the_mean_of(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start(num_steps=251)
    for step in range(0, 200, 10):
        facts = {"learning/lm_loss": step / 100, "perf/step_time_seconds": 2.0}
        run.add("step", 20.0, step, updates=10 if step else 1, **facts)
    row = overview_of(entries_of(run.write(old=False)))["run"]
    assert row["state"] == "running, 0:02:00 left"
    assert row["training loss"] == "1.5000 (mean of 90 steps)"


def test_lineage_is_a_line_of_each_run(tmp_path):
    root = {"run_name": "small", "folder": "s", "step": 999, "how": "full_state", "tokens": 4e6}
    root["flops"] = 1e15
    grown = {"run_name": "mid", "folder": "m", "step": 49, "how": "growth", "tokens": None}
    entries = entries_of(
        started(tmp_path / "a", lineage=[root]), started(tmp_path / "b", lineage=[root, grown])
    )
    (section,) = run_tables.lineage(entries)
    small = "small: step 999, full state, 4M tokens, 1e+15 FLOPs"
    assert section.texts[0].text.split("\n") == [
        f"{small} -> a: killed, 49.2K tokens, 3.04e+12 FLOPs",
        f"{small} -> mid: step 49, growth -> b: killed, 49.2K tokens, 3.04e+12 FLOPs",
    ]


def test_other_data_and_tokenizers_are_warned_about(tmp_path):
    data = {"train": "x", "identity": "1", "tokenizer": "t", "vocab_size": 10}
    changes_by_run = {
        "a": {},
        "b": {},
        "c": {"tokenizer": "u", "vocab_size": 20},
        "d": {"identity": "2"},
    }
    runs = {
        name: started(tmp_path / name, data=data | keys) for name, keys in changes_by_run.items()
    }

    def warnings(names):
        return run_tables.warnings(entries_of(*map(runs.get, names)))

    assert warnings("ab") == []
    tokenizer, vocabulary = warnings("abc")
    assert tokenizer.endswith("a, b: t; c: u.")
    assert vocabulary.endswith("a, b: 10; c: 20.")
    (warning,) = warnings("ad")
    assert warning.startswith("The runs have different data.")
