"""Texts and scores of a data set do not depend on the mesh."""

import jax
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.evaluation.data_set import score_data_set
from MaxText.evaluation.text_bytes import TextBytes
from MaxText.inference.engine import Engine
from MaxText.inference.generate import StoppingCriteria, generate
from MaxText.inference.sampling import SamplingParams
from MaxText.input_pipeline.loader import open_eval_sources
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from tests.evaluation.small_trained import tiny_trained
from tests.input_pipeline.small_data import random_documents, write_data_set
from tests.multi_device.same_results import MIXED, fresh_parameters
from tests.small_models import TINY

pytestmark = pytest.mark.multi_device

PROMPTS = [[5, 6, 7], [9], list(range(1, 21)), [3, 1], [8, 8, 8]]
MESHES = {
    "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8},
    "context": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 1, "ici_context_parallelism": 4},
    "context, ring": {
        "ici_fsdp_parallelism": 4,
        "ici_context_parallelism": 2,
        "context_parallel_strategy": "ring",
    },
    "mixed": MIXED,
}
KEYS = TINY | {
    "decoder_block": "llama2",
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "max_target_length": 64,
    "weight_init": "normal",
    "init_std": 0.5,
}
EXPERTS_AND_KINDS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window_size": 6,
    "head_qk": True,
    "attention_types": [[["local", "linear", "global"], 1]],
}


def texts(devices, **keys):
    config = load_config(**KEYS, **keys)
    model = Model(config.model)
    sharding = make_sharding_plan(config.mesh, devices)
    choice = SamplingParams(temperature=0.7, top_k=10, repetition_penalty=1.1)
    params = model.unstack_params(fresh_parameters(model, sharding))
    engine = Engine(model, params, sharding, choice)
    # 20 + 50 tokens also fill the window, from where the newer half goes on.
    stopping = StoppingCriteria(50)
    found = dict(generate(engine, PROMPTS, stopping, batch_size=4, decode=str, seed=1))
    return [found[number].tokens for number in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("keys", "names"),
    [({}, ["tensor", "context, ring"]), (EXPERTS_AND_KINDS, ["mixed"])],
    ids=["global", "experts, kinds of attention, Head-QK"],
)
def test_text_does_not_depend_on_the_mesh(keys, names):
    expected = texts(jax.devices()[:1], **keys)
    for name in names:
        assert texts(jax.devices(), **keys, **MESHES[name]) == expected, name


class BytesOfIds(TextBytes):
    """Random ids, taken for bytes."""

    def __init__(self):
        super().__init__(False, load_tokenizer("bytes"))

    def _tokenizer(self, source):
        return self.model_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    # 29 documents: a last batch that is not full on any mesh.
    write_data_set(folder, {"train": random_documents(0, 29, 40, 250)}, vocab_size=250)
    return folder


def score(folder, devices, stride, per_device, **mesh):
    keys = {"vocab_size": 256, "max_target_length": 16, **mesh}
    trained = tiny_trained(devices=devices, base_num_kv_heads=4, **keys)
    config = load_config(
        **keys,
        dataset_path=str(folder),
        eval_split="train",
        eval_stride=stride,
        per_device_batch_size=per_device,
    )
    (found,) = score_data_set(trained, open_eval_sources(config), BytesOfIds(), config, print)
    return found


@pytest.mark.parametrize(
    ("mesh", "stride", "per_device"), [("data", -1, 1), ("context", 5, 1), ("mixed", 5, 0.5)]
)
def test_the_same_scores_on_eight_devices(folder, mesh, stride, per_device):
    one = score(folder, jax.devices()[:1], stride, 3)
    eight = score(folder, jax.devices(), stride, per_device, **MESHES[mesh])
    assert (eight.num_targets, eight.num_bytes) == (one.num_targets, one.num_bytes)
    assert one.num_bytes > 0
    np.testing.assert_allclose(eight.total_nll, one.total_nll, rtol=1e-5)
