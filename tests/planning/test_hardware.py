"""Hardware by the names people order it under."""

import pytest

from MaxText.errors import UserError
from MaxText.planning.hardware import CHIPS, find


@pytest.mark.parametrize(
    ("name", "chip", "num_chips", "num_devices", "slices"),
    [
        ("v5p-128", "v5p", 64, 64, 1),
        ("2xv5p-128", "v5p", 128, 128, 2),
        ("v4-8", "v4", 4, 4, 1),
        ("v3-8", "v3", 4, 8, 1),
        ("v5e-16", "v5e", 16, 16, 1),
        ("v5litepod-256", "v5e", 256, 256, 1),
        ("v6e-8", "v6e", 8, 8, 1),
        ("tpu7x-16", "tpu7x", 8, 16, 1),
        ("8xH100", "H100", 8, 8, 1),
        ("1xh200", "H200", 1, 1, 1),
        ("16xA100-40", "A100-40", 16, 16, 2),
    ],
)
def test_names(name, chip, num_chips, num_devices, slices):
    found = find(name)
    assert found.chip is CHIPS[chip]
    assert (found.num_chips, found.num_devices, found.num_slices) == (
        num_chips, num_devices, slices,
    )  # fmt: skip


def test_the_cpu_is_one_device_with_the_memory_of_the_machine():
    found = find("cpu")
    assert (found.platform, found.num_devices) == ("cpu", 1)
    assert found.memory > 2**28


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5q-8", "Nearest: v5"),
        ("H100-8", "counted in front"),
        ("0xH100", "counted in front"),
        ("v5p", "how many"),
        ("v5p-7", "multiple of 2"),
        ("v4-0", "multiple of 2"),
        ("", "not known"),
    ],
)
def test_other_names_are_refused_with_a_remedy(name, says):
    with pytest.raises(UserError, match=says):
        find(name)


def test_every_chip_has_a_peak_and_a_share_of_it():
    for chip in CHIPS.values():
        assert chip.peak.tflops > 0
        low, high = chip.efficiency
        assert 0 < low < high <= 1
