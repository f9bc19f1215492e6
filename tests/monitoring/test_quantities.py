"""Sizes of a run: tokens and operations of steps, how they are printed, and peaks of devices."""

import pytest

from MaxText.input_pipeline.rows.batch_plan import BatchPlan, Stage
from MaxText.layers.model import Model
from MaxText.monitoring import peak_flops as peaks
from MaxText.monitoring.flops import count_flops
from MaxText.monitoring.peak_flops import PeakFlops, from_data_sheet, peak_flops
from MaxText.monitoring.quantities import Quantities
from tests.small_models import tiny_config

WINDOW = 16
# Short sequences first, then whole windows, then more of them.
STAGES = BatchPlan((Stage(0, 4, 8), Stage(3, 4, WINDOW), Stage(5, 6, WINDOW)), WINDOW)


def quantities(plan, **keys):
    config = tiny_config(**keys)
    return Quantities(Model(config.model), config.batch, plan, 2, 8, PeakFlops(1.0, "a data sheet"))


def test_sums_over_steps():
    ours = quantities(STAGES)
    flops = 0.0
    for step in range(8):
        assert ours.flops_before(step) == flops
        per_token = count_flops(ours.model, STAGES.at(step).length).per_token
        assert ours.tflops_per_device(step) == per_token * ours.tokens_per_device(step) / 1e12
        flops += ours.tokens(step) * per_token
    assert ours.flops_of_run == ours.flops_before(8) == flops
    assert [ours.tokens_before(step) for step in (0, 1, 3, 5, 6)] == [0, 64, 192, 320, 416]
    assert ours.tokens_of_run == ours.tokens_before(8) == 416 + 2 * 96
    assert ours.tokens_per_device(6) == 48
    # Sequences of half the length have half the attention.
    short, whole = ours.flops(0), ours.flops(3)
    assert whole.weights == short.weights
    assert whole.attention == 2 * short.attention


@pytest.mark.parametrize("mlm_training", [False, True])
def test_the_printed_formula_gives_the_printed_number(mlm_training):
    ours = quantities(BatchPlan.constant(4, WINDOW), mlm_training=mlm_training)
    count = ours.flops(0)
    # A layer of 32 x (4 + 2 x 2 + 4) x 8 and 3 x 32 x 64, three times, and the head.
    assert count.matmul_parameters == 3 * (32 * 96 + 3 * 32 * 64) + 32 * 64
    scores = 12 if mlm_training else 6
    numbers = f"6 x {count.matmul_parameters} + {scores} x 3 x 4 x 8 x 16"
    assert 6 * count.matmul_parameters + scores * 3 * 4 * 8 * 16 == count.per_token
    assert f" = {numbers} = {count.per_token:,.0f}" in " ".join(ours.describe().split())


def test_data_sheets():
    for kind, tflops in [
        ("TPU v3", 61.5), ("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5e", 197), ("TPU v5", 459),
        ("TPU v5p", 459), ("TPU v6 lite", 918), ("TPU7x", 1153.5), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla V100-SXM2-16GB", 125), ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
    ]:  # fmt: skip
        peak = from_data_sheet(kind)
        assert peak is not None
        assert (kind, peak.tflops) == (kind, tflops)
        assert kind in peak.source


def test_a_cpu_is_measured():
    assert from_data_sheet("cpu") is None
    peak = peak_flops()
    assert 1e-3 < peak.tflops < 100
    assert "measured" in peak.source


@pytest.mark.parametrize("damage", [None, "{", '{"a": 3}', "[]"])
def test_a_processor_is_measured_once(tmp_path, monkeypatch, damage):
    measured = []

    def measure(device):
        measured.append(PeakFlops(1.0 + len(measured), "measured"))
        return measured[-1]

    monkeypatch.setattr(peaks, "measured", measure)
    first = peak_flops(cache_folder=str(tmp_path))
    if damage is not None:
        (tmp_path / "peak_flops.json").write_text(damage)
    again = peak_flops(cache_folder=str(tmp_path))
    assert first == measured[0]
    assert again == (measured[0] if damage is None else measured[1])
