"""Learning rate as a function of the step."""

import optax

from MaxText.configuration.training_sections import Schedule


def learning_rate_schedule(section: Schedule) -> optax.Schedule:
    """Warm-up from 0, the body, then 0 after `learning_rate_schedule_steps`.

    The first update has learning rate 0 when there is a warm-up, as in MaxText. A constant body
    goes on for ever.
    """
    peak = section.learning_rate
    final = peak * section.learning_rate_final_fraction
    total = section.learning_rate_schedule_steps
    warmup = int(total * section.warmup_steps_fraction)
    body = total - warmup
    warm_up = optax.linear_schedule(0.0, peak, max(warmup, 1))
    if section.lr_schedule_type == "constant":
        return optax.join_schedules([warm_up, optax.constant_schedule(peak)], [warmup])
    # (schedule, length) in order; what follows the last is 0.
    pieces: list[tuple[optax.Schedule, int]] = [(warm_up, warmup)]
    if section.lr_schedule_type == "wsd":
        decay = min(int(total * section.wsd_decay_steps_fraction), body)
        pieces.append((optax.constant_schedule(peak), body - decay))
        pieces.append((optax.linear_schedule(peak, final, max(decay, 1)), decay))
    elif section.lr_schedule_type == "linear":
        pieces.append((optax.linear_schedule(peak, final, max(body, 1)), body))
    else:
        cosine = optax.cosine_decay_schedule(
            peak, max(body, 1), alpha=section.learning_rate_final_fraction
        )
        pieces.append((cosine, body))
    boundaries, schedules, end = [], [], 0
    for schedule, length in pieces:
        schedules.append(schedule)
        end += length
        boundaries.append(end)
    # The value at `total` is the body's last one; zero starts at the step after it.
    boundaries[-1] += 1
    return optax.join_schedules([*schedules, optax.constant_schedule(0.0)], boundaries)
