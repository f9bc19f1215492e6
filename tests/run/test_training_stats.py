"""Tokens and operations of steps, what a run and its ancestors have spent, peaks of devices."""

import pytest

from MaxText.cost.flops import count_flops
from MaxText.hardware import peak_flops as peaks
from MaxText.hardware.peak_flops import PeakFlops, datasheet_peak, peak_flops
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, ScheduleStage
from MaxText.layers.assembly.model import Model
from MaxText.run.restore import Lineage, RestoreResult
from MaxText.run.training_stats import TrainingStats
from tests.small_models import tiny_config

WINDOW = 16
# Short sequences first, then whole windows, then more of them.
STAGES = BatchSchedule(
    (ScheduleStage(0, 4, 8), ScheduleStage(3, 4, WINDOW), ScheduleStage(5, 6, WINDOW)), WINDOW
)


def stats(plan, num_devices=2, num_steps=8, **keys):
    config = tiny_config(**keys)
    peak = PeakFlops(1.0, "a data sheet")
    return TrainingStats(Model(config.model), config.batch, plan, num_devices, num_steps, peak)


def test_sums_over_steps():
    run_stats = stats(STAGES)
    flops = 0.0
    for step in range(8):
        assert run_stats.flops_before(step) == flops
        per_token = count_flops(run_stats.model, STAGES.at(step).length).per_token
        assert (
            run_stats.flops(step).tflops(run_stats.tokens_per_device(step))
            == per_token * run_stats.tokens_per_device(step) / 1e12
        )
        flops += run_stats.tokens(step) * per_token
    assert run_stats.flops_of_run == run_stats.flops_before(8) == flops
    assert [run_stats.tokens_before(step) for step in (0, 1, 3, 5, 6)] == [0, 64, 192, 320, 416]
    assert run_stats.tokens_of_run == run_stats.tokens_before(8) == 416 + 2 * 96
    assert run_stats.tokens_per_device(6) == 48
    # Sequences of half the length have half the attention.
    short, whole = run_stats.flops(0), run_stats.flops(3)
    assert (whole.weights, whole.attention) == (short.weights, 2 * short.attention)


@pytest.mark.parametrize("mlm_training", [False, True])
def test_the_printed_formula_gives_the_printed_number(mlm_training):
    run_stats = stats(BatchSchedule.constant(4, WINDOW), mlm_training=mlm_training)
    count = run_stats.flops(0)
    # A layer of 32 x (4 + 2 x 2 + 4) x 8 and 3 x 32 x 64, three times, and the head.
    assert count.matmul_parameters == 3 * (32 * 96 + 3 * 32 * 64) + 32 * 64
    attention = (12 if mlm_training else 6) * 3 * 4 * 8 * 16
    numbers = f"6 x {count.matmul_parameters} + {attention} + 0"
    assert 6 * count.matmul_parameters + attention == count.per_token
    assert f" = {numbers} = {count.per_token:,.0f}" in " ".join(run_stats.describe().split())


def test_data_sheets():
    """Of names that begin alike, too."""
    for kind, tflops in [
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
    ]:
        peak = datasheet_peak(kind)
        assert peak is not None
        assert (kind, peak.tflops) == (kind, tflops)
        assert kind in peak.source


def test_a_cpu_is_measured():
    assert datasheet_peak("cpu") is None
    peak = peak_flops()
    assert 1e-3 < peak.tflops < 100
    assert "measured" in peak.source


@pytest.mark.parametrize("damage", [None, "{", '{"a": 3}', "[]"])
def test_a_processor_is_measured_once(tmp_path, monkeypatch, damage):
    measured = []

    def measure(device):
        measured.append(PeakFlops(1.0 + len(measured), "measured"))
        return measured[-1]

    monkeypatch.setattr(peaks, "measure_peak", measure)
    first = peak_flops(cache_folder=str(tmp_path))
    if damage is not None:
        (tmp_path / "peak_flops.json").write_text(damage)
    again = peak_flops(cache_folder=str(tmp_path))
    assert (first, again) == (measured[0], measured[0] if damage is None else measured[1])


def test_a_peak_that_a_step_beats_is_measured_again(tmp_path, monkeypatch):
    """The first measurement may have come while the machine was busy."""
    speeds = iter([1.0, 4.0, 3.0, 9.0])
    monkeypatch.setattr(
        peaks, "measure_peak", lambda device: PeakFlops(next(speeds), "measured here")
    )
    folder = str(tmp_path)
    assert peak_flops(cache_folder=folder).tflops == 1.0
    assert peak_flops(cache_folder=folder, beaten_by=0.9).tflops == 1.0
    assert peak_flops(cache_folder=folder, beaten_by=1.6).tflops == 4.0
    assert peak_flops(cache_folder=folder, beaten_by=2.0).tflops == 4.0  # by another run, say
    assert peak_flops(cache_folder=folder, beaten_by=5.0).tflops == 4.0  # 3 is less
    assert peak_flops(cache_folder=folder).tflops == 4.0


TOKENS = 4 * 16  # of an update


@pytest.fixture(scope="module")
def spending():
    return stats(BatchSchedule.constant(4, WINDOW), num_devices=1, num_steps=100)


def begun(how, first_step, metadata, stored_step=9):
    return RestoreResult(
        None, first_step, None, "", how, metadata, f"/runs/old/{stored_step}", stored_step
    )


def saved(lineage, step, run_name):
    """The metadata of a checkpoint, as far as it is read here."""
    return {"config": {"run_name": run_name}, **lineage.metadata(step)}


def test_what_a_run_has_spent(spending):
    new = Lineage.of(begun("scratch", 0, {}), spending)
    assert new.spent_before(0) == (0, 0.0)
    assert new.progress(9)["progress/tokens"] == 10 * TOKENS
    assert new.progress(9)["progress/flops"] == pytest.approx(10 * spending.flops_before(1))
    # The batch may have changed since a checkpoint; what was spent is what was spent.
    kept = saved(Lineage(spending), 9, "first") | {"spent": {"tokens": 5, "flops": 7.0}}
    resumed = Lineage.of(begun("resume", 10, kept), spending)
    assert resumed.spent_before(10) == (5, 7.0)
    assert resumed.spent_before(12).tokens == 5 + 2 * TOKENS
    assert [*new.ancestors, *resumed.ancestors] == []


@pytest.mark.parametrize(("how", "first_step"), [("parameters", 0), ("full_state", 10)])
def test_totals_are_cumulative_over_generations(spending, how, first_step):
    grandparent = saved(Lineage(spending), 9, "grandparent")
    parent = Lineage.of(begun(how, first_step, grandparent), spending)
    assert parent.spent_before(first_step) == (0, 0.0)
    child = Lineage.of(begun(how, 0, saved(parent, first_step + 4, "parent"), 4), spending)
    old, young = child.ancestors
    assert (old["run_name"], old["how"], old["tokens"]) == ("grandparent", how, 10 * TOKENS)
    assert (young["run_name"], young["step"], young["tokens"]) == ("parent", 4, 15 * TOKENS)
    assert young["flops"] == pytest.approx(spending.flops_before(15))
    # A restart of the child keeps them.
    again = Lineage.of(begun("resume", 3, saved(child, 2, "child")), spending)
    assert again.ancestors == child.ancestors


def test_weights_that_say_nothing_have_unknown_totals(spending):
    lineage = Lineage.of(begun("parameters", 0, {}, None), spending)
    (parent,) = lineage.ancestors
    assert (parent["run_name"], parent["step"], parent["tokens"]) == (None, None, None)
    (_, parent) = Lineage.of(begun("parameters", 0, saved(lineage, 3, "x")), spending).ancestors
    assert parent["tokens"] is None
