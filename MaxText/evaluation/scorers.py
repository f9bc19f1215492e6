"""Log-probabilities of continuations, and of tokens at selected positions.

B sequences of a batch, T tokens and C positions of a sequence, D emb_dim, V vocab_size.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.errors import UserError
from MaxText.evaluation.scores import Continuation, Progress
from MaxText.inference.engine import HostArray, next_power_of_two
from MaxText.inference.trained_model import TrainedModel
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
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
    """One model input and the positions to score.

    Continuations with equal inputs, such as one-token answers to a question, share a request.
    """

    ids: np.ndarray  # int32 [T]
    positions: list[int]  # in `ids`, of all continuations, one after the other
    targets: list[int]  # the id to score at each position
    continuations: list[int]  # indices of the continuations scored, in order


class _ScoreInputs(NamedTuple):
    """A padded batch. Padding scores id 0 at position 0; its scores are ignored."""

    tokens_BT: HostArray  # int32
    positions_BC: HostArray  # int32, to score
    targets_BC: HostArray  # int32, ids to score at these positions


class _ScoreOutput(NamedTuple):
    """The requests of a batch, and their scores on device."""

    requests: list[_ScoreRequest]
    losses_BC: jax.Array  # float32, -log p of the targets
    is_argmax_BC: jax.Array  # bool


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
        self,
        continuations: Sequence[Continuation],
        progress: Progress | None = None,
        *,
        params: Params | None = None,
    ) -> list[Loglikelihood]:
        """Returns one score per continuation, in order.

        Contexts that exceed the window are truncated on the left. One-token answers to a question
        share a forward pass. Raises UserError for an empty continuation, or one beyond the window.
        `params` are weights in place of those of the model.
        """
        params = self._trained.params if params is None else params
        requests = self._group_by_input(continuations)
        num_done = 0
        scores: dict[int, Loglikelihood] = {}
        # Outputs are fetched one batch late, to keep the devices busy: the end marker lets
        # `pairwise` yield the last batch, too.
        outputs = itertools.chain(self._outputs(requests, params), [None])
        for output, _ in itertools.pairwise(outputs):
            assert output is not None
            batch_requests, losses, is_argmax = output
            losses_BC = np.asarray(losses)
            is_argmax_BC = np.asarray(is_argmax)
            for row, request in enumerate(batch_requests):
                start = 0
                for index in request.continuations:
                    span = slice(start, start + len(continuations[index].ids))
                    total = float(np.sum(-losses_BC[row, span], dtype=np.float64))
                    is_greedy = bool(is_argmax_BC[row, span].all())
                    scores[index] = Loglikelihood(total, is_greedy)
                    start = span.stop
            num_done += len(batch_requests)
            if progress is not None:
                progress(num_done, len(requests))
        return [scores[index] for index in range(len(continuations))]

    def _group_by_input(self, continuations: Sequence[Continuation]) -> list[_ScoreRequest]:
        """Returns a request per distinct input; UserError for continuations beyond the window."""
        by_input: dict[bytes, _ScoreRequest] = {}
        for index, (context, ids) in enumerate(continuations):
            if not 0 < len(ids) <= self.window:
                raise UserError(
                    f"continuation {index} has {len(ids)} tokens; it must have between 1 and "
                    f"max_target_length={self.window}."
                )
            assert context, "a bos or eos id precedes a continuation without context"
            input_ids = np.array([*context, *ids][-(self.window + 1) : -1], np.int32)
            new_request = _ScoreRequest(input_ids, positions=[], targets=[], continuations=[])
            request = by_input.setdefault(input_ids.tobytes(), new_request)
            request.positions.extend(range(len(input_ids) - len(ids), len(input_ids)))
            request.targets.extend(ids)
            request.continuations.append(index)
        return list(by_input.values())

    def _outputs(self, requests: Sequence[_ScoreRequest], params: Params) -> Iterator[_ScoreOutput]:
        """Yields the requests of each batch, longest first, and their scores on device."""
        num_parts = self._trained.sharding.num_batch_parts
        by_shape: dict[tuple[int, int], list[_ScoreRequest]] = {}
        for request in requests:
            length = padded_length(len(request.ids), self.window)
            num_positions = _padded_positions(len(request.positions))
            by_shape.setdefault((length, num_positions), []).append(request)
        for (length, num_positions), same_shape in sorted(by_shape.items(), reverse=True):
            max_rows = max(1, self._num_tokens // (length * num_parts)) * num_parts
            for start in range(0, len(same_shape), max_rows):
                batch_requests = same_shape[start : start + max_rows]
                # The remainder is padded to a power of two, so that few shapes are compiled.
                rows_per_part = -(-len(batch_requests) // num_parts)
                num_rows = min(max_rows, next_power_of_two(rows_per_part, 1) * num_parts)
                yield self._score_batch(params, batch_requests, (num_rows, length), num_positions)

    def _score_batch(
        self,
        params: Params,
        requests: list[_ScoreRequest],
        shape: tuple[int, int],
        num_positions: int,
    ) -> _ScoreOutput:
        """Pads requests to [B, T] = `shape` with `num_positions` positions, and scores them."""
        num_rows, _ = shape
        tokens_BT = np.zeros(shape, np.int32)
        positions_BC = np.zeros((num_rows, num_positions), np.int32)
        targets_BC = np.zeros((num_rows, num_positions), np.int32)
        for row, request in enumerate(requests):
            tokens_BT[row, : len(request.ids)] = request.ids
            positions_BC[row, : len(request.positions)] = request.positions
            targets_BC[row, : len(request.positions)] = request.targets
        inputs = _ScoreInputs(tokens_BT, positions_BC, targets_BC)
        inputs = jax.device_put(inputs, self._trained.sharding.batch_sharding(num_rows))
        losses_BC, is_argmax_BC = self._score_positions(params, inputs)
        return _ScoreOutput(requests, losses_BC, is_argmax_BC)


def _padded_positions(num_positions: int) -> int:
    """Returns the smallest power of 4 >= a number of positions, so that few shapes are compiled."""
    padded = _FEWEST_POSITIONS
    while padded < num_positions:
        padded *= 4
    return padded


def padded_length(length: int, window: int) -> int:
    """Rounds up to 2^n or 1.5 * 2^n, at least 16 and at most the window."""
    power = next_power_of_two(length, _SHORTEST)
    between = max(_SHORTEST, power * 3 // 4)
    return min(between if length <= between else power, window)


def _score_positions(
    model: Model, num_parts: int, params: Params, inputs: _ScoreInputs
) -> tuple[jax.Array, jax.Array]:
    """Returns -log p of the targets and whether they are argmax, [B, C].

    Logits are computed for a chunk of positions at a time, because [B, C, V] can be larger than the
    model.

    Args:
      model: A causal model.
      num_parts: Devices over which the batch is divided, for the size of a chunk.
      params: The model's parameters.
      inputs: Tokens, and the positions and targets to score.
    """
    tokens_BT, positions_BC, targets_BC = inputs
    decoder = model.merge(params)
    batch = Batch(tokens_BT, targets_BT=None, loss_mask_BT=None)
    h_BTD, _ = decoder.hidden_states(batch, drops_tokens=False)
    head_state = decoder.head_state(h_BTD, batch)
    h_BCD = jnp.take_along_axis(h_BTD, positions_BC[..., None], axis=1)
    h_BCD = with_logical_constraint(h_BCD, *HIDDEN)

    def score_chunk(chunk):
        h_BCD, targets_BC, positions_BC = chunk
        logits_BCV = decoder.logits(h_BCD, head_state, positions_BC)
        losses_BC, _ = cross_entropy(logits_BCV, targets_BC)
        return losses_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC

    num_rows, num_positions = targets_BC.shape
    rows_per_part = num_rows // num_parts
    vocab_size = model.config.shape.vocab_size
    chunk_size = num_positions
    # num_positions is a power of two, so it halves evenly.
    while chunk_size > 1 and rows_per_part * chunk_size * vocab_size > CHUNK_LOGITS:
        chunk_size //= 2
    if chunk_size == num_positions:
        return score_chunk((h_BCD, targets_BC, positions_BC))

    def split_into_chunks(x):
        x = x.reshape(num_rows, num_positions // chunk_size, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join_chunks(x):
        return jnp.moveaxis(x, 0, 1).reshape(num_rows, num_positions)

    chunks = jax.tree.map(split_into_chunks, (h_BCD, targets_BC, positions_BC))
    outputs = jax.lax.map(score_chunk, chunks)
    return jax.tree.map(join_chunks, outputs)
