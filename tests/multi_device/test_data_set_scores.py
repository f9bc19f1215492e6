"""The scores of a data set on one device and on eight, for every kind of mesh."""

import jax
import numpy as np
import pytest

from MaxText.configuration.loading import configure
from MaxText.errors import UserError
from MaxText.input_pipeline import sources
from MaxText.input_pipeline.tokenization.loading import load_tokenizer
from MaxText.scoring.data_set import score_data_set
from MaxText.scoring.text_bytes import TextBytes
from tests.input_pipeline.small_data import random_documents, write_data_set
from tests.scoring.small_trained import tiny_trained

pytestmark = pytest.mark.multi_device

LENGTH = 16
MESHES = {
    "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "fsdp": {"ici_fsdp_parallelism": 8},
    "context": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1,
                "ici_context_parallelism": 4},
    "data, fsdp and tensor": {
        "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2
    },
}  # fmt: skip


class BytesOfIds(TextBytes):
    """Random ids, taken for bytes."""

    def __init__(self):
        super().__init__("train", False, load_tokenizer("bytes"))

    def _tokenizer(self, source):
        return self._model_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    # 29 documents: a last batch that is not full on any mesh.
    write_data_set(folder, {"train": random_documents(0, 29, 40, 250)}, vocab_size=250)
    return folder


def score(folder, devices, stride, per_device, **mesh):
    keys = {"vocab_size": 256, "max_target_length": LENGTH, **mesh}
    trained = tiny_trained(devices=devices, base_num_kv_heads=4, **keys)
    config = configure(
        **keys, dataset_path=str(folder), eval_split="train", eval_stride=stride,
        per_device_batch_size=per_device,
    )  # fmt: skip
    opened = sources.open_sources(
        config.data, config.preparation, sources.eval_entries(config.data), "train",
        length=LENGTH, vocab_size=256, num_samples=None, for_training=False, show=print,
    )  # fmt: skip
    (found,) = score_data_set(trained, opened, BytesOfIds(), config, print)
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stride", [-1, 5])
def test_the_same_scores_on_eight_devices(folder, mesh, stride):
    one = score(folder, jax.devices()[:1], stride, 3)
    eight = score(folder, jax.devices(), stride, 0.5 if "tensor" in mesh else 1, **MESHES[mesh])
    assert (eight.num_targets, eight.num_bytes) == (one.num_targets, one.num_bytes)
    assert one.num_bytes > 0
    np.testing.assert_allclose(eight.nats, one.nats, rtol=1e-5)


def test_batches_that_devices_do_not_divide(folder):
    with pytest.raises(UserError, match="the batch does not divide"):
        score(folder, jax.devices(), -1, 0.5)
