"""What devices can compute per second."""

import pytest

from MaxText.monitoring import peak_flops as module
from MaxText.monitoring.peak_flops import from_data_sheet, peak_flops


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
    ],
)
def test_data_sheets(kind, tflops):
    peak = from_data_sheet(kind)
    assert peak is not None
    assert peak.tflops == tflops
    assert kind in peak.source


def test_a_cpu_is_measured():
    assert from_data_sheet("cpu") is None
    peak = peak_flops()
    assert 1e-3 < peak.tflops < 100
    assert "measured" in peak.source


@pytest.mark.parametrize("damage", [None, "{", '{"a": 3}', "[]"])
def test_a_processor_is_measured_once(tmp_path, monkeypatch, damage):
    first = peak_flops(cache_folder=str(tmp_path))
    file = tmp_path / "peak_flops.json"
    if damage is not None:
        file.write_text(damage)
        assert peak_flops(cache_folder=str(tmp_path)).tflops > 0
        return
    monkeypatch.setattr(module, "measured", lambda device: pytest.fail("measured again"))
    assert peak_flops(cache_folder=str(tmp_path)) == first
