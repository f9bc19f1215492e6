"""log_layer_metrics: numbers of each layer, the same however layers are applied, and cheap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.config.loading import load_config
from MaxText.cost.jaxpr_operations import count_operations
from MaxText.layers.assembly.model import Model
from MaxText.layers.attention.attention_metrics import num_sampled_queries
from MaxText.layers.batch import batch_shapes
from MaxText.layers.capture import capturing
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.assembly import setup_train
from MaxText.training.metric_names import as_scalars
from tests.small_models import assert_close, random_batch, tiny_config, trainer

LAYERS = 3
UNROLLED = {"scan_layers": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Layers 0 and 2 have linear attention, whose weights are no softmax; those of 1 see a window.
KINDS = {
    "layer_pattern": "LSL",
    "layer_kinds": {"L": {"mixer": "linear_attention"}, "S": {"mixer": "local_attention"}},
    "sliding_window_size": 4,
}


def step_metrics(num_microbatches=1, rows=4, **keys):
    """(state before, state after, batch, metrics as numbers) of a step."""
    config = tiny_config(**keys)
    _, state, step = trainer(config, num_microbatches, log_layer_metrics=True)
    batch = random_batch(config, rows=rows, documents=True)
    after, metrics = step(state, batch)
    return state, after, batch, as_scalars(jax.device_get(metrics))


def of_layers(metrics, name):
    """{layer: number} of a metric."""
    start = f"{name}/layer_"
    return {int(key.removeprefix(start)): value for key, value in metrics.items() if start in key}


@pytest.fixture(scope="module")
def scanned():
    return step_metrics()


def test_norms_are_those_of_the_layers_weights(scanned):
    state, after, _, metrics = scanned
    updates = jax.tree.map(jnp.subtract, after.params["layers"], state.params["layers"])
    for name, tree in (("param_norm", after.params["layers"]), ("update_norm", updates)):
        expected = [optax.tree.norm(jax.tree.map(lambda x, i=i: x[i], tree)) for i in range(LAYERS)]
        found = of_layers(metrics, name)
        assert list(found) == [0, 1, 2]
        np.testing.assert_allclose(list(found.values()), expected, rtol=1e-4)
    gradients = list(of_layers(metrics, "grad_norm").values())
    assert min(gradients) > 0
    assert np.linalg.norm(gradients) < metrics["grad_norm"]  # with embedding and head
    for layer, ratio in of_layers(metrics, "update_ratio").items():
        parts = [metrics[f"{name}/layer_{layer}"] for name in ("update_norm", "param_norm")]
        assert ratio == pytest.approx(parts[0] / parts[1])


@pytest.mark.parametrize(
    "keys",
    [
        UNROLLED,
        {"remat_policy": "full"},
        {"num_microbatches": 2},
        {"attention": "blocked", "attention_block_size": 4},
    ],
    ids=["unrolled", "remat", "accumulation", "blocked"],
)
def test_however_layers_are_applied_the_numbers_are_the_same(scanned, keys):
    *_, expected = scanned
    *_, metrics = step_metrics(**keys)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        if keys.get("num_microbatches") and "max_logit" in name:
            assert metrics[name] <= value  # the mean over microbatches of the largest one
        else:
            assert metrics[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(
    "keys",
    [{}, KINDS, {"attention_sinks": True, "num_mem_kv": 2}, {"attn_logits_soft_cap": 2.0}],
    ids=["softmax", "kinds", "sinks and memories", "soft cap"],
)
def test_entropy_and_logits_are_those_of_the_model(keys):
    """Sequences have 16 tokens, and all of their queries are in the sample."""
    state, _, batch, metrics = step_metrics(**keys)
    model = Model(tiny_config(**keys | UNROLLED).model)
    assert num_sampled_queries(batch.tokens_BT.shape[1]) == batch.tokens_BT.shape[1]
    with capturing(["*/scores", "*/probabilities"]) as captured:
        model.merge(state.params).hidden_states(batch)
    entropies = of_layers(metrics, "attention_entropy")
    logits = of_layers(metrics, "attention_max_logit")
    layers = [int(path.split("/")[1]) for path in captured.values if path.endswith("scores")]
    assert list(entropies) == list(logits) == layers
    assert len(layers) == (1 if keys == KINDS else LAYERS)
    is_token = np.asarray(batch.segments_BT) > 0
    for layer in layers:
        path = f"layers/{layer}/self_attention"
        p_BNTS = np.asarray(captured.values[f"{path}/probabilities"], np.float64)
        terms = np.where(p_BNTS > 0, p_BNTS * np.log(np.maximum(p_BNTS, 1e-300)), 0)
        entropy_BNT = -terms.sum(-1)
        sink_BNT = 1 - p_BNTS.sum(-1)
        if keys.get("attention_sinks"):
            entropy_BNT -= sink_BNT * np.log(sink_BNT)
        expected = entropy_BNT.mean(1)[is_token].mean()
        assert entropies[layer] == pytest.approx(expected, rel=1e-4)
        scores_BNTS = np.where(p_BNTS > 0, captured.values[f"{path}/scores"], -np.inf)
        largest = scores_BNTS.max((1, 3))[is_token].max()
        if keys.get("attention_sinks"):
            largest = max(largest, float(np.max(sinks_of(state, layer))))
        assert logits[layer] == pytest.approx(largest, rel=1e-4)
    assert metrics["attention_entropy"] == pytest.approx(np.mean(list(entropies.values())))


def sinks_of(state, layer):
    return np.asarray(state.params["layers"]["self_attention"]["sinks"])[layer]


def test_a_uniform_attention_has_the_entropy_of_its_keys():
    config = tiny_config(max_target_length=64)
    _, state, step = trainer(config, log_layer_metrics=True)
    query = state.params["layers"]["self_attention"]["query"]
    query["kernel"] = jnp.zeros_like(query["kernel"])
    batch = random_batch(config, rows=2)
    metrics = as_scalars(jax.device_get(step(state, batch)[1]))
    # 16 of 64 queries: the 4th, the 8th, ..., the last.
    expected = np.log(np.arange(4, 65, 4)).mean()
    assert metrics["attention_entropy/layer_1"] == pytest.approx(expected, rel=1e-5)
    assert metrics["attention_max_logit/layer_1"] == 0


def test_experts_of_each_layer():
    *_, metrics = step_metrics(**EXPERTS, moe_layers=[0, 2])
    for name in ("moe_max_load_ratio", "moe_min_load_ratio", "moe_router_entropy", "moe_dropped"):
        numbers = of_layers(metrics, name)
        assert list(numbers) == [0, 2]
        assert metrics[name] == pytest.approx(np.mean(list(numbers.values())), rel=1e-5)
    assert metrics["moe_min_load_ratio/layer_0"] < 1 < metrics["moe_max_load_ratio/layer_0"]


def test_training_is_the_same_with_and_without():
    config = tiny_config(**EXPERTS)
    batch = random_batch(config, rows=2)
    results = []
    for logs in (True, False):
        _, state, step = trainer(config, log_layer_metrics=logs)
        after, metrics = step(state, batch)
        results.append((after.params, metrics["loss"]))
    assert "attention_entropy" not in metrics
    assert_close(*results, atol=1e-7)


def test_a_layer_that_diverges_is_named_and_one_without_the_metric_is_not():
    by_layer = np.array([1.0, np.nan])
    scalars = as_scalars({"grad_norm/layer": by_layer, "moe_dropped/layer": by_layer})
    assert list(scalars) == ["grad_norm/layer_0", "grad_norm/layer_1", "moe_dropped/layer_0"]


@pytest.mark.parametrize(("model_name", "most"), [("llama3.2-1b", 0.002), ("qwen3-30b-a3b", 0.005)])
def test_it_costs_less_than_2_percent_of_a_step(model_name, most):
    """Operations of the traced step of one sequence, the fewest tokens that norms can share."""

    def traced(logs):
        config = load_config(
            model_name=model_name,
            log_layer_metrics=logs,
            max_target_length=2048,
            dataset_type="synthetic",
            steps=10,
        )
        sharding = make_sharding_plan(config.mesh, jax.devices()[:1], config.model.pipeline)
        setup = setup_train(config, sharding)
        jaxpr = jax.make_jaxpr(setup.step)(setup.abstract_state, batch_shapes(1, 2048, True))
        return count_operations(jaxpr.jaxpr)

    without = traced(False)
    extra = traced(True).flops - without.flops
    assert 0 < extra < most * without.flops
