"""Devices that are not there are a mistake of the user's, whatever jax makes of it."""

import jax
import pytest

from MaxText.errors import UserError
from MaxText.parallelism.start_up import find_devices


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no backend\nmore")])
def test_hardware_that_is_not_there(error, monkeypatch):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    reason = str(error).splitlines()[0] if str(error) else "it sees none on this machine"
    with pytest.raises(UserError, match=f"hardware=gpu: jax finds no such device \\({reason}\\)"):
        find_devices("gpu")
