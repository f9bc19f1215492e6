"""train.py: a run that grows, resumes, and outlives its source."""

import json
import shutil

import numpy as np
import pytest

from MaxText.config.loading import configure
from MaxText.growth.record import from_metadata
from MaxText.growth.source import open_source
from tests import programs
from tests.growth.growing import SMALL, save, stored_in, trained
from tests.small_models import TINY

KEYS = {"decoder_block": "tokenformer", "per_device_batch_size": 4, "log_config": False}


def values_of(step):
    """Value slots of the feed-forward, [layers, slots, width]."""
    return open_source(str(step), {}).read("layers/mlp/values/kernel")


@pytest.mark.slow
def test_a_run_grows_and_goes_on(tmp_path, users_environment):
    keys = {name: value for name, value in (TINY | SMALL | KEYS).items() if "mlp" not in name}
    (tmp_path / "small.yml").write_text(json.dumps(keys))

    def train(*arguments):
        keys = ["run_name=large", "base_output_directory=out", *arguments]
        result = programs.run("train.py", ["small.yml", *keys], tmp_path, users_environment)
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        assert "Traceback" not in output
        return output

    config = configure(tmp_path / "small.yml", slot_num=24, steps=2)
    small = save(tmp_path / "out" / "small", config, trained(config))
    source = "load_parameters_path=out/small/checkpoints/1/items"
    # The command line of TokenFormer's README, whose number of stored slots is compared.
    growing = ["slot_num=40", source, "load_parameters_path_slot_number=24"]
    growing += ["growth.moments=reused", "growth.existing_slots_lr_scale=0"]
    output = train(*growing, "steps=2")
    slots = "24 -> 40 (attention), 96 -> 160 (feed-forward)"
    assert slots in output
    assert "zoom_dim=24" in output
    large = tmp_path / "out" / "large"
    rows = [json.loads(row) for row in (large / "events.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if row["event"] == "growth")
    assert (row["slots"], row["zoom_dim"], row["moments"]) == (slots, 24, "reused")
    record = from_metadata(stored_in(large).try_metadata())
    assert record["slots"]["layers/mlp/keys/kernel"] == [96, 160]

    # The run knows its zoom and that its old slots are frozen, also when the source is gone.
    shutil.rmtree(small)
    output = train("slot_num=40", "steps=3")
    assert "zoom_dim=24, growth.existing_slots_lr_scale=0" in output
    last = stored_in(large)
    assert last.step == 2
    assert from_metadata(last.try_metadata()) == record
    before, after = values_of(large / "checkpoints" / "0"), values_of(last.folder)
    np.testing.assert_array_equal(after[:, :96], before[:, :96])
    assert np.all(np.any(after[:, 96:] != before[:, 96:], axis=-1))
