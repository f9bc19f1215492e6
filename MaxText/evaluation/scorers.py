"""Log-probabilities of continuations, and of tokens at selected positions.

B sequences of a batch, T tokens and C positions of a sequence, D emb_dim, V vocab_size.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.scores import Continuation, Progress
from MaxText.inference.engine import next_power_of_two
from MaxText.inference.trained_model import TrainedModel
from MaxText.layers.batch import Batch
from MaxText.parallelism.logical_sharding import HIDDEN, with_logical_constraint
from MaxText.parallelism.mesh import microbatch_size
from MaxText.training.objective import cross_entropy

_SHORTEST = 16  # padded length of shorter sequences: compiling another program would cost more
_FEWEST_POSITIONS = 4  # positions are padded to powers of 4, so that few shapes are compiled
CHUNK_LOGITS = 2**26  # per chunk and device: 256 MB in float32


class Loglikelihood(NamedTuple):
    """Score of a continuation."""

    log_probability: float  # in nats, summed over the ids
    is_greedy: bool  # whether each id is the argmax


class _ScoreRequest(NamedTuple):
    """One model input and the positions to score."""

    ids: np.ndarray  # int32 [T]
    positions: list[int]  # in `ids`
    targets: list[int]  # the id to score at each position
    owners: list[int]  # continuations that these are of, in order


class Scorer:
    """Scores ids at positions of sequences of any length up to `window`.

    Batches hold as many tokens as an evaluation batch, in sequences of similar length, padded on
    the right. Only the requested positions go through the head.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing yet; UserError for non-causal models."""
        if not trained.model.config.attention.causal:
            raise UserError(
                "only causal models can score continuations, and this model has causal=false: it "
                "was trained to predict masked tokens. eval.py scores it on data sets."
            )
        config = trained.config
        sharding = trained.sharding
        per_device = config.evaluation.eval_per_device_batch_size
        self.window: int = trained.model.config.shape.max_target_length
        self._num_tokens = microbatch_size(config.batch, sharding, per_device) * self.window
        self._trained = trained
        score = functools.partial(_score_positions, trained.model, sharding.num_batch_parts)
        # Every host submits all requests and reads all outputs, which are small.
        self._score_positions = sharding.jit(score, out_shardings=sharding.replicated)

    def score_continuations(
        self, continuations: Sequence[Continuation], progress: Progress | None = None
    ) -> list[Loglikelihood]:
        """Returns one score per continuation, in order.

        Contexts that exceed the window are truncated on the left. One-token answers to a question
        share a forward pass.
        """
        by_input: dict[bytes, _ScoreRequest] = {}
        for number, (context, ids) in enumerate(continuations):
            if not 0 < len(ids) <= self.window:
                raise UserError(
                    f"continuation {number} has {len(ids)} tokens; it must have between 1 and "
                    f"max_target_length={self.window}."
                )
            assert context, "a bos or eos id precedes a continuation without context"
            read = np.array([*context, *ids][-(self.window + 1) : -1], np.int32)
            request = by_input.setdefault(read.tobytes(), _ScoreRequest(read, [], [], []))
            request.positions.extend(range(len(read) - len(ids), len(read)))
            request.targets.extend(ids)
            request.owners.append(number)
        requests = list(by_input.values())
        done = 0
        scores: dict[int, Loglikelihood] = {}
        outputs = itertools.chain(self._outputs(requests), [([], ())])
        # Outputs are fetched one batch late, to keep the devices busy.
        for (some, arrays), _ in itertools.pairwise(outputs):
            for one, losses_C, is_argmax_C in zip(some, *map(np.asarray, arrays), strict=False):
                start = 0
                for number in one.owners:
                    part = slice(start, start + len(continuations[number].ids))
                    total = float(np.sum(-losses_C[part], dtype=np.float64))
                    scores[number] = Loglikelihood(total, bool(is_argmax_C[part].all()))
                    start = part.stop
            done += len(some)
            if progress is not None:
                progress(done, len(requests))
        return [scores[number] for number in range(len(continuations))]

    def _outputs(
        self, requests: Sequence[_ScoreRequest]
    ) -> Iterator[tuple[list[_ScoreRequest], Any]]:
        """Yields requests, longest first, and their scores on device."""
        sharding = self._trained.sharding
        parts = sharding.num_batch_parts
        by_shape: dict[tuple[int, int], list[_ScoreRequest]] = {}
        for one in requests:
            length = padded_length(len(one.ids), self.window)
            num_positions = next_power_of_two(len(one.positions), _FEWEST_POSITIONS)
            num_positions <<= num_positions.bit_length() % 2 == 0  # powers of 4
            by_shape.setdefault((length, num_positions), []).append(one)
        for (length, num_positions), alike in sorted(by_shape.items(), reverse=True):
            most = max(1, self._num_tokens // (length * parts)) * parts
            for start in range(0, len(alike), most):
                some = alike[start : start + most]
                # The remainder is padded to a power of two, so that few shapes are compiled.
                num_rows = min(most, next_power_of_two(-(-len(some) // parts), 1) * parts)
                tokens_BT = np.zeros((num_rows, length), np.int32)
                positions_BC, targets_BC = np.zeros((2, num_rows, num_positions), np.int32)
                for row, one in enumerate(some):
                    tokens_BT[row, : len(one.ids)] = one.ids
                    positions_BC[row, : len(one.positions)] = one.positions
                    targets_BC[row, : len(one.positions)] = one.targets
                arrays = jax.device_put(
                    (tokens_BT, positions_BC, targets_BC), sharding.batch_sharding(num_rows)
                )
                yield some, self._score_positions(self._trained.params, *arrays)


def padded_length(length: int, window: int) -> int:
    """Rounds up to 2^n or 1.5 * 2^n, at least 16 and at most the window."""
    power = next_power_of_two(length, _SHORTEST)
    between = max(_SHORTEST, power * 3 // 4)
    return min(between if length <= between else power, window)


def _score_positions(model, num_parts, params, tokens_BT, positions_BC, targets_BC):
    """Returns -log p of the targets and whether they are argmax, [B, C]."""
    decoder = model.merge(params)
    batch = Batch(tokens_BT, targets_BT=None, loss_mask_BT=None)
    h_BTD, _ = decoder.hidden_states(batch, drops_tokens=False)
    head_state = decoder.head_state(h_BTD, batch)
    h_BCD = jnp.take_along_axis(h_BTD, positions_BC[..., None], axis=1)
    h_BCD = with_logical_constraint(h_BCD, *HIDDEN)

    def of_chunk(chunk):
        h_BCD, targets_BC, positions_BC = chunk
        logits_BCV = decoder.logits(h_BCD, head_state, positions_BC)
        losses_BC, _ = cross_entropy(logits_BCV, targets_BC)
        return losses_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

    num_rows, num_positions = targets_BC.shape
    at_once = num_positions
    vocab_size = model.config.shape.vocab_size
    # num_positions is a power of two, so it halves evenly.
    while at_once > 1 and num_rows // num_parts * at_once * vocab_size > CHUNK_LOGITS:
        at_once //= 2
    if at_once == num_positions:
        return of_chunk((h_BCD, targets_BC, positions_BC))

    def in_chunks(x):
        x = x.reshape(num_rows, num_positions // at_once, at_once, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    outputs = jax.lax.map(of_chunk, tuple(map(in_chunks, (h_BCD, targets_BC, positions_BC))))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(num_rows, num_positions), outputs)
