"""Multi-token prediction: its definition in float64, masks, weights of microbatches, FLOPs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.conformance.checks import CHECKS
from MaxText.conformance.subject import SIZES, Subject
from MaxText.cost.flops import count_flops
from MaxText.evaluation.validation import evaluate, make_eval_step
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.training.multi_token_prediction import target_weights
from MaxText.training.objective import is_in_nats, loss_sums, loss_totals
from tests.small_models import assert_close, random_batch, random_params, tiny_config, trainer

ONE = {"mtp_num_layers": 1}
TWO = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
# The last layer turns its queries and keys by other angles than the first ones.
KINDS = {"layer_pattern": "AAB", "layer_kinds": {"A": {}, "B": {"rope_max_timescale": 7}}}


def documents_batch(config, rows=4):
    """Documents of 1, 6, 5 and 2 tokens and two of padding, some targets without weight."""
    sizes = (1, 6, 5, 2)
    segments = np.repeat([1, 2, 3, 4, 0], [*sizes, 2])
    positions = np.concatenate([np.arange(size) for size in (*sizes, 2)])
    batch = random_batch(config, rows)
    is_last = segments != np.append(segments[1:], 0)
    mask_BT = np.asarray(batch.loss_mask_BT) * ~is_last
    mask_BT[-1] = 0
    arrays = (mask_BT, *(np.tile(x, (rows, 1)).astype(np.int32) for x in (positions, segments)))
    return Batch(batch.tokens_BT, batch.targets_BT, *map(jnp.asarray, arrays))


def normalized(x, scale):
    """The RMSNorm of the last dimension."""
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def turned(x_THd, positions, base):
    """Dimension i turns with i + d/2 by position * base^(-2i/d)."""
    half = x_THd.shape[-1] // 2
    angles = positions[:, None, None] * float(base) ** (-np.arange(half) / half)
    first, second = x_THd[..., :half], x_THd[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block_by_hand(weights, x_TD, positions, segments, base):
    """A Llama block of one sequence: grouped-query attention and SwiGLU."""
    attention = weights["self_attention"]
    y = normalized(x_TD, weights["pre_self_attention_layer_norm"]["scale"])
    query, key, value = (
        np.einsum("td,dnh->tnh", y, attention[name]["kernel"]) for name in ("query", "key", "value")
    )
    query, key = turned(query, positions, base), turned(key, positions, base)
    group = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[-1])
    order = np.arange(len(x_TD))
    is_seen = (order[:, None] >= order) & (segments[:, None] == segments)
    weights_NTS = np.where(is_seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights_NTS /= weights_NTS.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights_NTS, value)
    x_TD = x_TD + np.einsum("tnh,nhd->td", out, attention["out"]["kernel"])
    y = normalized(x_TD, weights["pre_mlp_layer_norm"]["scale"])
    gate, up = (y @ weights["mlp"][name]["kernel"] for name in ("wi_0", "wi_1"))
    return x_TD + (gate / (1 + np.exp(-gate)) * up) @ weights["mlp"]["wo"]["kernel"]


def by_hand(params, h_BTD, batch, base):
    """The cross entropies of depths 1 and 2, and the number of their targets, in float64."""
    params, h_BTD, batch = jax.tree.map(lambda x: np.asarray(x, float), (params, h_BTD, batch))
    sums, counts = np.zeros(2), np.zeros(2)
    rows = zip(*(getattr(batch, field.name) for field in dataclasses.fields(batch)), strict=True)
    for h_TD, (tokens, targets, mask, positions, segments) in zip(h_BTD, rows, strict=True):
        for depth, key in ((1, "0"), (2, "1")):
            weights = params["objective"]["depths"][key]
            # Any numbers will do where there is no token.
            next_tokens = np.append(tokens[depth:], [7] * depth).astype(int)
            embedding = params["token_embedder"]["embedding"][next_tokens]
            joined = np.concatenate(
                [
                    normalized(embedding, weights["embedding_norm"]["scale"]),
                    normalized(h_TD, weights["hidden_norm"]["scale"]),
                ],
                -1,
            )
            x_TD = joined @ weights["projection"]["kernel"].reshape(-1, h_TD.shape[-1])
            y_TD = block_by_hand(weights["block"], x_TD, positions, segments, base)
            h_TD = normalized(y_TD, weights["final_norm"]["scale"])
            logits = h_TD @ params["logits_dense"]["kernel"]
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            for t in range(len(tokens) - depth):
                if segments[t] == segments[t + depth]:
                    sums[depth - 1] -= mask[t + depth] * log_p[t, int(targets[t + depth])]
                    counts[depth - 1] += mask[t + depth]
    return sums, counts


@pytest.mark.parametrize(
    ("keys", "base"),
    [
        ({"scan_layers": True, "num_vocab_tiling": 2, "remat_policy": "full"}, 10_000),
        ({"scan_layers": False, **KINDS}, 7),
    ],
    ids=["scanned, in chunks", "kinds of layers"],
)
def test_definition(keys, base):
    config = tiny_config(**TWO, **keys, opt_type="sgd", learning_rate=1.0)
    model, state, step = trainer(config, num_microbatches=4)
    state = dataclasses.replace(state, params=random_params(model, 0.3))
    batch = documents_batch(config)
    h_BTD, _ = jax.jit(lambda params: model.merge(params).hidden_states(batch))(state.params)
    sums, counts = by_hand(state.params, h_BTD, batch, base)
    after, metrics = step(state, batch)
    found = [metrics[f"mtp_cross_entropy_{depth}"] for depth in (1, 2)]
    np.testing.assert_allclose(found, sums / counts, rtol=2e-5)
    np.testing.assert_allclose(metrics["mtp_loss"], 0.3 * sums.sum() / counts.sum(), rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], metrics["lm_loss"] + metrics["mtp_loss"], rtol=1e-6)
    if base == 7:
        return
    # Microbatches with few or no targets have the weights of the whole batch.
    _, _, whole_step = trainer(config)
    whole, whole_metrics = whole_step(state, batch)
    assert_close(after.params, whole.params, 2e-5)
    for name in ("mtp_loss", "lm_loss", "log_z"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5)
    # The next token is predicted as without further ones, and an evaluation reports all of them.
    alone = Model(tiny_config(**keys).model)
    params = {name: tree for name, tree in state.params.items() if name != "objective"}
    sums = loss_sums(alone.merge(params), batch, alone.config.objective)
    expected = sums.means(loss_totals(alone, batch))["lm_loss"]
    np.testing.assert_allclose(metrics["lm_loss"], expected, rtol=1e-5)
    parts = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for rows in (np.s_[:3], np.s_[3:])]
    row = evaluate(jax.jit(make_eval_step(model)), state.params, parts, step=0).row()
    for name in ("mtp_loss", "mtp_cross_entropy_1", "mtp_cross_entropy_2", "lm_loss"):
        np.testing.assert_allclose(row[f"eval/{name}"], metrics[name], rtol=1e-5)
    np.testing.assert_allclose(row["eval/avg_loss"], metrics["lm_loss"], rtol=1e-5)


def test_targets_of_a_depth():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0]])
    mask = jnp.asarray([[0.5, 1, 0, 1, 0, 0, 0]])
    batch = Batch(segments, segments, mask, segments_BT=segments)
    expected = {1: [[1, 0, 0, 0, 0, 0, 0]], 2: [[0] * 7], 9: [[0] * 7]}
    for depth, weights in expected.items():
        np.testing.assert_array_equal(target_weights(batch, depth), weights)
    one_document = dataclasses.replace(batch, segments_BT=None)
    np.testing.assert_array_equal(target_weights(one_document, 2), [[0, 1, 0, 0, 0, 0, 0]])


def test_gradients_remat_and_flops_with_experts_and_another_head():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "load_balance_loss_weight": 0.1}
    experts |= {"routed_bias": True, "routed_bias_update_rate": 0.01}
    head = {"head_qk": True, "head_qk_dim": 8, "num_vocab_tiling": 2}
    subject = Subject(lambda **more: tiny_config(**SIZES | experts | head | ONE | more))
    model = subject.models[0]
    assert is_in_nats(model)
    for check in CHECKS:
        if check.name in ("gradients", "scan and remat", "FLOPs"):
            assert check.problem(subject) is None, check.name
    rows = {part.name: part for part in count_flops(model, 12).parts}
    weights = [
        spec.size for name, spec in model.parameters.items() if name.startswith("objective/")
    ]
    assert rows["multi-token prediction"].parameters == sum(weights)

    def balance(model, params):
        sums = loss_sums(model.merge(params), subject.batch, model.config.objective, training=True)
        return sums.token_sums["moe_lb_loss"]

    # The correction bias of its experts gets their load, 2 choices for each token.
    block = subject.outputs.losses[0][1]["objective"]["depths"]["0"]["block"]
    load = block["mlp"]["gate_correction_bias"]
    assert load.shape == (4,)
    assert load.sum() == pytest.approx(2 * subject.batch.tokens_BT.size)
    # The balance of the experts of its block is part of that of the layers.
    alone = Model(tiny_config(**SIZES | experts | head).model)
    of_layers = {name: x for name, x in subject.params.items() if name != "objective"}
    ratio = balance(model, subject.params) / balance(alone, of_layers)
    assert 1.2 < ratio < 2  # three layers with experts, not two


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"loss_type": "multi_token_prediction"}, "mtp_num_layers=0"),
        ({"mtp_num_layers": 1, "causal": False, "mlm_training": True}, "causal=true"),
        ({"mtp_num_layers": 1, "hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=0"),
    ],
)
def test_what_is_refused(keys, words):
    with pytest.raises(ConfigurationError, match=words):
        tiny_config(**keys)
