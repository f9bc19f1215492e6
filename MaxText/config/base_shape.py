"""The value of `base_shape`: sizes of the model at which hyper-parameters were tuned."""

from collections.abc import Callable
from typing import Any, Self

from MaxText.config.layer_plan import hashable, values_by_key
from MaxText.config.values import InvalidValueError, TypedValue, UntypedValue, format_value, is_null


class BaseShape(tuple[tuple[str, Any], ...]):
    """Pairs of a key that sets a size and its value; a tuple, so that it can be hashed."""

    __slots__ = ()

    @classmethod
    def of(cls, sizes: Any) -> Self:
        """Builds it from pairs, or from a mapping such as a checkpoint records."""
        pairs = sizes.items() if isinstance(sizes, dict) else sizes
        return cls((name, hashable(value)) for name, value in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Returns {key: value}."""
        return dict(self)


def parse_base_shape(
    value: UntypedValue, convert: Callable[[str, UntypedValue], TypedValue]
) -> BaseShape:
    """Parses {key: value}.

    Args:
      value: What was typed.
      convert: (key, value) -> the value in the key's type. Raises KeyError for a key that is no
        size of the model, and InvalidValueError for a value of another type.

    Raises:
      InvalidValueError: all that is wrong.
    """
    if is_null(value) or value in ((), []):
        return BaseShape()
    if isinstance(value, BaseShape):
        return value
    if not isinstance(value, dict):
        raise InvalidValueError(f"{format_value(value)} is not {{key: value}}")
    sizes = []
    reasons = []
    for name, size in values_by_key(value):
        try:
            sizes.append((name, convert(name, size)))
        except KeyError:
            reasons.append(f"{name} is not a size of the model, such as base_emb_dim")
        except InvalidValueError as error:
            reasons.append(f"{name}: {error}")
    if reasons:
        raise InvalidValueError.of(reasons)
    return BaseShape.of(sizes)
