"""Schedules of learning rate and weight decay."""

import itertools

import jax.numpy as jnp
import optax

from MaxText.config.training_sections import ScheduleConfig


def learning_rate_schedule(config: ScheduleConfig) -> optax.Schedule:
    """Returns the learning rate as a function of the step: warm-up, body, then 0 or the last value.

    The warm-up is linear from 0, so that the first update has learning rate 0, as in MaxText. The
    body follows it, or with `learning_rate_decay.multiplies_warmup` starts at step 0 and is
    multiplied by it, as in GPT-Neo.

    Args:
      config: lr_schedule_type and its constants. Warm-up and body together last
        learning_rate_schedule_steps, except for a constant body, which has no end.
    """
    peak = config.learning_rate
    total = config.learning_rate_schedule_steps
    warmup = config.num_warmup_steps
    warm_up = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if config.lr_schedule_type == "constant":
        return optax.join_schedules([warm_up, optax.constant_schedule(peak)], [warmup])
    if config.learning_rate_decay.multiplies_warmup:
        body = _join(config, _body_segments(config, total), total)
        if warmup == 0:
            return body
        return lambda step: body(step) * jnp.minimum(step / warmup, 1.0)
    segments = [(warm_up, warmup), *_body_segments(config, total - warmup)]
    return _join(config, segments, total)


def weight_decay_schedule(config: ScheduleConfig) -> optax.Schedule | None:
    """Returns the factor of the weight decay as a function of the step; None if it is always 1.

    Args:
      config: weight_decay_schedule_type, its final value, and learning_rate_schedule_steps, from
        where on the factor is the final one.
    """
    final = config.weight_decay_final_fraction
    length = max(config.learning_rate_schedule_steps, 1)
    if config.weight_decay_schedule_type == "linear":
        return optax.linear_schedule(1.0, final, length)
    if config.weight_decay_schedule_type == "cosine":
        return optax.cosine_decay_schedule(1.0, length, alpha=final)
    return None


def _body_segments(config: ScheduleConfig, length: int) -> list[tuple[optax.Schedule, int]]:
    """Returns the schedules after the warm-up, each with its number of steps.

    Every schedule counts steps from its own start. "wsd" (Hu et al. 2024, MiniCPM) has two: a
    constant one, and the decay.

    Args:
      config: lr_schedule_type and its constants.
      length: Number of steps of all segments together.
    """
    peak = config.learning_rate
    fraction = config.learning_rate_final_fraction
    final = peak * fraction
    if config.lr_schedule_type == "wsd":
        total = config.learning_rate_schedule_steps
        decay_steps = min(int(total * config.wsd_decay_steps_fraction), length)
        return [
            (optax.constant_schedule(peak), length - decay_steps),
            (optax.linear_schedule(peak, final, max(decay_steps, 1)), decay_steps),
        ]
    if config.lr_schedule_type == "cosine":
        return [(optax.cosine_decay_schedule(peak, max(length, 1), alpha=fraction), length)]
    power = config.learning_rate_decay.power if config.lr_schedule_type == "polynomial" else 1.0
    return [(optax.polynomial_schedule(peak, final, power, max(length, 1)), length)]


def _join(
    config: ScheduleConfig, segments: list[tuple[optax.Schedule, int]], total: int
) -> optax.Schedule:
    """Returns consecutive schedules as one, which afterwards is 0 or stays at its last value.

    Args:
      config: `learning_rate_decay.after` says which.
      segments: Schedules, each with its number of steps.
      total: The last step of the schedule.
    """
    schedules, lengths = zip(*segments, strict=True)
    boundaries = list(itertools.accumulate(lengths))
    if config.learning_rate_decay.after == "final":
        return optax.join_schedules(schedules, boundaries[:-1])  # bodies stay at their last value
    boundaries[-1] = total + 1  # step `total` still has the body's last value
    return optax.join_schedules([*schedules, optax.constant_schedule(0.0)], boundaries)
