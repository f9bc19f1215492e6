"""What plan.py --fit proposes is a command line with which a step of training runs."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from MaxText.compilation.lowering import lower_train_step
from MaxText.config.loading import load
from MaxText.cost import job_plan
from MaxText.cost.auto_layout import choose_layout_for_devices
from MaxText.cost.job_plan import candidate_meshes
from MaxText.hardware.chips import find_hardware
from tests.small_models import TINY, made_for_training, random_batch, tiny_config

pytestmark = pytest.mark.multi_device

EIGHT = find_hardware("8xH100")
TWO_SLICES = dataclasses.replace(EIGHT, num_slices=2)
KEYS = {"base_num_kv_heads": 4, "base_num_decoder_layers": 4, "per_device_batch_size": 2}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "capacity_factor": 2.0,
    "eval_capacity_factor": 2.0,
}
TOKENFORMER = {"decoder_block": "tokenformer", "base_mlp_dim": None}
MUDD = {"decoder_block": "muddformer", "mlp_dim_multiple": 8, "scan_layers": False}
# name -> (hardware, keys of the model, sizes that the mesh must have; none for what is proposed)
CASES = {
    "llama": (EIGHT, {}, {}),
    "mudd, parts of sequences": (
        EIGHT,
        MUDD | {"per_device_batch_size": 0.5, "sharding_tolerance": 0.2},
        {"ici_context_parallelism": 2},
    ),
    "gpt2, a width that fsdp does not divide": (
        EIGHT,
        {"decoder_block": "gpt2", "base_emb_dim": 36, "sharding_tolerance": 0.2},
        {"ici_fsdp_parallelism": 4, "ici_fsdp_transpose_parallelism": 2},
    ),
    "tokenformer, stages and parts of sequences": (
        TWO_SLICES,
        TOKENFORMER | {"per_device_batch_size": 0.5},
        {"dcn_pipeline_parallelism": 2, "ici_context_parallelism": 2},
    ),
    "moe, stages and experts": (
        TWO_SLICES,
        MOE,
        {"dcn_pipeline_parallelism": 2, "ici_expert_parallelism": 2},
    ),
}


def proposed(words, hardware, sizes, monkeypatch):
    """The command line with the fastest plan on meshes of these sizes."""
    config = load(words).config
    meshes = [keys for keys in candidate_meshes(config, hardware) if sizes.items() <= keys.items()]
    assert meshes
    monkeypatch.setattr(job_plan, "candidate_meshes", lambda *_: meshes)
    # Of many proposals one is run; tiny models fit under any policy.
    monkeypatch.setattr(job_plan, "MAX_PROPOSALS", 1)
    monkeypatch.setattr(job_plan, "POLICIES", ("minimal", "full"))
    plan = job_plan.find_fitting_plans(config, hardware)[0]
    assert plan.program.tokens_per_update == 8 * 16 * config.batch.per_device_batch_size
    return job_plan.command_with_plan(words, plan, config)


@pytest.mark.parametrize("name", CASES)
def test_a_step_runs_as_proposed(name, monkeypatch):
    hardware, keys, sizes = CASES[name]
    given = {name: value for name, value in (TINY | KEYS | keys).items() if value is not None}
    words = [f"{name}={value}" for name, value in given.items()]
    config = load(proposed(words, hardware, sizes, monkeypatch), program="train.py").config
    for size, number in sizes.items():
        assert getattr(config.mesh, size) == number
    assert 3 < loss_of_first_step(config) < 6


def loss_of_first_step(config):
    planned = lower_train_step(config, jax.devices()[:8])
    *_, initialize = made_for_training(config, planned.model, config.guard)
    state = planned.sharding.init_state(initialize, planned.state, seed=0)
    rows = round(8 * config.batch.per_device_batch_size)
    batch = jax.tree.map(np.asarray, random_batch(config, rows))
    _, metrics = planned.lowered.compile()(state, planned.sharding.to_global_batch(batch, rows))
    return float(metrics["loss"])


@pytest.mark.parametrize("name", ["auto_layout", "auto_layout_and_mesh_shape"])
def test_a_chosen_mesh_computes_the_same(name):
    keys: dict[str, Any] = {**KEYS, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4}
    keys[name] = True
    config = tiny_config(**keys)
    lines = []
    chosen = choose_layout_for_devices(config, jax.devices()[:8], lines.append)
    assert lines[0].startswith(f"{name}: chose the mesh ")
    assert loss_of_first_step(chosen) == pytest.approx(loss_of_first_step(config), rel=1e-5)
