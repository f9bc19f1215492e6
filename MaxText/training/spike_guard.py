"""Spike guard: decides on the device whether to skip an update.

An update is skipped if its loss, gradient norm or update norm is not finite, or an outlier: more
than `skip_step_scaling_factor` deviations above the median of the last W accepted updates. Median
and median absolute deviation (Hampel 1974) are robust to outliers, and skipped updates are not part
of them: so neither a NaN nor a second spike shortly after a first one passes. Until W / 4 updates
are accepted, a loss far above the median is the only outlier.

Legend: W `skip_step_interval`, Q watched quantities.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from MaxText.config.training_sections import GuardConfig
from MaxText.value_types import PyTree, Tree

_QUANTITIES = 3  # loss, gradient norm, update norm / learning rate (which changes in a run)
_LOSS = 0  # index of the loss among them
# Floor of the deviation relative to the median: nearly constant values would otherwise have
# outliers everywhere. Norms vary more from batch to batch than losses.
_MIN_DEVIATION_Q = (0.03, 0.5, 0.5)
_SMALL_LOSS = 1.0  # nats below which relative changes mean little, as in memorized text
# Nats (or the median itself, if more) that an early loss may be above the median so far. Early
# losses vary widely, and a wrong skip leads to others: only a diverging run may exceed this.
_EARLY_LOSS_RISE = 4.0
_SIGMA = 1.4826  # standard deviation / median absolute deviation of normal noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """State of the guard, stored for equal decisions after a resume.

    Attributes:
      values_QW: float32, the quantities of the last W accepted updates. A ring buffer: accepted
        update n is in column n % W.
      num_accepted: int32, accepted updates so far.
      num_skipped: int32, skipped updates so far.
      last_skipped: int32, the last step whose update was skipped; -1 for none.
      skipped_W: bool, whether each of the last W updates was skipped. A ring buffer: step s is in
        s % W.
      lowest_loss: float32, lowest median loss over W accepted updates; infinite before there are W.
      last_stable_step: int32, the last step whose `loss_rise` (see `decide`) was at most a quarter
        of rollback.on_rise.
    """

    values_QW: jax.Array
    num_accepted: jax.Array
    num_skipped: jax.Array
    last_skipped: jax.Array
    skipped_W: jax.Array
    lowest_loss: jax.Array
    last_stable_step: jax.Array

    def reset(self) -> "GuardState":
        """Returns an empty state with the shardings of this (abstract) one."""
        empty = _empty_state(self.skipped_W.shape[0])
        return jax.device_put(empty, jax.tree.map(lambda x: x.sharding, self))


def initial_state(config: GuardConfig) -> GuardState | None:
    """Returns the state before the first step; None if the guard is disabled."""
    return _empty_state(config.skip_step_interval) if config.skip_step_on_spikes else None


def _empty_state(window: int) -> GuardState:
    """Returns the state before any step, for a window of `window` updates."""
    return GuardState(
        values_QW=jnp.zeros((_QUANTITIES, window), jnp.float32),
        num_accepted=jnp.int32(0),
        num_skipped=jnp.int32(0),
        last_skipped=jnp.int32(-1),
        skipped_W=jnp.zeros(window, bool),
        lowest_loss=jnp.float32(jnp.inf),
        last_stable_step=jnp.int32(0),
    )


# What `decide` reports.
METRICS = frozenset(
    (
        "skipped",
        "num_skipped",
        "last_skipped",
        "recent_skips",
        "skips_began",
        "loss_rise",
        "rise_began",
    )
)


def decide(
    config: GuardConfig,
    state: GuardState,
    step: jax.Array,
    *,
    loss: jax.Array,
    grad_norm: jax.Array,
    update_norm: jax.Array,
    learning_rate: jax.Array,
) -> tuple[jax.Array, GuardState, dict[str, jax.Array]]:
    """Decides about the update of a step, before it is applied.

    Args:
      config: Of the guard.
      state: Of the guard, before the step.
      step: Its number, int32.
      loss: Of the step's batch.
      grad_norm: Norm of the gradients before clipping.
      update_norm: Norm of what would be added to the parameters.
      learning_rate: Of the step. If it is 0, the update is 0 and says nothing.

    Returns:
      Whether to apply the update (bool), the state after the step, and metrics: int32 scalars
      except loss_rise.

        skipped           1 if the update is skipped
        num_skipped, last_skipped   as in GuardState
        recent_skips      skips in the last W updates
        skips_began       first step of the stretch of skips up to this step, -1 for none
        loss_rise         float32, rise of the median loss above its lowest value, relative to that
                          or to 1 nat if that is more
        rise_began        first step of the current rise
    """
    window = config.skip_step_interval
    rate = jnp.where(learning_rate > 0, learning_rate, 1.0)
    values_Q = jnp.stack([loss, grad_norm, update_norm / rate]).astype(jnp.float32)
    is_finite = jnp.all(jnp.isfinite(values_Q))

    count = jnp.minimum(state.num_accepted, window)
    median_Q = _median(state.values_QW, count)
    distance_QW = jnp.abs(state.values_QW - median_Q[:, None])
    size_Q = jnp.abs(median_Q).at[_LOSS].max(_SMALL_LOSS)
    min_deviation_Q = jnp.array(_MIN_DEVIATION_Q, jnp.float32) * size_Q
    deviation_Q = jnp.maximum(_SIGMA * _median(distance_QW, count), min_deviation_Q)
    is_outlier = jnp.any(values_Q > median_Q + config.skip_step_scaling_factor * deviation_Q)
    # Until a quarter of the window is filled, only an exploding loss is caught.
    early_bound = median_Q[_LOSS] + jnp.maximum(jnp.abs(median_Q[_LOSS]), _EARLY_LOSS_RISE)
    explodes = (count > 0) & (values_Q[_LOSS] > early_bound)
    accepted = is_finite & ~jnp.where(count >= window // 4, is_outlier, explodes)

    slot = state.num_accepted % window
    values_QW = jnp.where(accepted, state.values_QW.at[:, slot].set(values_Q), state.values_QW)
    num_accepted = state.num_accepted + accepted
    skipped_W = state.skipped_W.at[step % window].set(~accepted)

    loss_median = _median(values_QW[:1], jnp.minimum(num_accepted, window))[0]
    is_lowest = (num_accepted >= window) & (loss_median < state.lowest_loss)
    lowest_loss = jnp.where(is_lowest, loss_median, state.lowest_loss)
    relative_rise = (loss_median - lowest_loss) / jnp.maximum(jnp.abs(lowest_loss), _SMALL_LOSS)
    rise = jnp.where(jnp.isfinite(lowest_loss), relative_rise, 0.0)
    last_stable_step = jnp.where(rise <= config.rollback.on_rise / 4, step, state.last_stable_step)

    new_state = GuardState(
        values_QW=values_QW,
        num_accepted=num_accepted,
        num_skipped=state.num_skipped + ~accepted,
        last_skipped=jnp.where(accepted, state.last_skipped, step),
        skipped_W=skipped_W,
        lowest_loss=lowest_loss,
        last_stable_step=last_stable_step,
    )
    metrics = {
        "skipped": (~accepted).astype(jnp.int32),
        "num_skipped": new_state.num_skipped,
        "last_skipped": new_state.last_skipped,
        "recent_skips": jnp.sum(skipped_W),
        "skips_began": _skip_streak_start(skipped_W, step, config.rollback.after_skips),
        "loss_rise": rise,
        # The first step of the window at the last stable step.
        "rise_began": jnp.maximum(last_stable_step - window, 0),
    }
    return accepted, new_state, metrics


def select(accept: jax.Array, new_tree: Tree, old_tree: Tree) -> Tree:
    """Returns the new leaves of a tree if the update is accepted, else the old ones.

    Schedules always advance, as they count steps.

    Args:
      accept: Bool scalar.
      new_tree: Parameters or optimizer state after the update.
      old_tree: The same before it.
    """

    def is_schedule(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def choose(new_leaf: PyTree, old_leaf: PyTree) -> PyTree:
        """Returns the new or the old leaf; for a schedule's state, always the new one."""
        return new_leaf if is_schedule(new_leaf) else jnp.where(accept, new_leaf, old_leaf)

    return jax.tree.map(choose, new_tree, old_tree, is_leaf=is_schedule)


def _skip_streak_start(skipped_W: jax.Array, step: jax.Array, limit: int) -> jax.Array:
    """Returns the first step of the stretch of skips up to `step`; -1 without any.

    The stretch is the suffix of the window in which skips exceed the tolerated rate, `limit` per W,
    by the most (cumulative sum test; Page 1954). An isolated earlier skip is not part of it.
    """
    window = skipped_W.shape[0]
    ages_W = jnp.arange(window)
    by_age_W = skipped_W[(step - ages_W) % window]
    excess_W = jnp.cumsum(jnp.where(by_age_W, window - limit, -limit))
    excess_W = jnp.where(by_age_W, excess_W, jnp.iinfo(jnp.int32).min)
    oldest = jnp.max(jnp.where(excess_W == excess_W.max(), ages_W, 0))
    return jnp.where(by_age_W.any(), step - oldest, -1)


def _median(values_QW: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the median of the first `count` values of each quantity; 0 without any."""
    filled_QW = jnp.where(jnp.arange(values_QW.shape[1]) < count, values_QW, jnp.inf)
    sorted_QW = jnp.sort(filled_QW, axis=1)
    lower = jnp.maximum((count - 1) // 2, 0)
    upper = count // 2
    median_Q = (sorted_QW[:, lower] + sorted_QW[:, upper]) / 2
    return jnp.where(count > 0, median_Q, 0.0)
