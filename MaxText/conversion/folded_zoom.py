"""A fixed zoom for layouts that have none: folded into the value slots where that is exact.

Pattention multiplies normalised scores by sqrt(zoom) (checkpointing/growth/zoom.py). TokenFormer's
PyTorch code takes the number of slots for it, always. Where the root is the last thing that happens
to the scores the value slots can carry the difference, because they are multiplied with the result.
With l2_norm_gelu the root is inside of gelu, and the norm takes out every factor of the keys.
"""

import math
from typing import get_args

import numpy as np

from MaxText.checkpointing.growth.plan import by_place, place_of
from MaxText.configuration.catalogue import build, flat
from MaxText.configuration.layer_sections import SlotPlace
from MaxText.configuration.schema import Config
from MaxText.conversion.settings import find_family
from MaxText.conversion.weights import Weights
from MaxText.errors import UserError

# Values of normalize_type by what becomes of sqrt(zoom).
_LAST = ("gelu_l2_norm", "l2_norm")
_INSIDE = ("l2_norm_gelu",)
_NO_ZOOM = {"zoom_dim": 0.0} | {f"{place}_zoom_dim": -1.0 for place in get_args(SlotPlace)}


class FoldedWeights(Weights):
    """Weights whose value slots carry the zoom.

    Attributes:
      factors: parameter name -> what its numbers are multiplied by.
    """

    def __init__(self, weights: Weights, config: Config, factors: dict[str, float]):
        self.config, self.model, self.formats = config, weights.model, weights.formats
        self.factors, self._weights = factors, weights

    def read(self, ours: str) -> np.ndarray:
        """One array, all layers stacked; each product is rounded once."""
        stored = self._weights.read(ours)
        if ours not in self.factors:
            return stored
        product = stored.astype(np.float32)
        product *= np.float32(self.factors[ours])
        return product.astype(stored.dtype)


def fold(weights: Weights, asked: str) -> tuple[Weights, str]:
    """The same function by weights without a zoom, and a line that says so.

    Returns:
      The weights as they are and an empty line where no zoom is fixed, or no family would take them
      without it either.

    Raises:
      UserError: the zoom alone keeps the weights out of a family, and cannot be folded.
    """
    config = weights.config
    section, emb_dim = config.model.pattention, config.model.shape.dimensions.emb_dim
    ratios = {}
    for name in weights.model.parameters:
        place = place_of(name)
        if place and name.endswith("values/kernel"):
            ratios[name] = section.zoom(place, emb_dim) / section.num_slots(place, emb_dim)
    ratios = {name: ratio for name, ratio in ratios.items() if ratio != 1}
    if not ratios or section.normalize_type not in (*_LAST, *_INSIDE):
        return weights, ""
    without = build(flat(config) | _NO_ZOOM)
    try:
        family = find_family(without, asked)
    except UserError:
        return weights, ""  # the other differences are told with this one
    if section.normalize_type in _INSIDE:
        places = {
            name: f"zoom {section.zoom(place, emb_dim):g} for "
            f"{section.num_slots(place, emb_dim)} slots"
            for name in ratios
            if (place := place_of(name))
        }
        raise UserError(
            f"{family.architecture} scales scores by the number of slots, and its layout has no "
            f"zoom. This model has another scale: {by_place(places)}. With normalize_type="
            f"{section.normalize_type} no weights make up for it, so the folder would compute "
            "something else.\n  What can be exported: the model before it grew, one that grew with "
            "growth_mode=random, and any of normalize_type=gelu_l2_norm."
        )
    factors = {name: math.sqrt(ratio) for name, ratio in ratios.items()}
    words = by_place({name: f"{factor:.4g}" for name, factor in factors.items()})
    return FoldedWeights(weights, without, factors), (
        "The layout has no zoom: value slots are multiplied by sqrt(zoom / slots), which keeps "
        f"the function: {words}"
    )
