"""A run with dense connections that is stopped and goes on."""

import shutil

import numpy as np
import pytest

from MaxText.checkpointing import layout
from MaxText.conversion.stored_arrays import StoredArrays
from tests.programs import run as start

SMALL = (
    "decoder_block=muddformer_prepost dataset_type=synthetic opt_type=muon dropout_rate=0.1 "
    "vocab_size=128 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 "
    "base_mlp_dim=32 mlp_dim_multiple=8 base_num_decoder_layers=2 max_target_length=32 "
    "per_device_batch_size=4 steps=5 checkpoint_period=2 learning_rate=0.01 eval_interval=-1 "
    "log_config=false enable_tensorboard=false loss_curve=false"
)


def arrays(run):
    """Every array of the newest checkpoint, by path."""
    stored = StoredArrays(layout.find(str(run), "test").items)
    return {path: stored.read(path) for path in stored.leaves}


@pytest.mark.slow
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path, users_environment):
    def train(run_name):
        words = [f"run_name={tmp_path / run_name}", f"jax_cache_dir={tmp_path}/cache"]
        result = start("train.py", [*SMALL.split(), *words], tmp_path, users_environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    train("whole")
    table = (tmp_path / "whole" / "start.txt").read_text()
    assert "connections/after/*/wo/kernel  x2" in table
    assert "sums over depth" in table
    whole = arrays(tmp_path / "whole")
    assert any("connections/after/2/wo/kernel" in path for path in whole)
    assert any("layers/1/mlp/wi_0/kernel" in path for path in whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/checkpoints/4")
    again = train("stopped")
    assert "completed step: 2" not in again
    assert "completed step: 3" in again
    for path, array in arrays(tmp_path / "stopped").items():
        np.testing.assert_array_equal(array, whole[path], err_msg=path)
