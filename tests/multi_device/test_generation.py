"""Text generated on eight devices, whatever the mesh, is that of one device."""

import jax
import pytest

from MaxText.configuration.loading import configure
from MaxText.generation.engine import Engine
from MaxText.generation.generating import Limits, generate
from MaxText.generation.token_choice import Choice
from MaxText.layers.model import Model
from MaxText.parallelism.mesh import Layout, make_mesh
from tests.small_models import TINY

PROMPTS = [[5, 6, 7], [9], list(range(1, 21)), [3, 1], [8, 8, 8]]
MESHES = {
    "data": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "fsdp": {},
    "tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 8},
    "fsdp_transpose": {"ici_fsdp_parallelism": 1, "ici_fsdp_transpose_parallelism": 8},
    "context": {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 4},
    "context, ring": {
        "ici_fsdp_parallelism": 4, "ici_context_parallelism": 2,
        "context_parallel_strategy": "ring",
    },
    "all": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
}  # fmt: skip
NAMES = [
    pytest.param(name, marks=pytest.mark.slow)
    if name in ("fsdp_transpose", "context, ring")
    else name
    for name in MESHES
]
KEYS = TINY | {
    "decoder_block": "llama2",
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "max_target_length": 64,
    "weight_init": "normal",
    "init_std": 0.5,
}

KINDS = {
    "global": {},
    "experts, kinds of attention, Head-QK": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attention_types": [[["local", "linear", "global"], 1]],
        "sliding_window_size": 6,
        "head_qk": True,
    },
}


def texts(devices, **keys):
    config = configure(**KEYS, **keys)
    model = Model(config.model)
    layout = Layout(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    abstract = layout.abstract_state(model.initialize, model.parameters)
    # Values that do not depend on the mesh: drawn on one device, then laid out.
    params = jax.device_put(
        jax.jit(model.initialize)(jax.random.key(0)), jax.tree.map(lambda x: x.sharding, abstract)
    )
    choice = Choice(temperature=0.7, top_k=10, repetition_penalty=1.1)
    engine = Engine(model, model.in_parts(params), layout, choice)
    # 20 + 50 tokens also fill the window, from where the newer half goes on.
    found = dict(generate(engine, PROMPTS, Limits(50), rows=4, seed=1))
    return [found[number].tokens for number in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=KINDS)
def kind_and_expected(request):
    return KINDS[request.param], texts(jax.devices()[:1], **KINDS[request.param])


@pytest.mark.multi_device
@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_the_mesh(kind_and_expected, name):
    keys, expected = kind_and_expected
    devices = jax.devices()
    assert len(devices) == 8
    assert texts(devices, **keys, **MESHES[name]) == expected
