"""FLOP counts, peaks, tables."""

import jax
import jax.numpy as jnp
import pytest

from MaxText.monitoring.flops import FlopCount
from MaxText.monitoring.peak_flops import from_data_sheet, peak_flops
from MaxText.monitoring.tables import derived_quantities, parameter_table

SIZES = {"num_layers": 4, "num_query_heads": 8, "head_dim": 16, "sequence_length": 256}


def test_formula_by_hand():
    count = FlopCount.from_model(1000, **SIZES)
    B, T = 3, 256
    whole = count.per_token * B * T
    assert whole == 6 * 1000 * B * T + 4 * 12 * B * T**2 * 8 * 16 / 2
    assert FlopCount.from_model(1000, causal=False, **SIZES).attention == 2 * count.attention


def test_window():
    full = FlopCount.from_model(0, **SIZES).attention
    assert FlopCount.from_model(0, window=256, **SIZES).attention == full
    assert FlopCount.from_model(0, window=10_000, **SIZES).attention == full
    # Half the window leaves three quarters of the triangle.
    assert FlopCount.from_model(0, window=128, **SIZES).attention == 0.75 * full


def test_forward_products_match_what_xla_counts():
    """A two-layer toy without mask: the compiler's own count of the forward pass, times 3."""
    T, N, H = 64, 2, 8
    D = N * H

    def forward(weights, x):
        for w in weights:
            q = (x @ w).reshape(T, N, H)
            scores = jnp.einsum("tnh,snh->nts", q, q)
            x = jnp.einsum("nts,snh->tnh", scores, q).reshape(T, D)
        return x

    shapes = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((T, D), jnp.float32)
    counted = jax.jit(forward).lower(shapes, x).cost_analysis()["flops"]
    count = FlopCount.from_model(
        2 * D * D, num_layers=2, num_query_heads=N, head_dim=H, sequence_length=T, causal=False
    )
    assert counted == pytest.approx(count.per_token * T / 3, rel=0.01)


def test_line_of_maxtext():
    line = FlopCount(weights=9e9, attention=1e9).line(1000)
    assert line == (
        "Per train step: Total TFLOPs: 10.00 split as 90.00% learnable weight flops and "
        "10.00% attention flops"
    )


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


def test_parameter_table_groups_repeated_layers():
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    parameters = {"token_embedder/embedding": leaf(1000, 8)}
    parameters |= {f"layers/{i}/mlp/wi": leaf(8, 32) for i in range(12)}
    parameters["norm/scale"] = leaf(8)
    table = parameter_table(parameters, sharding_of=lambda name: "fsdp, -")
    lines = table.splitlines()
    assert any("layers/*/mlp/wi  x12" in line and "3,072" in line for line in lines)
    assert any(line.startswith("total") and "11,080" in line for line in lines)
    assert lines[-1] == "0.000 billion parameters, 44,320 bytes (0.000 GiB)"
    assert "split over" in lines[0]
    long = parameter_table({"a/very/long/name/" * 20 + "kernel": leaf(2, 3)})
    assert max(map(len, long.splitlines())) <= 110
    assert "name/kernel" in long


def test_derived_quantities_show_their_formula():
    formula = "per_device_batch_size x devices x accumulation x length"
    row = ("tokens per step", formula, "12 x 1 x 1 x 2048", 24_576)
    assert derived_quantities([row]) == (
        "tokens per step = per_device_batch_size x devices x accumulation x length"
        " = 12 x 1 x 1 x 2048 = 24,576"
    )
    many = derived_quantities([row, ("x", "a " * 40, "b " * 40, 0.123456), ("y", "", "", "text")])
    assert max(map(len, many.splitlines())) <= 110
    assert "0.1235" in many
    assert many.endswith("y = text")
