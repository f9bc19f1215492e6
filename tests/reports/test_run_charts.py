"""From runs to curves: positions, marks, ranges, the mean of seeds, and fewer points."""

import numpy as np
import pytest

from MaxText.metrics.run_record import read_run
from MaxText.reports.curves import Axes
from MaxText.reports.downsampling import MAX_POINTS, MAX_SMOOTH_POINTS, downsample, running_median
from MaxText.reports.entries import group_runs
from MaxText.reports.figures import draw_bars, draw_chart
from MaxText.reports.run_charts import goodput_bars, loss_chart, quantity_charts
from tests.reports.run_files import TOKENS_PER_UPDATE, RunFiles, completed


def charts_of(folders, groups=None):
    runs = [read_run(folder) for folder in folders]
    entries, axes = group_runs(runs, groups), Axes(runs)
    loss = loss_chart(entries, axes)
    return {chart.name: chart for chart in (loss, *quantity_charts(entries, axes)) if chart}


def of_kind(chart, kind):
    return [series for series in chart.series if series.kind == kind]


def test_a_single_run(completed_run):
    charts = charts_of([completed_run])
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
    # Its colors tell training from validation.
    assert line.color != dots.color


def test_several_runs_have_a_color_each_and_shares_that_add_up(completed_run, eventful_run):
    chart = charts_of([completed_run, eventful_run])["loss"]
    colors = {owner: {s.color for s in chart.series if s.owner == owner} for owner in "ab"}
    assert colors == {"a": {0}, "b": {1}}
    bars = goodput_bars(group_runs([read_run(completed_run), read_run(eventful_run)]))
    assert np.sum(list(bars.parts.values()), axis=0) == pytest.approx([1, 1], abs=1e-3)


def test_what_happened_is_marked_on_the_curve(eventful_run):
    chart = charts_of([eventful_run])["loss"]
    kinds = {mark.kind for mark in chart.marks}
    assert kinds == {"checkpoint", "restart", "skipped step", "rollback", "diverged or failed"}
    (restart,) = [mark for mark in chart.marks if mark.kind == "restart"]
    assert restart.text == "restart 1, 20 steps lost (step 150)"
    line = of_kind(chart, "line")[0].points["tokens"]
    x, y = restart.places["tokens"]
    assert (x, y) == (151 * TOKENS_PER_UPDATE, pytest.approx(np.interp(x, line.x, line.y)))
    # Time running has no hole where nothing ran.
    assert np.diff(of_kind(chart, "raw")[0].points["time"].x).max() < 1


def test_a_spike_does_not_flatten_the_rest(run):
    assert charts_of([run.write()]) == {}
    run.steps(0, 300)
    run.rows[200]["learning/lm_loss"] = 900.0
    chart = charts_of([run.write()])["loss"]
    assert chart.y_range[1] < 12
    assert max(of_kind(chart, "raw")[0].points["step"].y) == 900.0


def test_ancestors_shift_a_run_to_the_right(tmp_path):
    run = RunFiles(tmp_path / "run")
    ancestor = {"run_name": "a", "folder": "a", "step": 9, "how": "growth", "tokens": 1e6}
    run.start(lineage=[ancestor | {"flops": 1e15}])
    run.steps(0, 1, nan_at=0)
    assert "loss" not in charts_of([run.write()])
    run.steps(0, 5)
    chart = charts_of([run.write()])["loss"]
    assert of_kind(chart, "raw")[0].points["tokens"].x[0] == 1e6 + TOKENS_PER_UPDATE
    assert "ancestors" in Axes([read_run(run.folder)]).axis("tokens").title


def test_seeds_have_a_mean_and_a_band(tmp_path):
    """They end where the shortest seed ends."""
    runs = [RunFiles(tmp_path / str(seed), seed=seed, floor=3 + 0.1 * seed) for seed in range(3)]
    for run, end in zip(runs, (200, 120, 200), strict=True):
        run.start()
        run.steps(0, end, every=50)
    folders = [run.write() for run in runs]
    chart = charts_of(folders, {"three": [str(folder) for folder in folders]})["loss"]
    assert len(of_kind(chart, "thin")) == 3
    assert not of_kind(chart, "raw")
    (mean,), (dots,) = of_kind(chart, "line"), of_kind(chart, "dots")
    points = mean.points["step"]
    assert ((points.low <= points.y) & (points.y <= points.high)).all()
    assert points.x[-1] == 119
    last = dots.points["step"]
    assert last.x.tolist() == [49, 99]
    losses = [read_run(folder).evaluations[1]["eval/avg_loss"] for folder in folders]
    found = (last.low[-1], last.y[-1], last.high[-1])
    assert found == (min(losses), pytest.approx(np.mean(losses)), max(losses))


def test_pictures_show_any_name(tmp_path):
    """Names that matplotlib would read as something else; runs of one name show their folders."""
    names = ["_hidden", "a $x$ b", "50 % <b>", "日本", "first/run", "second/run"]
    folders = [completed(tmp_path / name) for name in names]
    runs = [read_run(folder) for folder in folders]
    entries, axes = group_runs(runs), Axes(runs)
    assert [entry.label for entry in entries] == names
    chart = charts_of(folders)["loss"]
    pictures = [draw_bars(goodput_bars(entries), name) for name in names[1:4]]
    for picture in (draw_chart(chart, axes.axis("flops"), names[0]), *pictures):
        assert picture.startswith(b"\x89PNG")


def test_thinning_keeps_spikes_gaps_and_both_ends():
    assert downsample(np.arange(7.0)).tolist() == list(range(7))
    assert downsample(np.zeros(0)).size == 0
    values = np.sin(np.arange(1_000_000) / 1e4)
    values[123_456], values[700_001] = 50.0, -50.0
    values[400_000:400_003] = np.nan
    kept = downsample(values)
    assert kept.size <= MAX_POINTS
    assert {0, 123_456, 400_000, 700_001, 999_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert {0, 9_999} <= set(downsample(np.full(10_000, np.nan)).tolist())


def test_running_median_does_not_lag_and_ignores_spikes():
    line = 9.0 - np.arange(500) / 100
    spiked = line.copy()
    spiked[250], spiked[100] = 99.0, np.nan
    indices, medians = running_median(spiked)
    there = ~np.isnan(medians)
    assert medians[there] == pytest.approx(line[indices[there]], abs=0.06)
    assert indices[~there].tolist() == [100]
    indices, _ = running_median(np.ones(100_000))
    assert indices.size <= MAX_SMOOTH_POINTS
    assert indices[-1] == 99_999
