"""What the tables say about runs and models."""

import pytest

from MaxText.monitoring.report import model_tables, run_tables, wording
from MaxText.monitoring.report.curves import Axes
from MaxText.monitoring.report.entries import all_runs, arrange
from MaxText.monitoring.report.run_charts import loss_chart, loss_charts, quantity_charts
from MaxText.monitoring.run_record import read_run
from tests.monitoring.report.run_files import COST, RunFiles, completed, eventful


def entries_of(*folders, groups=None):
    return arrange([read_run(folder) for folder in folders], groups)


def as_dict(table):
    return {row[0]: dict(zip(table.header[1:], row[1:], strict=True)) for row in table.rows}


def started(folder, *, steps=3, **facts):
    run = RunFiles(folder)
    run.start(**facts)
    run.steps(0, steps)
    return run.write()


def test_overview(tmp_path):
    table = run_tables.overview(entries_of(completed(tmp_path / "a"), eventful(tmp_path / "b")))
    rows = as_dict(table)
    assert rows["a"]["state"] == "completed"
    assert rows["b"]["state"] == "diverged"
    assert rows["a"]["updates"] == "400 of 400"
    assert rows["b"]["updates"] == "320 of 400"
    assert rows["a"]["tokens"] == "6.55M"
    assert rows["a"]["devices"] == "4 x TPU v5 lite"


def test_overview_of_seeds(tmp_path):
    folders = [completed(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    table = run_tables.overview(entries_of(*folders, groups={"both": map(str, folders)}))
    losses = [read_run(folder).final_loss for folder in folders]
    assert as_dict(table)["both"]["validation loss"].startswith(f"{sum(losses) / 2:.4f} ± ")


def blown_up(folder, **arguments):
    """A run that earlier versions call complete: its loss is finite and back above its first."""
    run = RunFiles(folder, **arguments)
    run.start()
    run.steps(0, 40, every=20)
    run.steps(40, 60, **{"learning/lm_loss": 74.5})
    run.evaluate(59, 74.5)
    run.add("stop", reason="completed")
    return run.write()


def test_no_mean_contains_a_run_that_blew_up(tmp_path):
    folders = [completed(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    folders.append(blown_up(tmp_path / "c", seed=3))
    entries = entries_of(*folders, groups={"all": map(str, folders)})
    rows = as_dict(run_tables.overview(entries))
    assert rows["c"]["state"] == "diverged"
    losses = [read_run(folder).final_loss for folder in folders[:2]]
    assert rows["all"]["validation loss"].startswith(f"{sum(losses) / 2:.4f} ± ")
    chart = loss_chart(entries, Axes([*all_runs(entries).values()]))
    mean = next(series for series in chart.series if series.kind == "line").points["step"]
    assert max(mean.high) < 20
    dots = next(series for series in chart.series if series.kind == "dots").points["step"]
    assert max(dots.high) < 20


@pytest.mark.parametrize(
    ("sources", "drawn"), [(("measured here",) * 2, False), (("data sheet",) * 2, True)]
)
def test_mfu_of_peaks_that_were_measured_differently_is_not_compared(tmp_path, sources, drawn):
    folders = [
        started(tmp_path / str(n), steps=30, peak_tflops=0.02 + 0.01 * n, peak_source=source)
        for n, source in enumerate(sources)
    ]
    entries = entries_of(*folders)
    charts = quantity_charts(entries, Axes([*all_runs(entries).values()]))
    assert ("mfu" in [chart.name for chart in charts]) == drawn
    rows = as_dict(run_tables.overview(entries))
    assert all((row["MFU"] != wording.ABSENT) == drawn for row in rows.values())
    notes = " ".join(model_tables.cost(entries)[0].paragraphs)
    assert ("MFU is not compared" in notes) == (not drawn)


def test_losses_of_different_kinds_are_on_no_common_axis(tmp_path):
    folders = [completed(tmp_path / name) for name in "abcd"]
    others = {"b": "loss_type: entmax\nentmax_alpha: 1.3\n", "c": "mlm_training: true\n"}
    for name, keys in others.items():
        (tmp_path / name / "config.yml").write_text(keys)
    entries = entries_of(*folders)
    charts = loss_charts(entries, Axes([*all_runs(entries).values()]))
    owners = [{series.owner for series in chart.series} for chart in charts]
    assert owners == [{"a", "d"}, {"b"}, {"c"}]
    assert charts[1].title.startswith("Loss: entmax, alpha 1.3")
    assert len({chart.name for chart in charts}) == 3
    rows = as_dict(run_tables.overview(entries))
    losses = {name: row["validation loss"] for name, row in rows.items()}
    assert "(entmax, alpha 1.3" in losses["b"]
    assert "of masked tokens" in losses["c"]
    alone = entries_of(folders[0], folders[3])
    assert "(" not in as_dict(run_tables.overview(alone))["a"]["validation loss"]


def test_the_training_loss_says_what_it_is_the_mean_of(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    for step in range(0, 200, 10):
        run.add("step", 1.0, step, updates=10 if step else 1, **{"learning/lm_loss": step / 100})
    rows = as_dict(run_tables.overview(entries_of(run.write())))
    assert rows["run"]["training loss"] == "1.5000 (mean of the last 90 updates)"


def test_a_running_run_says_how_long_it_takes(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start(num_steps=100)
    for step in range(40):
        run.add("step", 2.0, step, **{"perf/step_time_seconds": 2.0})
    table = run_tables.overview(entries_of(run.write(old=False)))
    assert table.rows[0][1] == "running, 0:02:00 left"


def test_goodput_in_numbers(tmp_path):
    folder = eventful(tmp_path / "b")
    one = {row[0]: row[1:] for row in run_tables.goodput_table(entries_of(folder)).rows}
    assert one["time running"][1] == "100.0 %"
    assert one["down between 2 attempts"][0].startswith("0:0")
    shares = [float(share.split()[0]) for part, (_, share) in one.items() if share]
    assert sum(shares) == pytest.approx(200, abs=0.5)
    two = run_tables.goodput_table(entries_of(folder, completed(tmp_path / "a")))
    assert as_dict(two)["b"]["attempts"] == "2"


def test_what_happened(tmp_path):
    (section,) = run_tables.happenings(entries_of(eventful(tmp_path / "run")))
    told = [row[-1] for row in section.table.rows]
    assert told[0] == "start from scratch"
    assert told[1].startswith("resume from checkpoint of step 149; 20 updates lost, ")
    assert told[2:] == [
        "configuration: learning_rate: 0.003 -> 0.002",
        "1 update skipped: gradient norm 8.1e3 is not usual",
        "rewind to step 250: loss rose to 9.1",
        "stop: diverged",
    ]


def test_only_keys_that_differ_are_shown(tmp_path):
    entries = entries_of(completed(tmp_path / "a"), eventful(tmp_path / "b"))
    (section,) = model_tables.configuration(entries)
    assert section.table.header == ["key", "a", "b"]
    assert section.table.rows == [["learning_rate", "0.003", "0.002"]]
    assert model_tables.configuration(entries_of(tmp_path / "a")) == []


def test_equal_and_absent_configurations(tmp_path):
    a, b = completed(tmp_path / "a"), completed(tmp_path / "b")
    (section,) = model_tables.configuration(entries_of(a, b))
    assert section.paragraphs == ["Every key has the same value in all runs."]
    (b / "config.yml").unlink()
    (section,) = model_tables.configuration(entries_of(a, b))
    assert section.paragraphs == ["No config.yml: b."]


def test_cost(tmp_path):
    (section,) = model_tables.cost(entries_of(completed(tmp_path / "a"), completed(tmp_path / "b")))
    assert section.table.rows[-1] == ["total", "10,228,608", "100.0 %", "66.1M", "100.0 %"]
    assert section.table.rows[1] == ["attention", "2,359,296", "23.1 %", "18.9M", "28.6 %"]
    assert section.paragraphs[-1] == "Peak of a device: 197 TFLOP/s, data sheet."


def test_models_of_different_cost_stand_below_each_other(tmp_path):
    bigger = COST | {"parameters": 20_000_000}
    entries = entries_of(started(tmp_path / "a"), started(tmp_path / "b", cost=bigger))
    (section,) = model_tables.cost(entries)
    totals = [row for row in section.table.rows if row[1] == "total"]
    assert [(row[0], row[2]) for row in totals] == [("a", "10,228,608"), ("b", "20,000,000")]


def test_memory(tmp_path):
    (section,) = model_tables.memory(entries_of(completed(tmp_path / "a")))
    rows = {row[0]: row[1] for row in section.table.rows}
    assert rows["state: optimizer"] == "78 MiB"
    assert rows["step of 32 x 512 tokens: temporaries"] == "858 MiB"
    assert rows["KV cache: a sequence of 512"] == "4.5 MiB"


def test_lineage_is_one_tree_of_all_runs(tmp_path):
    root = {"run_name": "small", "folder": "s", "step": 999, "how": "full_state", "tokens": 4e6}
    root["flops"] = 1e15
    grown = {"run_name": "mid", "folder": "m", "step": 49, "how": "growth", "tokens": None}
    entries = entries_of(
        started(tmp_path / "a", lineage=[root]), started(tmp_path / "b", lineage=[root, grown])
    )
    (section,) = model_tables.lineage(entries)
    lines = section.texts[0].text.split("\n")
    assert lines == [
        "small: step 999, full state, 4M tokens, 1e+15 FLOPs",
        "├─ a: killed, 49.2K tokens, 3.04e+12 FLOPs",
        "└─ mid: step 49, growth",
        "   └─ b: killed, 49.2K tokens, 3.04e+12 FLOPs",
    ]
    assert model_tables.lineage(entries_of(completed(tmp_path / "c"))) == []


def test_other_data_and_tokenizers_are_warned_about(tmp_path):
    data = {"train": "x", "identity": "1", "tokenizer": "t", "vocab_size": 10}
    same = [started(tmp_path / name, data=data) for name in "ab"]
    assert model_tables.warnings(entries_of(*same)) == []
    other = started(tmp_path / "c", data=data | {"tokenizer": "u", "vocab_size": 20})
    tokenizer, vocabulary = model_tables.warnings(entries_of(*same, other))
    assert "cannot be compared" in tokenizer
    assert tokenizer.endswith("a, b: t; c: u.")
    assert vocabulary.endswith("a, b: 10; c: 20.")
    elsewhere = started(tmp_path / "d", data=data | {"identity": "2"})
    (warning,) = model_tables.warnings(entries_of(same[0], elsewhere))
    assert warning.startswith("The runs have different data.")


def test_numbers_in_words():
    numbers = (0, 12, 999, 999_400, 999_600, 2_500_000, 1.5e9)
    shown = ["0", "12", "999", "999K", "1M", "2.5M", "1.5B"]
    assert [wording.short_count(number) for number in numbers] == shown
    assert [wording.size(x) for x in (None, 5, 2048, 3 * 2**30)] == ["-", "5 B", "2 KiB", "3 GiB"]
    assert [wording.share(x) for x in (None, float("nan"), 0.5)] == ["-", "-", "50.0 %"]
    assert [wording.spent_time(x) for x in (0.04, 59.9, 3661)] == ["0.0 s", "59.9 s", "1:01:01"]
