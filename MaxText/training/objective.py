"""Language-model losses, over the whole sequence or in chunks.

`loss_sums` is the forward pass of the train step and of the evaluation: hidden states, logits, and
the losses of the objective, summed over targets. Its callers divide. An objective is a function of
logits and targets (`per_token_losses`), or a class that reads the model (model_objective.py).

Legend: B sequences, T tokens, D emb_dim, V vocab_size, C chunks of a sequence.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.model_sections import ObjectiveConfig
from MaxText.config.registry import lookup, register
from MaxText.errors import UserError
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch, batch_shapes
from MaxText.layers.entmax import entmax_loss
from MaxText.layers.lowering.head_and_loss import head_gradients_first, target_logits
from MaxText.layers.params import Params
from MaxText.layers.part_outputs import check, describe
from MaxText.layers.part_scalars import Losses, Metric, Scalars, Statistic, add_scalars
from MaxText.training.metric_names import IN_NATS, name_problem
from MaxText.training.model_objective import (
    FrozenParams,
    Objective,
    ObjectiveContext,
    ObjectiveSums,
    frozen_models,
    logits_of,
    objective_class,
    objective_config,
)

# Losses by name, and log(Z) or None; float32 [B, T] each.
LossesAndLogZ = tuple[dict[str, jax.Array], jax.Array | None]
# Of the cross entropy: logits [B, T, V], targets [B, T] and log Z [B, T].
_Residuals = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns -log softmax(logits)[target] and log Z, float32 [B, T] each.

    Has its own gradient, softmax(logits) - onehot(target), so that the backward pass is one sweep
    over [B, T, V]: no scatter, no one-hot array, only the logits are saved. The gradient of log Z
    is softmax(logits).
    """
    return _cross_entropy_forward(logits_BTV, targets_BT)[0]


def _cross_entropy_forward(
    logits_BTV: jax.Array, targets_BT: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    """Returns the outputs of `cross_entropy`, and its residuals: logits, targets and log Z."""
    log_normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logits_BT, log_normalizer_BT = target_logits(logits_BTV, targets_BT, log_normalizer_BT)
    outputs = log_normalizer_BT - target_logits_BT, log_normalizer_BT
    return outputs, (logits_BTV, targets_BT, log_normalizer_BT)


def _cross_entropy_backward(
    residuals: _Residuals, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Returns the gradient with respect to the logits [B, T, V]; None for the targets.

    With p = softmax(logits): d loss / d logits = p - onehot(target), d log Z / d logits = p.
    """
    logits_BTV, targets_BT, log_normalizer_BT = residuals
    grad_loss_BT, grad_log_normalizer_BT = gradients
    probabilities_BTV = jnp.exp(logits_BTV - log_normalizer_BT[..., None])
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    grad_logits_BTV = probabilities_BTV * (grad_loss_BT + grad_log_normalizer_BT)[..., None]
    return grad_logits_BTV - jnp.where(is_target_BTV, grad_loss_BT[..., None], 0.0), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


class LossTotals(NamedTuple):
    """What the sums of a whole global batch are divided by; float32 scalars."""

    target_weight: jax.Array  # sum of the weights of the targets
    weight: jax.Array  # the same, but at least 1: a batch of only padding has loss 0
    tokens: jax.Array  # number of tokens without padding
    by_name: Losses  # instead of `weight`, for losses and metrics with weights of their own


class LossSums(NamedTuple):
    """Sums over a batch, or over a part of one; float32 scalars.

    Weights are those of the targets, `Batch.loss_mask_BT`, unless the objective has others.
    """

    target_sums: Losses  # weighted; to divide by the sum of the weights
    token_sums: Losses  # of layers (routers); to divide by `num_tokens`
    correct: jax.Array | None = None  # weight of targets that are the (first) argmax, if counted
    log_z: jax.Array | None = None  # weighted sum of log(Z), which grows when logits drift
    # Weighted sum of the cross entropy in nats beside an objective that has none. Not minimized: it
    # compares models that are trained with different objectives.
    nats: jax.Array | None = None
    metric_sums: Losses = {}  # of the objective, not minimized; weighted  # noqa: RUF012
    layer_metrics: Mapping[str, Metric] = {}  # of layers, not minimized
    # 0, whose gradients are the statistics of weights with an update rule.
    statistics: jax.Array | float = 0.0

    @property
    def total(self) -> jax.Array:
        """Sum of all losses at the targets."""
        return sum(self.target_sums.values())  # type: ignore[return-value]

    def means(self, totals: LossTotals) -> Losses:
        """Returns every loss; their sum is minimized (`minimized`).

        Args:
          totals: Of the whole batch.
        """
        return _means(self.target_sums, totals) | {
            name: value / totals.tokens for name, value in self.token_sums.items()
        }

    def minimized(self, totals: LossTotals) -> jax.Array:
        """Returns the sum of all losses, whose gradients also hold the statistics of weights.

        Args:
          totals: Of the whole batch.
        """
        return sum(self.means(totals).values()) + self.statistics  # type: ignore[return-value]

    def other_means(self, totals: LossTotals) -> Losses:
        """Returns what the objective reports beside the losses and does not minimize.

        Args:
          totals: Of the whole batch.
        """
        means = _means(self.metric_sums, totals)
        if self.log_z is not None:
            means["log_z"] = self.log_z / totals.weight
        if self.nats is not None:
            means[IN_NATS] = self.nats / totals.weight
        return means


def _means(sums: Losses, totals: LossTotals) -> Losses:
    """Returns sums divided by the weight of each."""
    return {name: value / totals.by_name.get(name, totals.weight) for name, value in sums.items()}


def loss_totals(model: Model, batch: Batch) -> LossTotals:
    """Returns what the losses of a batch are divided by.

    Args:
      model: With its objective.
      batch: The whole global batch, before it is split into microbatches.
    """
    target_weight = jnp.sum(batch.loss_mask_BT)
    return LossTotals(
        target_weight=target_weight,
        weight=jnp.maximum(target_weight, 1.0),
        tokens=num_tokens(batch),
        by_name={
            name: jnp.maximum(weight, 1.0) for name, weight in loss_weights(model, batch).items()
        },
    )


def loss_weights(model: Model, batch: Batch) -> Losses:
    """Returns the weights of losses that are not those of the targets, of a batch.

    Args:
      model: With its objective.
      batch: The whole global batch, or one of evaluation.
    """
    objective = objective_class(model.config)
    if objective is None:
        return {}
    weights = objective.weights(objective_config(model.config), batch)
    is_valid = isinstance(weights, dict) and all(jnp.shape(x) == () for x in weights.values())
    check(is_valid and IN_NATS not in weights, objective, "weights", weights, _WEIGHTS)
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}


_WEIGHTS = f"{{name: scalar}} without {IN_NATS}, which is divided by the weight of the targets"


def num_tokens(batch: Batch) -> jax.Array:
    """Returns the number of tokens in a batch without padding, at least 1."""
    if batch.segments_BT is None:
        return jnp.float32(batch.tokens_BT.size)
    return jnp.maximum(jnp.sum(batch.segments_BT > 0).astype(jnp.float32), 1.0)


@register("objective", "cross_entropy")
def cross_entropy_losses(
    config: ObjectiveConfig, logits_BTV: jax.Array, targets_BT: jax.Array
) -> LossesAndLogZ:
    """Returns cross entropy in nats, and z-loss (PaLM, section 5)."""
    losses_BT, log_z_BT = cross_entropy(logits_BTV, targets_BT)
    z_losses_BT = config.z_loss_multiplier * jnp.square(log_z_BT)
    return {IN_NATS: losses_BT, "z_loss": z_losses_BT}, log_z_BT


@register("objective", "entmax")
def entmax_losses(
    config: ObjectiveConfig, logits_BTV: jax.Array, targets_BT: jax.Array
) -> LossesAndLogZ:
    """Returns the alpha-entmax loss; alpha = 1 is softmax."""
    if config.entmax_alpha > 1:
        return {"entmax_loss": entmax_loss(logits_BTV, targets_BT, config.entmax_alpha)}, None
    losses_BT, log_z_BT = cross_entropy(logits_BTV, targets_BT)
    return {"entmax_loss": losses_BT}, log_z_BT


def per_token_losses(
    logits_BTV: jax.Array, targets_BT: jax.Array, config: ObjectiveConfig
) -> LossesAndLogZ:
    """Returns the losses of the registered function at each target.

    An objective of this form is a function of its own keys (else of `config`), float32 logits
    [B, T, V] and targets [B, T]. It returns losses by name, float32 [B, T] each, whose sum is
    minimized, and log(Z) [B, T] or None. A loss named lm_loss is a cross entropy in nats, so it has
    a perplexity. Beside an objective without one, `loss_sums` computes it from the logits. Names of
    other metrics of a step, such as grad_norm, are refused (metric_names.py).

    B and T come from the arrays: T may be a chunk of the sequence (num_vocab_tiling), and
    `is_in_nats` traces the function with logits [1, 1, V].
    """
    objective = lookup("objective", config.name)
    outputs = objective(config.parts.of(objective) or config, logits_BTV, targets_BT)
    shapes = {jnp.shape(array) for array in jax.tree.leaves(outputs)}
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[0], dict)
    is_valid = is_pair and bool(outputs[0]) and shapes == {targets_BT.shape}
    expected = f"({{name: losses}}, log_z or None), each {list(targets_BT.shape)} as the targets"
    check(is_valid, objective, "", outputs, expected)
    return outputs


def is_in_nats(model: Model) -> bool:
    """Returns whether a loss of a model's objective is in nats and has a perplexity.

    Traces a function with a single token, and a class with the model on one sequence.
    """
    config = model.config
    if objective_class(config) is not None:
        return IN_NATS in abstract_loss_sums(model).target_sums
    logits = jax.ShapeDtypeStruct((1, 1, config.shape.vocab_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    function = functools.partial(per_token_losses, config=config.objective)
    losses, _ = jax.eval_shape(function, logits, targets)
    return IN_NATS in losses


@functools.lru_cache(maxsize=32)
def abstract_loss_sums(model: Model) -> LossSums:
    """Returns the shapes of `loss_sums` of one sequence in training.

    Raises:
      UserError: A part or the objective returns something else than it has to, or a name of a loss
        is taken.
    """

    def sums(params: Params, batch: Batch, frozen: FrozenParams) -> LossSums:
        loss_weights(model, batch)  # to check them, too
        decoder = model.merge(params)
        return loss_sums(decoder, batch, model.config.objective, training=True, frozen=frozen)

    frozen = {name: x.model.abstract for name, x in frozen_models(model.config).items()}
    batch = batch_shapes(1, model.config.shape.max_target_length, with_documents=True)
    return jax.eval_shape(sums, model.abstract, batch, frozen)


class _HeadSums(NamedTuple):
    """Sums of what the head's logits give, over the tokens of a batch or of a chunk."""

    losses: Losses  # by name, weighted
    correct: jax.Array | None  # as in LossSums
    log_z: jax.Array | None
    nats: jax.Array | None


# From logits [b, t, V], targets [b, t] and loss weights [b, t] to sums over them.
_SumsOfLogits = Callable[[jax.Array, jax.Array, jax.Array], _HeadSums]


def loss_sums(
    decoder: Decoder,
    batch: Batch,
    config: ObjectiveConfig,
    dropout_key: jax.Array | None = None,
    *,
    training: bool = False,
    count_correct: bool = False,
    frozen: FrozenParams | None = None,
    log_layer_metrics: bool = False,
) -> LossSums:
    """Returns the losses as sums, to add up microbatches.

    With num_vocab_tiling, logits are computed for one chunk of the sequences' length at a time, and
    the backward pass recomputes them.

    Args:
      decoder: The model with its parameters (`Model.merge`).
      batch: Arrays [B, T].
      config: Of the objective.
      dropout_key: Random key of dropout and routing; None for none.
      training: Whether the model is trained, as opposed to evaluated.
      count_correct: Whether to count the targets that are the most probable token.
      frozen: Parameters of the models that the objective reads and does not train.
      log_layer_metrics: As in `Decoder.read_layers`.
    """
    objective = decoder.objective
    layers = () if objective is None else objective.read_layers()
    states = decoder.read_layers(
        layers, batch, dropout_key, training=training, log_layer_metrics=log_layer_metrics
    )
    h_BTD = states.h_BTD
    if training:  # so that there are gradients, whose order matters on TPU
        h_BTD = head_gradients_first(h_BTD, decoder.head, decoder.token_embedder)
    context = ObjectiveContext(
        layer_outputs=states.of_layers,
        frozen={} if objective is None else _merged(decoder, frozen or {}),
        dropout_key=dropout_key,
        training=training,
        num_chunks=config.num_vocab_tiling,
    )
    scalars = states.scalars
    if objective is None:
        losses = functools.partial(per_token_losses, config=config)
        sums = _function_sums(decoder, batch, h_BTD, context, losses, count_correct=count_correct)
    else:
        assert isinstance(objective, Objective)
        outputs = _checked(objective, objective(decoder, batch, h_BTD, context))
        scalars = add_scalars(scalars, outputs.layer_scalars)
        sums = _class_sums(decoder, batch, h_BTD, context, outputs, count_correct=count_correct)
    sums = _with_scalars(sums, scalars)
    _check_names(sums, config)
    return sums


def _with_scalars(sums: LossSums, scalars: Scalars) -> LossSums:
    """Returns sums with what layers return beside their outputs."""
    losses: Losses = {}
    metrics: dict[str, Metric] = {}
    statistics = sums.statistics
    for name, scalar in scalars.items():
        if isinstance(scalar, Statistic):
            statistics = statistics + scalar.term
        elif isinstance(scalar, Metric):
            metrics[name] = scalar
        else:
            losses[name] = scalar
    return sums._replace(token_sums=losses, layer_metrics=metrics, statistics=statistics)


def _function_sums(
    decoder: Decoder,
    batch: Batch,
    h_BTD: jax.Array,
    context: ObjectiveContext,
    per_token: Callable[[jax.Array, jax.Array], LossesAndLogZ],
    *,
    count_correct: bool,
) -> LossSums:
    """Returns the sums of an objective that is a function of logits, without those of layers.

    Args:
      decoder: The model with its parameters.
      batch: Arrays [B, T].
      h_BTD: What the head reads.
      context: Of the objective.
      per_token: From logits and targets to losses, as `per_token_losses`.
      count_correct: As in `loss_sums`.
    """

    def sums_of_logits(
        logits_BTV: jax.Array, targets_BT: jax.Array, loss_mask_BT: jax.Array
    ) -> _HeadSums:
        losses, log_z_BT = per_token(logits_BTV, targets_BT)
        summed = {name: jnp.sum(loss_BT * loss_mask_BT) for name, loss_BT in losses.items()}
        log_z = None if log_z_BT is None else jnp.sum(log_z_BT * loss_mask_BT)
        return _HeadSums(
            losses=summed,
            correct=_correct(logits_BTV, targets_BT, loss_mask_BT) if count_correct else None,
            log_z=log_z,
            nats=None if IN_NATS in losses else _nats(logits_BTV, targets_BT, loss_mask_BT),
        )

    sums = _head_sums(decoder, batch, h_BTD, context, sums_of_logits)
    return LossSums(
        target_sums=sums.losses,
        token_sums={},
        correct=sums.correct,
        log_z=sums.log_z,
        nats=sums.nats,
    )


def _class_sums(
    decoder: Decoder,
    batch: Batch,
    h_BTD: jax.Array,
    context: ObjectiveContext,
    outputs: ObjectiveSums,
    *,
    count_correct: bool,
) -> LossSums:
    """Returns the sums of an objective that reads the model, without those of layers.

    What it does not compute itself comes from another pass of the head, without gradient.

    Args:
      decoder: The model with its parameters.
      batch: Arrays [B, T].
      h_BTD: What the head reads.
      context: Of the objective.
      outputs: What it returned.
      count_correct: As in `loss_sums`.
    """
    needs_nats = IN_NATS not in outputs.losses and IN_NATS not in outputs.metrics
    sums = LossSums(
        target_sums=dict(outputs.losses),
        token_sums={},
        log_z=outputs.log_z,
        metric_sums=dict(outputs.metrics),
    )

    def sums_of_logits(
        logits_BTV: jax.Array, targets_BT: jax.Array, loss_mask_BT: jax.Array
    ) -> _HeadSums:
        logits_BTV = jax.lax.stop_gradient(logits_BTV)
        return _HeadSums(
            losses={},
            correct=_correct(logits_BTV, targets_BT, loss_mask_BT) if count_correct else None,
            log_z=None,
            nats=_nats(logits_BTV, targets_BT, loss_mask_BT) if needs_nats else None,
        )

    if not needs_nats and not count_correct:
        return sums
    beside = _head_sums(decoder, batch, jax.lax.stop_gradient(h_BTD), context, sums_of_logits)
    return sums._replace(correct=beside.correct, nats=beside.nats)


def _head_sums(
    decoder: Decoder,
    batch: Batch,
    h_BTD: jax.Array,
    context: ObjectiveContext,
    sums_of_logits: _SumsOfLogits,
) -> _HeadSums:
    """Applies the head, in chunks, and returns sums over all tokens."""

    def head_sums(
        logits: Callable[[], jax.Array], targets_BT: jax.Array, loss_mask_BT: jax.Array
    ) -> _HeadSums:
        return sums_of_logits(logits(), targets_BT, loss_mask_BT)

    logits = logits_of(decoder, batch, h_BTD)
    return context.in_chunks(head_sums, logits, batch.targets_BT, batch.loss_mask_BT)


def _nats(logits_BTV: jax.Array, targets_BT: jax.Array, loss_mask_BT: jax.Array) -> jax.Array:
    """Returns the weighted sum of the cross entropy, without gradient."""
    nats_BT, _ = cross_entropy(jax.lax.stop_gradient(logits_BTV), targets_BT)
    return jnp.sum(nats_BT * loss_mask_BT)


def _correct(logits_BTV: jax.Array, targets_BT: jax.Array, loss_mask_BT: jax.Array) -> jax.Array:
    """Returns the weight of the targets that are the (first) argmax."""
    is_correct_BT = jnp.argmax(logits_BTV, axis=-1) == targets_BT
    return jnp.sum(is_correct_BT * loss_mask_BT)


def _merged(decoder: Decoder, frozen: FrozenParams) -> dict[str, Decoder]:
    """Returns the frozen models of a decoder's objective with their parameters."""
    models = frozen_models(decoder.config)
    missing = models.keys() - frozen.keys()
    if missing:
        raise ValueError(
            f"the objective reads frozen models without parameters: {', '.join(sorted(missing))}; "
            "pass those of read_frozen_params as `frozen`"
        )
    return {name: model.model.merge(frozen[name]) for name, model in models.items()}


def _checked(objective: Objective, outputs: ObjectiveSums) -> ObjectiveSums:
    """Returns what an objective returned; UserError unless it has the form of ObjectiveSums."""
    is_valid = isinstance(outputs, ObjectiveSums) and bool(outputs.losses)
    is_valid = is_valid and all(jnp.shape(x) == () for x in jax.tree.leaves(outputs))
    expected = "ObjectiveSums({name: scalar}, {name: scalar}) with at least one loss"
    check(is_valid, objective, "__call__", outputs, expected)
    return outputs


def _check_names(sums: LossSums, config: ObjectiveConfig) -> None:
    """Raises UserError if a loss or metric has the name of another one.

    A second number under a name would replace the first one in the records of a run.
    """
    objective = lookup("objective", config.name)
    of_objective = (*sums.target_sums, *sums.metric_sums)
    for name in of_objective:
        if problem := name_problem(name):
            raise UserError(f"{describe(objective)} returned {name!r}, {problem}")
    metrics = [name for name, metric in sums.layer_metrics.items() if metric.total.ndim == 0]
    of_layers = dict.fromkeys(sums.token_sums, "loss") | dict.fromkeys(metrics, "metric")
    for name, kind in of_layers.items():
        problem = name_problem(name)
        if name in of_objective:
            problem = f"which is also a loss or metric of {describe(objective)}"
        if name == IN_NATS:
            problem = "the name of the cross entropy of the whole model"
        if problem:
            raise UserError(f"a layer returned the {kind} {name!r}, {problem}: rename it")
    for name in sums.target_sums.keys() & sums.metric_sums.keys():
        raise UserError(f"{describe(objective)} returned {name!r} as a loss and as a metric")
