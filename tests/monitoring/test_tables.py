"""Printed tables."""

import re

import jax
import jax.numpy as jnp

from MaxText.layers.model import Model
from MaxText.monitoring.tables import byte_count, derived_quantities, parameter_table, ruled_table
from tests.small_models import tiny_config


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
    assert lines[-1] == "0.000 billion parameters, 44,320 bytes (43.28 KiB)"
    assert "split over" in lines[0]
    long = parameter_table({"a/very/long/name/" * 20 + "kernel": leaf(2, 3)})
    assert max(map(len, long.splitlines())) <= 110
    assert "name/kernel" in long


def test_layers_that_differ_share_a_row():
    config = tiny_config(
        "muddformer", base_num_decoder_layers=24, mlp_dim_multiple=8, scan_layers=False
    )
    parameters = Model(config.model).parameters

    def split(name):
        return "tensor" if re.fullmatch(r"layers/[02]/mlp/wi_0/kernel", name) else "-"

    header, _, *lines, total, _ = parameter_table(parameters, split).splitlines()
    # The end of a long name is shown.
    rows = {re.split(r"  +", line)[0][-35:]: re.split(r"  +", line)[1:] for line in lines}
    assert len(rows) == len(lines) == 21
    assert rows["layers/*/mlp/wi_0/kernel"][:2] == ["x24", "32 x 32..96"]
    assert rows["layers/*/mlp/wi_0/kernel"][-1] == "tensor or -"
    assert rows["connections/after/*/static"][:2] == ["x24", "1..4 x 2..25"]
    assert rows["e_self_attention_layer_norm_q/scale"][:2] == ["x23", "32"]
    assert rows["/0/pre_self_attention_layer_norm/scale"[-35:]][0] == "32"
    place = header.index("count") + len("count")
    counted = [int(line[:place].split()[-1].replace(",", "")) for line in [*lines[:-1], total]]
    assert sum(counted[:-1]) == counted[-1] == sum(info.size for info in parameters.values())


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


def test_ruled_table():
    table = ruled_table(
        ["part", "count", "note"],
        [["a", "1,000", "x"], ["longer", "20"]],
        ["total", "1,020", ""],
        right=(1,),
    )
    assert table.splitlines() == [
        "part          count  note",
        "-------------------------",
        "a             1,000  x",
        "longer           20",
        "-------------------------",
        "total         1,020",
    ]


def test_byte_count_chooses_the_unit():
    assert byte_count(1_023) == "1,023 bytes"
    assert byte_count(1_536) == "1,536 bytes (1.50 KiB)"
    assert byte_count(3 * 2**20) == "3,145,728 bytes (3.00 MiB)"
    assert byte_count(2**41) == "2,199,023,255,552 bytes (2,048.00 GiB)"
