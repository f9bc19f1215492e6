"""Any rule of optax by its own name."""

import inspect

import optax
import optax.contrib

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.errors import UserError
from MaxText.training.optimizers.parameter_trees import ParamSpecs

_PREFIX = "scale_by_"
# Functions of this name that are no rules for this chain: they are links of it, have another name
# here, own the learning rate, or need the loss.
_OTHER = (
    "learning_rate",
    "schedule",
    "backtracking_linesearch",
    "zoom_linesearch",
    "trust_ratio",
    "param_block_norm",
    "param_block_rms",
    "muon",
    "galore",
    "shape",
    "factored_rms",
    "lbfgs",
    "polyak",
    "cocob",
    "distance_over_gradients",
)
_REASONS = {
    "schedule_free": "it owns the learning rate, and its parameters in training are not those to "
    "evaluate and save",
    "prodigy": "it owns the learning rate",
    "sophia": "it needs a second gradient, of its estimate of the Hessian",
}
_REMEDIES = {"schedule_free": " parameter_average.type=ema averages the parameters as well."}


@register("optimizer", "optax")
def optax_rule(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """The rule `scale_by_<optax_name>` of optax or optax.contrib, with `optax_options`.

    Clipping, decoupled weight decay and the learning rate are those of every other optimizer.

    Args:
      config: optax_name and optax_options, which are optax's own names and defaults.
      parameters: Not read: every parameter is trained by the rule.

    Raises:
      UserError: optax has no such rule, or it has no such arguments.
    """
    name = config.optax_name.removeprefix(_PREFIX)
    family = next((family for family in _REASONS if name.startswith(family)), None)
    if family is not None:
        raise UserError(
            f"optax_name={config.optax_name} cannot be used: {_REASONS[family]}.\n"
            f"  What to do: choose one of {', '.join(_names())}.{_REMEDIES.get(family, '')}"
        )
    if name not in _names():
        raise UserError(
            f"optax_name={config.optax_name!r}: optax {optax.__version__} has no rule "
            f"{_PREFIX}{name or '<optax_name>'}.\n"
            f"  What to do: choose one of {', '.join(_names())}."
        )
    rule = getattr(optax, _PREFIX + name, None) or getattr(optax.contrib, _PREFIX + name)
    signature = inspect.signature(rule)
    options = dict(config.optax_options)
    try:
        signature.bind(**options)
        transform = rule(**options)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"optax_options={[list(pair) for pair in config.optax_options]} do not fit "
            f"optax's {rule.__name__}{signature}: {error}"
        ) from None
    return transform


def _names() -> list[str]:
    """Returns the values of optax_name."""
    functions = {*dir(optax), *dir(optax.contrib)}
    names = {name.removeprefix(_PREFIX) for name in functions if name.startswith(_PREFIX)}
    return sorted(names.difference(_OTHER))
