"""From runs to curves: positions, marks, ranges, and the mean of seeds."""

import numpy as np
import pytest

from MaxText.monitoring.report.curves import Axes
from MaxText.monitoring.report.entries import arrange
from MaxText.monitoring.report.pictures import draw_bars, draw_chart
from MaxText.monitoring.report.run_charts import goodput_bars, loss_chart, quantity_charts
from MaxText.monitoring.run_record import read_run
from tests.monitoring.report.run_files import TOKENS_PER_UPDATE, RunFiles, completed, eventful

PNG = b"\x89PNG"


def charts_of(folders, groups=None):
    runs = [read_run(folder) for folder in folders]
    entries, axes = arrange(runs, groups), Axes(runs)
    loss = loss_chart(entries, axes)
    return {chart.name: chart for chart in (loss, *quantity_charts(entries, axes)) if chart}


def of_kind(chart, kind):
    return [series for series in chart.series if series.kind == kind]


def test_a_single_run(tmp_path):
    charts = charts_of([completed(tmp_path / "run")])
    assert list(charts) == ["loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu"]
    raw, line, dots = charts["loss"].series
    assert (raw.kind, line.kind, dots.kind) == ("raw", "line", "dots")
    assert raw.points["tokens"].x.tolist() == [TOKENS_PER_UPDATE * (s + 1) for s in range(400)]
    assert raw.points["step"].x.tolist() == list(range(400))
    assert dots.points["step"].x.tolist() == list(range(49, 400, 50))
    assert (np.diff(raw.points["time"].x) > 0).all()
    # Of four devices, each with a quarter of the tokens.
    speed = charts["tokens_per_second"].series[0].points["step"].y
    assert speed == pytest.approx(TOKENS_PER_UPDATE / 0.52, rel=0.2)
    assert charts["loss"].references == [("unigram entropy, 7.31", 7.31)]
    # Its colours tell training from validation.
    assert line.colour != dots.colour


def test_several_runs_have_a_colour_each(tmp_path):
    chart = charts_of([completed(tmp_path / "a"), completed(tmp_path / "b")])["loss"]
    colours = {owner: {s.colour for s in chart.series if s.owner == owner} for owner in "ab"}
    assert colours == {"a": {0}, "b": {1}}


def test_what_happened_is_marked_on_the_curve(tmp_path):
    chart = charts_of([eventful(tmp_path / "run")])["loss"]
    kinds = {mark.kind for mark in chart.marks}
    assert kinds == {"checkpoint", "restart", "skipped update", "rewind", "diverged or failed"}
    (restart,) = [mark for mark in chart.marks if mark.kind == "restart"]
    assert restart.text == "restart 1, 20 updates lost (step 150)"
    line = of_kind(chart, "line")[0].points["tokens"]
    x, y = restart.places["tokens"]
    assert x == 151 * TOKENS_PER_UPDATE
    assert y == pytest.approx(np.interp(x, line.x, line.y))


def test_a_spike_does_not_flatten_the_rest(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 300)
    run.rows[200]["learning/lm_loss"] = 900.0
    chart = charts_of([run.write()])["loss"]
    assert chart.y_range[1] < 12
    assert max(of_kind(chart, "raw")[0].points["step"].y) == 900.0


def test_time_running_has_no_hole_where_nothing_ran(tmp_path):
    chart = charts_of([eventful(tmp_path / "run")])["loss"]
    minutes = of_kind(chart, "raw")[0].points["time"].x
    assert np.diff(minutes).max() < 1


def test_a_run_without_numbers_has_no_charts(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    assert charts_of([run.write()]) == {}
    run.steps(0, 1, nan_at=0)
    assert "loss" not in charts_of([run.write()])


def test_ancestors_shift_a_run_to_the_right(tmp_path):
    run = RunFiles(tmp_path / "run")
    ancestor = {"run_name": "a", "folder": "a", "step": 9, "how": "growth", "tokens": 1e6}
    run.start(lineage=[ancestor | {"flops": 1e15}])
    run.steps(0, 5)
    chart = charts_of([run.write()])["loss"]
    assert of_kind(chart, "raw")[0].points["tokens"].x[0] == 1e6 + TOKENS_PER_UPDATE
    assert "ancestors included" in Axes([read_run(run.folder)]).axis("tokens").title


def test_seeds_have_a_mean_and_a_band(tmp_path):
    folders = [
        completed(tmp_path / f"seed{seed}", seed=seed, floor=3 + 0.1 * seed) for seed in range(3)
    ]
    chart = charts_of(folders, {"three": [str(folder) for folder in folders]})["loss"]
    assert len(of_kind(chart, "thin")) == 3
    assert not of_kind(chart, "raw")
    (mean,), (dots,) = of_kind(chart, "line"), of_kind(chart, "dots")
    for series in (mean, dots):
        points = series.points["flops"]
        assert (points.low <= points.y).all()
        assert (points.y <= points.high).all()
    finals = [read_run(folder).final_loss for folder in folders]
    last = dots.points["step"]
    assert last.y[-1] == pytest.approx(np.mean(finals))
    assert (last.low[-1], last.high[-1]) == (min(finals), max(finals))


def test_the_mean_ends_where_the_shortest_seed_ends(tmp_path):
    long, short = RunFiles(tmp_path / "a"), RunFiles(tmp_path / "b", seed=1)
    for run, end in ((long, 200), (short, 120)):
        run.start()
        run.steps(0, end, every=50)
    folders = [long.write(), short.write()]
    chart = charts_of(folders, {"both": [str(folder) for folder in folders]})["loss"]
    assert of_kind(chart, "line")[0].points["step"].x[-1] == 119
    assert of_kind(chart, "dots")[0].points["step"].x.tolist() == [49, 99]


def test_a_group_of_one_seed_has_no_band(tmp_path):
    folder = completed(tmp_path / "a")
    chart = charts_of([folder], {"one": [str(folder)]})["loss"]
    assert of_kind(chart, "line")[0].points["step"].low is None


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [completed(tmp_path / parent / "run") for parent in ("first", "second")]
    entries = arrange([read_run(folder) for folder in runs])
    assert [entry.label for entry in entries] == ["first/run", "second/run"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_hidden", "a $x$ b", "50 % <b>", "\u65e5\u672c"])
def test_pictures_show_any_name(tmp_path, name):
    folders = [completed(tmp_path / name), eventful(tmp_path / "other")]
    runs = [read_run(folder) for folder in folders]
    entries, axes = arrange(runs), Axes(runs)
    for chart in charts_of(folders).values():
        picture = draw_chart(chart, axes.axis("flops"), name)
        assert picture is not None
        assert picture.startswith(PNG)
    assert draw_bars(goodput_bars(entries), name).startswith(PNG)


def test_shares_of_the_bars_add_up(tmp_path):
    runs = [read_run(completed(tmp_path / "a")), read_run(eventful(tmp_path / "b"))]
    bars = goodput_bars(arrange(runs))
    assert np.sum(list(bars.parts.values()), axis=0) == pytest.approx([1, 1], abs=1e-3)
