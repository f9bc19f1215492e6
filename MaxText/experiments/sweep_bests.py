"""Best swept numbers of each arm of a comparison.

A warning says whether larger or smaller ones may be better. An arm is a configuration file with one
value of each swept key that is not a number. Its variants differ in swept numbers, such as the
learning rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config.serialization import flatten
from MaxText.config.values import to_yaml
from MaxText.experiments.variants import Variant


def best_of_arms(variants: Sequence[Variant], losses: Mapping[str, float]) -> list[str]:
    """Returns the label of each arm's best variant.

    `losses` are means by label.
    """
    arms = _arms(variants)
    bests = (_best(arm, losses) for arm in arms) if len(arms) < len(variants) else ()
    return [best.label for best in bests if best is not None]


def best_value_lines(variants: Sequence[Variant], losses: Mapping[str, float]) -> list[str]:
    """Names the best numbers of each arm.

    A best number at the edge of the tried ones gets a warning. Diverged variants count as tried.
    """
    lines = []
    for arm in _arms(variants):
        best = _best(arm, losses)
        if best is None:
            continue
        for name, value in _numbers(best).items():
            tried = sorted({_numbers(variant)[name] for variant in arm})
            if len(tried) == 1:
                continue
            line = f"{best.label} has the best {name} of {', '.join(map(to_yaml, tried))}"
            if value == tried[0]:
                line += ", the smallest: try smaller values before you conclude"
            elif value == tried[-1]:
                line += ", the largest: try larger values before you conclude"
            lines.append(f"{line}.")
    return lines


def _arms(variants: Sequence[Variant]) -> list[list[Variant]]:
    arms: dict[Any, list[Variant]] = {}
    for variant in variants:
        keys, numbers = flatten(variant.config), _numbers(variant)
        others = tuple(to_yaml(keys[name]) for name in variant.swept if name not in numbers)
        arms.setdefault((variant.source, variant.swept, others), []).append(variant)
    return list(arms.values())


def _best(arm: Sequence[Variant], losses: Mapping[str, float]) -> Variant | None:
    finished = [variant for variant in arm if variant.label in losses]
    return min(finished, key=lambda variant: losses[variant.label], default=None)


def _numbers(variant: Variant) -> dict[str, float]:
    keys = flatten(variant.config)
    return {name: keys[name] for name in variant.swept if type(keys[name]) in (int, float)}
