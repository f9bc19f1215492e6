"""Whether an update is sound, decided on the device from the updates before it.

An update is left out when its loss, the norm of its gradient or the norm of what it would add is
not finite, or an outlier: more than `skip_step_scaling_factor` deviations above the median over the
last sound updates. Median and median absolute deviation (Hampel 1974) do not move with the outliers
themselves, as mean and variance do, and updates that were left out are not among them: so neither
a NaN nor a second spike shortly after a first one passes.

Legend: W `skip_step_interval`, Q the quantities watched.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.training_sections import Guard

# Loss, norm of the gradient, norm of the update by the learning rate, which may change in a run.
_QUANTITIES = 3
# The least that counts as a deviation, as a share of the median: what is nearly constant would
# otherwise have outliers everywhere. Norms vary more from batch to batch than losses.
_LEAST_DEVIATION_Q = (0.03, 0.5, 0.5)
# Nats below which shares of the loss say little: where text is known by heart, one row that is not
# multiplies it.
_SMALL_LOSS = 1.0
# Nats, or the median itself if that is more, that the loss of one of the first steps may lie above
# the median so far. Early losses vary widely, and after a sound step is skipped, others follow:
# only a learning rate that explodes may exceed this.
_EARLY_LOSS_RISE = 4.0
# Of normal noise, sigma is so many times the median absolute deviation.
_SIGMA = 1.4826


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """What the guard remembers. Part of the train state, so that a resumed run judges the same.

    Attributes:
      values_QW: float32, of the last sound updates, a ring.
      num_sound: int32, sound updates so far.
      num_skipped: int32, updates left out so far.
      last_skipped: int32, the update left out last; -1 for none.
      skipped_W: bool, whether each of the last W updates was left out; a ring by step.
      lowest_loss: float32, lowest median loss over W sound updates.
      calm_step: int32, the last update at which the median was not far above that.
    """

    values_QW: Any
    num_sound: Any
    num_skipped: Any
    last_skipped: Any
    skipped_W: Any
    lowest_loss: Any
    calm_step: Any

    def fresh(self) -> "GuardState":
        """A guard that has seen nothing, of these shapes and laid out like this one.

        This one may be of jax.ShapeDtypeStruct with shardings.
        """
        nothing = _nothing_seen(self.skipped_W.shape[0])
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), nothing, self)


class Verdict(NamedTuple):
    """What is thought of an update.

    Attributes:
      is_sound: bool, whether it may be applied.
      state: what the guard remembers from now on.
      metrics: scalars, int32 but for loss_rise. skipped: 1 if it is left out. num_skipped,
        last_skipped: as in GuardState. recent_skips: those among the last W updates, this one
        included. skips_began: first step of the dense stretch of skips that leads up to this step,
        -1 for none. loss_rise: the median loss above its lowest value, as a share of that or of 1
        nat if that is more; float32. rise_began: where a rise that is going on began.
    """

    is_sound: jax.Array
    state: GuardState
    metrics: dict[str, jax.Array]


def initial_state(section: Guard) -> GuardState | None:
    """A guard that has seen nothing; None where no update is ever left out."""
    if not section.skip_step_on_spikes:
        return None
    return _nothing_seen(section.skip_step_interval)


def _nothing_seen(window: int) -> GuardState:
    return GuardState(
        values_QW=jnp.zeros((_QUANTITIES, window), jnp.float32),
        num_sound=jnp.int32(0),
        num_skipped=jnp.int32(0),
        last_skipped=jnp.int32(-1),
        skipped_W=jnp.zeros(window, bool),
        lowest_loss=jnp.float32(jnp.inf),
        calm_step=jnp.int32(0),
    )


def judge(
    section: Guard,
    state: GuardState,
    step: jax.Array,
    *,
    loss: jax.Array,
    grad_norm: jax.Array,
    update_norm: jax.Array,
    learning_rate: jax.Array,
) -> Verdict:
    """Judges one update, before it is applied.

    Args:
      section: the keys about it.
      state: after the updates before.
      step: int32, the update, from 0.
      loss: what is minimised.
      grad_norm: of the gradient as it was computed, not clipped.
      update_norm: of what would be added to the parameters.
      learning_rate: of the update. Where it is 0, the update says nothing.
    """
    window = section.skip_step_interval
    rate = jnp.where(learning_rate > 0, learning_rate, 1.0)
    values_Q = jnp.stack([loss, grad_norm, update_norm / rate]).astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(values_Q))

    count = jnp.minimum(state.num_sound, window)
    median_Q = _median(state.values_QW, count)
    distance_QW = jnp.abs(state.values_QW - median_Q[:, None])
    least_Q = jnp.array(_LEAST_DEVIATION_Q, jnp.float32) * jnp.abs(median_Q).at[0].max(_SMALL_LOSS)
    deviation_Q = jnp.maximum(_SIGMA * _median(distance_QW, count), least_Q)
    is_outlier = jnp.any(values_Q > median_Q + section.skip_step_scaling_factor * deviation_Q)
    # A quarter of the window says what is usual; before that only an exploding loss is caught.
    early_bound = median_Q[0] + jnp.maximum(jnp.abs(median_Q[0]), _EARLY_LOSS_RISE)
    explodes = (count > 0) & (values_Q[0] > early_bound)
    sound = finite & ~jnp.where(count >= window // 4, is_outlier, explodes)

    place = state.num_sound % window
    values_QW = jnp.where(sound, state.values_QW.at[:, place].set(values_Q), state.values_QW)
    num_sound = state.num_sound + sound
    skipped_W = state.skipped_W.at[step % window].set(~sound)

    loss_median = _median(values_QW[:1], jnp.minimum(num_sound, window))[0]
    is_lowest = (num_sound >= window) & (loss_median < state.lowest_loss)
    lowest_loss = jnp.where(is_lowest, loss_median, state.lowest_loss)
    above = (loss_median - lowest_loss) / jnp.maximum(jnp.abs(lowest_loss), _SMALL_LOSS)
    rise = jnp.where(jnp.isfinite(lowest_loss), above, 0.0)
    calm_step = jnp.where(rise <= section.rewind_on_rise / 4, step, state.calm_step)

    new = GuardState(
        values_QW=values_QW,
        num_sound=num_sound,
        num_skipped=state.num_skipped + ~sound,
        last_skipped=jnp.where(sound, state.last_skipped, step),
        skipped_W=skipped_W,
        lowest_loss=lowest_loss,
        calm_step=calm_step,
    )
    metrics = {
        "skipped": (~sound).astype(jnp.int32),
        "num_skipped": new.num_skipped,
        "last_skipped": new.last_skipped,
        "recent_skips": jnp.sum(skipped_W),
        "skips_began": _stretch_of_skips(skipped_W, step, section.rewind_after_skips),
        "loss_rise": rise,
        # What the median was made of when it was last calm.
        "rise_began": jnp.maximum(calm_step - window, 0),
    }
    return Verdict(sound, new, metrics)


def _stretch_of_skips(skipped_W: jax.Array, step: jax.Array, limit: int) -> jax.Array:
    """First step of the stretch of skips that leads up to `step`; -1 without any skip.

    The stretch is the suffix of the window in which skips exceed the tolerated rate, `limit` of W,
    by the most (a cumulative sum test; Page 1954). An isolated skip long before is not part of it.
    """
    window = skipped_W.shape[0]
    ages_W = jnp.arange(window)
    by_age_W = skipped_W[(step - ages_W) % window]
    excess_W = jnp.cumsum(jnp.where(by_age_W, window - limit, -limit))
    excess_W = jnp.where(by_age_W, excess_W, jnp.iinfo(jnp.int32).min)
    oldest = jnp.max(jnp.where(excess_W == excess_W.max(), ages_W, 0))
    return jnp.where(by_age_W.any(), step - oldest, -1)


def _median(values_QW: jax.Array, count: jax.Array) -> jax.Array:
    """Over the first `count` places of each row; the mean of the two middle ones."""
    filled_QW = jnp.where(jnp.arange(values_QW.shape[1]) < count, values_QW, jnp.inf)
    sorted_QW = jnp.sort(filled_QW, axis=1)
    lower, upper = jnp.maximum((count - 1) // 2, 0), count // 2
    median_Q = (sorted_QW[:, lower] + sorted_QW[:, upper]) / 2
    return jnp.where(count > 0, median_Q, 0.0)
