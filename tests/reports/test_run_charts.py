"""From runs to curves: positions, marks, ranges, the mean of seeds, and fewer points."""

import numpy as np
import pytest

from MaxText.monitoring.run_record import read_run
from MaxText.reports.chart import PALETTE, draw_chart
from MaxText.reports.curves import MAX_POINTS, MAX_SMOOTH_POINTS, Axes, downsample, running_median
from MaxText.reports.entries import all_runs, group_runs
from MaxText.reports.plots import plot_chart, plot_goodput, plot_hyperparameters
from MaxText.reports.run_charts import loss_charts, quantity_charts
from MaxText.reports.run_tables import overview
from tests.reports.run_files import TOKENS_PER_UPDATE, RunFiles, completed


def charts_of(folders, groups=None):
    runs = [read_run(folder) for folder in folders]
    entries, axes = group_runs(runs, groups), Axes(runs)
    charts = (*loss_charts(entries, axes), *quantity_charts(entries, axes))
    return {chart.name: chart for chart in charts}


def of_kind(chart, kind):
    return [series for series in chart.series if series.kind == kind]


def test_a_single_run(completed_run):
    charts = charts_of([completed_run])
    shown = [name for name, chart in charts.items() if not chart.folded]
    assert shown == ["loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu"]
    assert {"learning_loss", "perf_step_time_seconds", "eval_total_weights"} < charts.keys()
    raw, line, dots = charts["loss"].series
    assert (raw.kind, line.kind, dots.kind) == ("raw", "line", "dots")
    assert raw.x["tokens"].tolist() == [TOKENS_PER_UPDATE * (s + 1) for s in range(400)]
    assert raw.x["step"].tolist() == list(range(400))
    assert dots.x["step"].tolist() == list(range(49, 400, 50))
    assert (np.diff(raw.x["time"]) > 0).all()
    # Of four devices, each with a quarter of the tokens.
    speed = charts["tokens_per_second"].series[0].y
    assert speed == pytest.approx(TOKENS_PER_UPDATE / 0.52, rel=0.2)
    assert charts["loss"].references == [("unigram entropy, 7.31", 7.31)]
    # Its colors tell training from validation.
    assert line.color != dots.color


def test_several_runs_have_a_color_each_and_shares_that_add_up(completed_run, eventful_run):
    chart = charts_of([completed_run, eventful_run])["loss"]
    colors = {owner: {s.color for s in chart.series if s.owner == owner} for owner in "ab"}
    assert colors == {"a": {0}, "b": {1}}
    bars = plot_goodput(group_runs([read_run(completed_run), read_run(eventful_run)]))
    assert np.sum([bar.x for bar in bars.figure.data], axis=0) == pytest.approx([1, 1], abs=1e-3)


def test_what_happened_is_marked_on_the_curve(eventful_run):
    chart = charts_of([eventful_run])["loss"]
    kinds = {mark.kind for mark in chart.marks}
    assert kinds == {"checkpoint", "restart", "skipped step", "rollback", "diverged or failed"}
    (restart,) = [mark for mark in chart.marks if mark.kind == "restart"]
    assert restart.text == (
        "resume from checkpoint of step 149; 20 steps lost, 10.3 s of work (step 150)"
    )
    (line,) = of_kind(chart, "line")
    assert restart.x["tokens"] == 151 * TOKENS_PER_UPDATE
    assert restart.y == pytest.approx(np.interp(150, line.x["step"], line.y))
    # Time running has no hole where nothing ran.
    assert np.diff(of_kind(chart, "raw")[0].x["time"]).max() < 1


def test_a_spike_does_not_flatten_the_rest(run):
    assert charts_of([run.write()]) == {}
    run.steps(0, 300)
    run.rows[200]["learning/lm_loss"] = 900.0
    chart = charts_of([run.write()])["loss"]
    assert chart.y_range[1] < 12
    assert max(of_kind(chart, "raw")[0].y) == 900.0


def test_a_number_recorded_once_has_a_chart(run):
    run.steps(0, 30)
    run.rows[20]["learning/grad_norm/layer_0"] = 1.0
    assert "learning_grad_norm_layer_0" in charts_of([run.write()])


def test_ancestors_shift_a_run_to_the_right(tmp_path):
    run = RunFiles(tmp_path / "run")
    ancestor = {"run_name": "a", "folder": "a", "step": 9, "how": "growth", "tokens": 1e6}
    run.start(lineage=[ancestor | {"flops": 1e15}])
    run.steps(0, 1, nan_at=0)
    assert "loss" not in charts_of([run.write()])
    run.steps(0, 5)
    chart = charts_of([run.write()])["loss"]
    assert of_kind(chart, "raw")[0].x["tokens"][0] == 1e6 + TOKENS_PER_UPDATE
    assert "ancestors" in Axes([read_run(run.folder)]).by_name["tokens"].title


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
    assert ((mean.low <= mean.y) & (mean.y <= mean.high)).all()
    assert mean.x["step"].tolist() == list(range(120))
    assert dots.x["step"].tolist() == [49, 99]
    losses = [read_run(folder).evaluations[1]["eval/avg_loss"] for folder in folders]
    band = (dots.low[-1], dots.y[-1], dots.high[-1])
    assert band == (min(losses), pytest.approx(np.mean(losses)), max(losses))


@pytest.mark.slow
def test_figures_show_any_name(tmp_path):
    """Names that matplotlib would read as something else; runs of one name show their folders."""
    names = ["_hidden", "a $x$ b", "50 % <b>", "日本", "first/run", "second/run"]
    folders = [completed(tmp_path / name) for name in names]
    runs = [read_run(folder) for folder in folders]
    entries, axes = group_runs(runs), Axes(runs)
    assert [entry.label for entry in entries] == names
    chart = charts_of(folders)["loss"]
    for name in names[:4]:
        assert draw_chart(chart, axes.by_name["flops"], name).startswith(b"\x89PNG")


def test_thinning_keeps_spikes_gaps_and_both_ends():
    assert downsample(np.arange(7.0)).tolist() == list(range(7))
    assert downsample(np.zeros(0)).size == 0
    values = np.sin(np.arange(1_000_000) / 1e4)
    values[123_456], values[700_001] = 50.0, -50.0
    values[400_000:400_003] = np.nan
    indices = downsample(values)
    assert indices.size <= MAX_POINTS
    assert {0, 123_456, 400_000, 700_001, 999_999} <= set(indices.tolist())
    assert (np.diff(indices) > 0).all()
    assert {0, 9_999} <= set(downsample(np.full(10_000, np.nan)).tolist())


def test_running_median_does_not_lag_and_ignores_spikes():
    line = 9.0 - np.arange(500) / 100
    spiked = line.copy()
    spiked[250], spiked[100] = 99.0, np.nan
    indices, medians = running_median(spiked)
    has_median = ~np.isnan(medians)
    assert medians[has_median] == pytest.approx(line[indices[has_median]], abs=0.06)
    assert indices[~has_median].tolist() == [100]
    indices, _ = running_median(np.ones(100_000))
    assert indices.size <= MAX_SMOOTH_POINTS
    assert indices[-1] == 99_999


# Machado, Oliveira and Fernandes (2009), table 1, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colors):
    values = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in colors])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def test_colors_differ_for_every_reader_and_on_any_paper():
    """By 8 in CIELAB, and by a contrast of 3 to white and dark paper."""
    for matrix in DEFICIENCIES.values():
        seen = np.clip(linear(PALETTE) @ np.transpose(matrix), 0, 1)
        x, y, z = np.cbrt(seen @ XYZ.T / XYZ.sum(1)).T  # exact for all but very dark colors
        lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
        distances = np.linalg.norm(lab[:, None] - lab, axis=-1)
        assert distances[~np.eye(len(PALETTE), dtype=bool)].min() >= 8
    luminance = linear([*PALETTE, "#ffffff", "#14191e"]) @ XYZ[1] + 0.05
    colors, white, dark = luminance[:-2], luminance[-2], luminance[-1]
    assert min((white / colors).min(), (colors / dark).min()) >= 3


def test_keys_of_any_type_are_plotted(completed_run, eventful_run):
    entries = group_runs([read_run(completed_run), read_run(eventful_run)], None)
    first, second = all_runs(entries)
    values = {first: {"momentum": 0.9}, second: None}
    assert len(plot_hyperparameters(entries, {"adafactor": values, "data_shuffle_seed": {}})) == 1


def test_the_first_losses_are_visible_or_named_as_cut(run):
    run.steps(0, 300)
    chart = charts_of([run.write()])["loss"]
    first = run.rows[2]["learning/lm_loss"]
    assert chart.y_range[1] > first
    assert chart.note == ""
    # From so high that the rest would be flat.
    for row in run.rows:
        if row["event"] == "step" and row["step"] < 4:
            row["learning/lm_loss"] = 80.0 - row["step"]
    chart = charts_of([run.write()])["loss"]
    top = chart.y_range[1]
    assert top < 12
    assert chart.note == f"cut off above {top:.3g}: the first losses, from 80"
    run.rows[200]["learning/lm_loss"] = 900.0
    step = run.rows[200]["step"]
    chart = charts_of([run.write()])["loss"]
    spike = f"; losses up to 900, the last at step {step:,}"
    assert chart.note == f"cut off above {chart.y_range[1]:.3g}: the first losses, from 80{spike}"
    axes = Axes([read_run(run.folder)])
    assert chart.note in plot_chart(chart, axes).subtitle
    assert draw_chart(chart, axes.by_name["step"]) != draw_chart(
        chart._replace(note=""), axes.by_name["step"]
    )


def other_objective(folder):
    """A run of an objective that is no cross entropy, with one beside it."""
    run = RunFiles(folder)
    run.start(objective_in_nats=False, unigram_entropy_nats=None)
    run.steps(0, 60, every=20)
    for row in run.rows:
        if row["event"] == "step":
            row["learning/loss"] = row["learning/lm_loss"] / 2
        if row["event"] == "evaluation":
            row["eval/lm_loss"] = row["eval/avg_loss"]
            row["eval/avg_loss"] /= 2
    return run.write(config={"loss_type": "focal"})


def test_another_objective_has_its_own_chart_and_one_of_the_cross_entropy(tmp_path, run):
    folder = other_objective(tmp_path / "focal")
    record = read_run(folder)
    charts = charts_of([folder])
    objective, cross_entropy = charts["loss"], charts["loss_in_nats"]
    assert objective.y_title == "loss (of the objective, per token)"
    assert cross_entropy.y_title == "loss (nats per token)"
    (own_dots,), (dots,) = of_kind(objective, "dots"), of_kind(cross_entropy, "dots")
    np.testing.assert_allclose(2 * own_dots.y, dots.y)
    np.testing.assert_allclose(
        2 * of_kind(objective, "raw")[0].y, of_kind(cross_entropy, "raw")[0].y
    )
    assert record.final_loss == own_dots.y[-1]
    assert record.final_lm_loss == dots.y[-1]
    assert record.training_loss[0] < 4
    table = overview(group_runs([record]), {})
    shown = table.rows[0][table.header.index("validation loss")]
    assert shown == f"{record.final_loss:.4f} (cross entropy {record.final_lm_loss:.4f})"
    run.steps(0, 60, every=20)
    charts_of_both = charts_of([folder, run.write()])
    assert {"loss", "loss_2", "loss_in_nats"} <= set(charts_of_both)
    assert {series.owner for series in charts_of_both["loss_in_nats"].series} >= {
        "focal",
        run.folder.name,
    }
