"""Log-probabilities of continuations of contexts, many at a time.

Legend: B rows of a batch, T tokens of a row, C scored places of a row, D emb_dim, V vocab_size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.errors import UserError
from MaxText.inference.trained_model import TrainedModel
from MaxText.input_pipeline.batch import Batch
from MaxText.parallelism.constraints import constrain
from MaxText.parallelism.mesh import rows_of_batch
from MaxText.training.objective import cross_entropy

# Rows shorter than this are padded to it: a program more would cost more than the padding.
_SHORTEST = 16
# Scored places are padded to powers of this, so that few shapes are compiled.
_PLACES_BASE = 4
# Logits of a chunk on one device, as floats: 256 MB in float32.
_CHUNK_LOGITS = 2**26

# (continuations done, continuations in all)
Progress = Callable[[int, int], None]


class Continuation(NamedTuple):
    """What is scored: `ids` after `context`. Both hold at least one id."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """What the model says of a continuation.

    Attributes:
      log_probability: in nats, summed over its ids.
      is_greedy: whether each of its ids is the likeliest at its place.
    """

    log_probability: float
    is_greedy: bool


@dataclasses.dataclass
class _Row:
    """One input of the model and what is read off its outputs.

    Attributes:
      ids: int32 [T].
      places: where an output is read; places of several continuations follow each other.
      targets: the id looked up there.
      owners: (number of the continuation, how many of the places are its).
    """

    ids: np.ndarray
    places: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)
    owners: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class ContinuationScorer:
    """Scores continuations under a trained model.

    Batches hold as many tokens as a batch of evaluation, in rows of similar length. Padding lies
    right of the tokens, where causal attention does not look. Only outputs at scored places go
    through the head.

    Attributes:
      window: tokens that the model reads at most (max_target_length).
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing yet.

        Raises:
          UserError: a model that is not causal, or a batch that the devices do not divide.
        """
        section = trained.model.section
        if not section.attention.causal:
            raise UserError(
                "continuations have a probability under a causal model only, and this one has "
                "causal=false: it was trained to fill in hidden tokens."
            )
        config, layout = trained.config, trained.layout
        self.window: int = section.shape.max_target_length
        per_device = config.evaluation.eval_per_device_batch_size
        self._num_tokens = rows_of_batch(config.batch, layout, per_device) * self.window
        self._num_parts = layout.num_batch_parts
        self._layout = layout
        self._params = trained.params
        read = functools.partial(
            _read_places, trained.model, num_parts=self._num_parts, vocab=section.shape.vocab_size
        )
        # Every host asks for all rows and reads all outputs, which are small.
        self._read_places = layout.jit(read, out_shardings=layout.replicated)

    def score(
        self, continuations: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Score]:
        """One score for each continuation, in their order.

        A context that does not fit into the window loses ids on its left.

        Raises:
          UserError: a continuation without ids, or one longer than the window.
        """
        rows = self._rows(continuations)
        scores: list[Score | None] = [None] * len(continuations)
        num_done = 0
        waiting: tuple[list[_Row], Any] | None = None

        def settle(batch: tuple[list[_Row], Any] | None) -> None:
            nonlocal num_done
            if batch is None:
                return
            of_rows, outputs = batch
            losses_BC, greedy_BC = (np.asarray(output) for output in outputs)
            for row, losses_C, greedy_C in zip(of_rows, losses_BC, greedy_BC, strict=False):
                start = 0
                for owner, count in row.owners:
                    part = slice(start, start + count)
                    total = float(np.sum(losses_C[part], dtype=np.float64))
                    scores[owner] = Score(-total, bool(greedy_C[part].all()))
                    start += count
                num_done += len(row.owners)
            if progress is not None:
                progress(num_done, len(continuations))

        # Outputs are read one batch late, so that the devices always have work.
        for of_rows, arrays, num_rows in self._batches(rows):
            arrays = jax.device_put(arrays, self._layout.batch_sharding(num_rows))
            outputs = self._read_places(self._params, *arrays)
            settle(waiting)
            waiting = of_rows, outputs
        settle(waiting)
        assert None not in scores
        return scores  # type: ignore[return-value]

    def _rows(self, continuations: Sequence[Continuation]) -> list[_Row]:
        """Inputs without repetition: answers of one token to a question share theirs."""
        rows: dict[bytes, _Row] = {}
        for number, (context, ids) in enumerate(continuations):
            if not ids or len(ids) > self.window:
                raise UserError(
                    f"continuation {number} has {len(ids)} tokens, and between 1 and the model's "
                    f"window of max_target_length={self.window} can be scored at once."
                )
            assert context, "a continuation needs an id to follow"
            whole = np.array([*context, *ids][-(self.window + 1) :], np.int32)
            row = rows.setdefault(whole[:-1].tobytes(), _Row(whole[:-1]))
            row.places += range(len(whole) - 1 - len(ids), len(whole) - 1)
            row.targets += ids
            row.owners.append((number, len(ids)))
        return list(rows.values())

    def _batches(
        self, rows: Sequence[_Row]
    ) -> Iterator[tuple[list[_Row], tuple[np.ndarray, ...], int]]:
        """(rows, (tokens_BT, places_BC, targets_BC), B), the longest first."""
        by_shape: dict[tuple[int, int], list[_Row]] = {}
        for row in rows:
            shape = padded_length(len(row.ids), self.window), _padded_places(len(row.places))
            by_shape.setdefault(shape, []).append(row)
        for (length, num_places), alike in sorted(by_shape.items(), reverse=True):
            parts = self._num_parts
            most = max(1, self._num_tokens // (length * parts)) * parts
            for start in range(0, len(alike), most):
                some = alike[start : start + most]
                # The rest of a shape: the next power of two, for few programs.
                num_rows = min(most, _power_of(2, -(-len(some) // parts)) * parts)
                arrays = [np.zeros((num_rows, n), np.int32) for n in (length, *[num_places] * 2)]
                for index, row in enumerate(some):
                    for array, values in zip(
                        arrays, (row.ids, row.places, row.targets), strict=True
                    ):
                        array[index, : len(values)] = values
                yield some, tuple(arrays), num_rows


def rolling(ids: Sequence[int], prefix: int, window: int) -> list[Continuation]:
    """A text of any length as continuations, each of its ids in exactly one.

    Windows lie side by side; the last is moved left until it is full, and scores what the others
    have not. The first id follows `prefix`. (loglikelihood_rolling of lm-evaluation-harness.)
    """
    found = []
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        context = ids[max(0, end - window - 1) : start] if start else [prefix]
        found.append(Continuation(context, ids[start:end]))
    return found


def padded_length(length: int, window: int) -> int:
    """The next power of two, or one and a half times one; at most the window."""
    power = max(_SHORTEST, _power_of(2, length))
    between = max(_SHORTEST, power * 3 // 4)
    return min(between if length <= between else power, window)


def _padded_places(count: int) -> int:
    return _power_of(_PLACES_BASE, max(count, _PLACES_BASE))


def _power_of(base: int, least: int) -> int:
    """The smallest power of `base` that is no less."""
    power = 1
    while power < least:
        power *= base
    return power


def _read_places(model, params, tokens_BT, places_BC, targets_BC, *, num_parts: int, vocab: int):
    """-log p of the targets at the places, and whether they are the likeliest ids: [B, C] each."""
    decoder = model.merge(params)
    batch = Batch(tokens_BT, targets_BT=None, weights_BT=None)
    h_BTD, _ = decoder.hidden(batch)
    pointers = decoder.pointers(h_BTD, batch)
    h_BCD = jnp.take_along_axis(h_BTD, places_BC[..., None], axis=1)
    h_BCD = constrain(h_BCD, "activation_batch", "activation_length", "activation_embed")

    def of_chunk(chunk):
        h_BCD, targets_BC, places_BC = chunk
        logits_BCV = decoder.logits(h_BCD, pointers, places_BC)
        losses_BC, _ = cross_entropy(logits_BCV, targets_BC)
        return losses_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

    num_rows, num_places = targets_BC.shape
    at_once = num_places
    # Places are a power of two, so that halves stay whole.
    while at_once > 1 and num_rows // num_parts * at_once * vocab > _CHUNK_LOGITS:
        at_once //= 2
    if at_once == num_places:
        return of_chunk((h_BCD, targets_BC, places_BC))

    def in_chunks(x):
        x = x.reshape(num_rows, num_places // at_once, at_once, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    outputs = jax.lax.map(of_chunk, tuple(map(in_chunks, (h_BCD, targets_BC, places_BC))))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(num_rows, num_places), outputs)
