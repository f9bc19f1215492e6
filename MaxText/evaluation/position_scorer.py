"""Log-probabilities at selected positions of many sequences.

B sequences of a batch, T tokens and C positions of a sequence, D emb_dim, V vocab_size.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.evaluation.masked_text import MaskIds
from MaxText.inference.engine import next_power_of_two
from MaxText.inference.trained_model import TrainedModel
from MaxText.layers.batch import Batch
from MaxText.parallelism.logical_sharding import HIDDEN, constrain
from MaxText.parallelism.mesh import microbatch_size
from MaxText.training.objective import cross_entropy

_SHORTEST = 16  # padded length of shorter sequences: compiling another program would cost more
_FEWEST_POSITIONS = 4  # positions are padded to powers of 4, so that few shapes are compiled
_CHUNK_LOGITS = 2**26  # per chunk and device: 256 MB in float32

Progress = Callable[[int, int], None]  # (done, total)


class ScoreRequest(NamedTuple):
    """One model input and the positions to score."""

    ids: np.ndarray  # int32 [T], without CLS
    positions: list[int]  # in `ids`
    targets: list[int]  # the id to score at each position
    hidden: Sequence[int] = ()  # positions in `ids` that the mask id replaces


class ScoreResult(NamedTuple):
    """Scores of the targets of one request."""

    request: int  # index among the requests
    log_probabilities_C: np.ndarray  # float32, in nats
    is_argmax_C: np.ndarray  # bool, whether each target is the argmax


class PositionScorer:
    """Scores positions of sequences of any length up to `window`.

    Batches hold as many tokens as an evaluation batch, in sequences of similar length. These are
    padded on the right; non-causal models get segment ids that mask the padding. Only the requested
    positions go through the head. `window` excludes CLS.
    """

    def __init__(self, trained: TrainedModel, mask_ids: MaskIds | None = None):
        """Compiles nothing yet. Without `mask_ids`, inputs get no mask and no CLS."""
        model_config = trained.model.config
        config, sharding = trained.config, trained.sharding
        length = model_config.shape.max_target_length
        per_device = config.evaluation.eval_per_device_batch_size
        self._mask_ids = mask_ids
        self._before = [] if mask_ids is None or mask_ids.cls is None else [mask_ids.cls]
        self.window: int = length - len(self._before)
        self._max_length = length
        self._num_tokens = microbatch_size(config.batch, sharding, per_device) * length
        self._num_parts = sharding.num_batch_parts
        self._sees_padding = not model_config.attention.causal
        self._sharding = sharding
        self._params = trained.params
        score = functools.partial(
            _score_positions,
            trained.model,
            num_parts=self._num_parts,
            vocab=model_config.shape.vocab_size,
        )
        # Every host submits all requests and reads all outputs, which are small.
        self._score_positions = sharding.jit(score, out_shardings=sharding.replicated)

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[list[ScoreResult]]:
        """Yields results by batch, longest first. Requests have 1 to `window` ids."""
        waiting: tuple[list[int], Any] | None = None
        # Outputs are fetched one batch late, to keep the devices busy.
        for numbers, arrays, batch_size in self._batches(requests):
            arrays = jax.device_put(arrays, self._sharding.batch_sharding(batch_size))
            outputs = self._score_positions(self._params, *arrays)
            if waiting is not None:
                yield _results(requests, *waiting)
            waiting = numbers, outputs
        if waiting is not None:
            yield _results(requests, *waiting)

    def _batches(
        self, requests: Sequence[ScoreRequest]
    ) -> Iterator[tuple[list[int], tuple[np.ndarray | None, ...], int]]:
        """Yields (request numbers, (tokens, positions, targets, segments), B)."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number, one in enumerate(requests):
            assert 0 < len(one.ids) <= self.window, len(one.ids)
            length = padded_length(len(self._before) + len(one.ids), self._max_length)
            num_positions = next_power_of_two(len(one.positions), _FEWEST_POSITIONS)
            num_positions <<= num_positions.bit_length() % 2 == 0  # powers of 4
            shape = length, num_positions
            by_shape.setdefault(shape, []).append(number)
        for (length, num_positions), alike in sorted(by_shape.items(), reverse=True):
            parts = self._num_parts
            most = max(1, self._num_tokens // (length * parts)) * parts
            for start in range(0, len(alike), most):
                some = alike[start : start + most]
                # The remainder is padded to a power of two, so that few shapes are compiled.
                batch_size = min(most, next_power_of_two(-(-len(some) // parts), 1) * parts)
                arrays = self._arrays(
                    [requests[n] for n in some], batch_size, length, num_positions
                )
                yield some, arrays, batch_size

    def _arrays(
        self, requests: Sequence[ScoreRequest], batch_size: int, length: int, num_positions: int
    ) -> tuple[np.ndarray | None, ...]:
        """Returns (tokens_BT, positions_BC, targets_BC, segments_BT), zero-padded."""
        tokens_BT, segments_BT = np.zeros((2, batch_size, length), np.int32)
        positions_BC, targets_BC = np.zeros((2, batch_size, num_positions), np.int32)
        first = len(self._before)
        for index, one in enumerate(requests):
            end, count = first + len(one.ids), len(one.positions)
            tokens_BT[index, :first] = self._before
            tokens_BT[index, first:end] = one.ids
            if one.hidden:
                assert self._mask_ids is not None
                tokens_BT[index, np.add(one.hidden, first)] = self._mask_ids.mask
            segments_BT[index, :end] = 1
            positions_BC[index, :count] = np.add(one.positions, first)
            targets_BC[index, :count] = one.targets
        return tokens_BT, positions_BC, targets_BC, segments_BT if self._sees_padding else None


def padded_length(length: int, window: int) -> int:
    """Rounds up to 2^n or 1.5 * 2^n, at least 16 and at most the window."""
    power = next_power_of_two(length, _SHORTEST)
    between = max(_SHORTEST, power * 3 // 4)
    return min(between if length <= between else power, window)


def _results(
    requests: Sequence[ScoreRequest], numbers: Sequence[int], outputs: Any
) -> list[ScoreResult]:
    losses_BC, is_argmax_BC = (np.asarray(output) for output in outputs)
    results = []
    for index, number in enumerate(numbers):
        count = len(requests[number].positions)
        results.append(ScoreResult(number, -losses_BC[index, :count], is_argmax_BC[index, :count]))
    return results


def _score_positions(
    model, params, tokens_BT, positions_BC, targets_BC, segments_BT, *, num_parts: int, vocab: int
):
    """Returns -log p of the targets and whether they are argmax, [B, C]."""
    decoder = model.merge(params)
    batch = Batch(tokens_BT, targets_BT=None, loss_mask_BT=None, segments_BT=segments_BT)
    h_BTD, _ = decoder.hidden_states(batch, drops_tokens=False)
    head_state = decoder.head_state(h_BTD, batch)
    h_BCD = jnp.take_along_axis(h_BTD, positions_BC[..., None], axis=1)
    h_BCD = constrain(h_BCD, *HIDDEN)

    def of_chunk(chunk):
        h_BCD, targets_BC, positions_BC = chunk
        logits_BCV = decoder.logits(h_BCD, head_state, positions_BC)
        losses_BC, _ = cross_entropy(logits_BCV, targets_BC)
        return losses_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

    batch_size, num_positions = targets_BC.shape
    at_once = num_positions
    # num_positions is a power of two, so it halves evenly.
    while at_once > 1 and batch_size // num_parts * at_once * vocab > _CHUNK_LOGITS:
        at_once //= 2
    if at_once == num_positions:
        return of_chunk((h_BCD, targets_BC, positions_BC))

    def in_chunks(x):
        x = x.reshape(batch_size, num_positions // at_once, at_once, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    outputs = jax.lax.map(of_chunk, tuple(map(in_chunks, (h_BCD, targets_BC, positions_BC))))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch_size, num_positions), outputs)
