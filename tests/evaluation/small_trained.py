"""Models that can be scored, without files: tiny, with random or chosen weights."""

import functools
from typing import Any

import jax
import numpy as np
import scipy.special

from MaxText.inference.trained_model import TrainedModel
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.parallelism.mesh import make_sharding_plan
from tests.small_models import tiny_config


def tiny_trained(
    decoder_block: str = "llama2", *, devices: Any = None, scale: float = 4.0, **keys: Any
) -> TrainedModel:
    """Random weights, large enough that the distributions are far from even."""
    config = tiny_config(decoder_block, **({"per_device_batch_size": 4} | keys))
    sharding = make_sharding_plan(config.mesh, devices or jax.devices()[:1])
    model = Model(config.model)
    abstract = sharding.abstract_state(model.initialize, model.parameters)
    params = sharding.init_state(model.initialize, abstract, seed=0)
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
    return TrainedModel(config, model, sharding, params, "random", "random", {})


def full_log_probabilities(trained: TrainedModel, ids: Any) -> np.ndarray:
    """log p [T, V] of the next id after each of `ids`, one sequence at a time, in float64."""
    window = trained.model.config.shape.max_target_length
    tokens = np.full((1, window), trained.model.config.shape.vocab_size - 1, np.int32)
    tokens[0, : len(ids)] = ids
    logits = np.asarray(forward(trained.model)(trained.params, tokens)[0, : len(ids)], np.float64)
    return scipy.special.log_softmax(logits, axis=-1)


@functools.cache
def forward(model: Model) -> Any:
    """As training has it: (parameters, tokens [B, T]) -> float32 logits [B, T, V]."""
    return jax.jit(lambda params, tokens: model.merge(params)(Batch(tokens, tokens, None)))
