"""Checks that the logits of a position depend on nothing but the tokens up to it.

One compiled function gives the loss of every target. It sees the tokens, positions and documents
of a batch, never its targets, and is evaluated again with tokens changed that a position may not
see. As it is the same program that measures the validation loss, a model cannot tell a check from
a measurement.

Legend: B sequences, T tokens.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from MaxText.conformance.subject import model_logits
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.training.objective import cross_entropy

# (parameters, batch) -> loss of each target in nats, [B, T].
TargetLosses = Callable[[Params, Batch], jax.Array | np.ndarray]
# Largest change of a loss, in nats, averaged over sequences. A leak that is worth less is not
# found; one that is worth anything to a candidate is worth more.
TOLERANCES = {"float32": 1e-3}
_TOLERANCE = 5e-3  # of narrower formats, in which sums over a sequence may round differently


class _Change(NamedTuple):
    """A batch with changed tokens, and the positions that may not notice."""

    name: str
    tokens_BT: np.ndarray
    is_unaffected_BT: np.ndarray  # bool


def target_losses(model: Model, params: Params, batch: Batch) -> jax.Array:
    """Returns the cross entropy of each target in nats, float32 [B, T].

    The model is given no targets: what it sees in their place are its own input tokens, and every
    target counts.

    Args:
      model: Whose objective is not used.
      params: Its parameters.
      batch: Arrays [B, T].
    """
    blinded = dataclasses.replace(
        batch,
        targets_BT=batch.tokens_BT,
        loss_mask_BT=jax.numpy.ones_like(batch.loss_mask_BT),
    )
    losses_BT, _ = cross_entropy(model_logits(model, params, blinded), batch.targets_BT)
    return losses_BT


def find_leaks(
    losses: TargetLosses, params: Params, batch: Batch, *, dtype: str, seed: int = 0
) -> list[str]:
    """Returns what positions see that they may not see: reasons to refuse the model.

    Args:
      losses: `target_losses` of a model, compiled.
      params: Its parameters.
      batch: Arrays [B, T] of NumPy, with two or more sequences.
      dtype: Of the activations.
      seed: Of the changed tokens and positions.
    """
    tolerance = TOLERANCES.get(dtype, _TOLERANCE)
    expected_BT = np.asarray(losses(params, batch))
    errors: dict[str, float] = {}  # largest one by what was changed
    for change in _changes(batch, np.random.default_rng(seed)):
        changed = dataclasses.replace(batch, tokens_BT=change.tokens_BT)
        error_BT = np.abs(np.asarray(losses(params, changed)) - expected_BT)
        is_counted_BT = change.is_unaffected_BT & (np.asarray(batch.loss_mask_BT) > 0)
        error_T = np.sum(error_BT, axis=0, where=is_counted_BT)
        error = np.max(error_T / np.maximum(is_counted_BT.sum(axis=0), 1), initial=0.0)
        errors[change.name] = np.maximum(errors.get(change.name, 0.0), error)  # passes on NaN
    return [
        f"it sees {name}: the loss of a target changes by {error:.2g} nats with them"
        for name, error in errors.items()
        if not error <= tolerance
    ]


def _changes(batch: Batch, generator: np.random.Generator) -> Iterator[_Change]:
    """Yields changes of a batch: of later tokens, of other sequences, of other documents."""
    tokens_BT = np.asarray(batch.tokens_BT)
    B, T = tokens_BT.shape
    # Tokens of the same text, so that a change looks like any other batch.
    other_BT = generator.permuted(tokens_BT.ravel()).reshape(B, T)
    position_T = np.arange(T)
    for cut in sorted({1, T // 2, T - 1, *generator.integers(1, T, 2).tolist()}):
        # The logits at a position predict the next token: those before the cut may not notice.
        later_T = position_T >= cut
        yield _Change(
            name="later tokens",
            tokens_BT=np.where(later_T, other_BT, tokens_BT),
            is_unaffected_BT=np.broadcast_to(~later_T, (B, T)),
        )
    if B > 1:
        is_first_B1 = (np.arange(B) == 0)[:, None]
        yield _Change(
            name="other sequences of the batch",
            tokens_BT=np.where(is_first_B1, tokens_BT, other_BT),
            is_unaffected_BT=np.broadcast_to(is_first_B1, (B, T)),
        )
    if batch.segments_BT is None:
        return
    segments_BT = np.asarray(batch.segments_BT)
    is_last_BT = segments_BT == segments_BT.max(axis=1, keepdims=True)
    if not is_last_BT.all():
        yield _Change(
            name="tokens of another document",
            tokens_BT=np.where(is_last_BT, tokens_BT, other_BT),
            is_unaffected_BT=is_last_BT,
        )
