"""Hooks: functions that a run calls after its steps.

The loop's own periodic actions are hooks, and users add theirs::

    from MaxText.run.hooks import StepInfo, hook

    @hook(every=100)
    def print_embedding_norm(info: StepInfo) -> None:
        print(info.step, jnp.linalg.norm(info.params["token_embedder"]["embedding"]))

`mt.train(config, hooks=[print_embedding_norm])` calls it from Python. A run of train.py calls it if
`import_modules` names its file and `hooks` its name.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from MaxText.errors import UserError, first_line, raising_line

if TYPE_CHECKING:  # this module is imported by files of users, before a program's own imports
    from MaxText.config.schema import Config
    from MaxText.layers.assembly.model import Model
    from MaxText.layers.params import Params
    from MaxText.training.state import TrainState

KEY = "hooks"  # the configuration key with names of hooks

# Names of the loop's own hooks.
SNAPSHOT = "snapshot"
GRADIENT_CHECK = "gradient_check"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
BUILT_IN = (GRADIENT_CHECK, EVALUATION, SNAPSHOT, CHECKPOINT)


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """A run right after a step, as a hook sees it.

    Attributes:
      step: The step that was just completed, from 0.
      state: The train state after it: `step`, `params` and `opt_state`. The arrays are sharded over
        the devices. The next step overwrites them, so copy what has to outlive the call, for
        example with `jax.device_get`.
      config: The configuration of the run.
      model: The model. `info.model.merge(info.params)` is an nnx module that can be called.
      run_folder: The folder of the run, local or in a bucket.
      device_metrics: The scalars of the step, possibly still being computed; see `metrics`.
    """

    step: int
    state: "TrainState"
    config: "Config"
    model: "Model"
    run_folder: epath.Path
    device_metrics: Mapping[str, jax.Array] = dataclasses.field(repr=False)

    @property
    def params(self) -> "Params":
        """The parameters after the step: a nested dict of arrays."""
        return self.state.params

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The scalars of this step, such as "loss", "grad_norm" and "learning_rate".

        Reading them blocks until the devices have completed the step.
        """
        from MaxText.training.metric_names import as_scalars

        return as_scalars(jax.device_get(dict(self.device_metrics)))


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function that a run calls after some of its steps.

    Attributes:
      function: Gets a `StepInfo`. Every process of the run calls it, so it may compute with sharded
        arrays; let only `jax.process_index() == 0` write files.
      every: Number of steps between calls. As with `eval_interval`, 100 means after steps 99, 199
        and so on (the first step is 0), and after the last step of the run.
      when: Gets a step and returns whether to call the hook after it. If given, `every` is unused.
      name: The name in messages and in the key `hooks`; by default that of the function.
    """

    function: Callable[[StepInfo], None]
    every: int = 1
    when: Callable[[int], bool] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", name)
        if self.every < 1:
            raise UserError(f"hook {self.name}: every={self.every} must be 1 or more")

    def __call__(self, info: StepInfo) -> None:
        self.function(info)

    def is_due(self, step: int, last_step: int) -> bool:
        """Returns whether to call the hook after `step` of a run that ends with `last_step`."""
        if self.when is not None:
            return self.when(step)
        return (step + 1) % self.every == 0 or step == last_step


_registered: dict[str, Hook] = {}


def hook(*, every: int = 1, name: str = "") -> Callable[[Callable[[StepInfo], None]], Hook]:
    """Makes a hook of the decorated function, and registers it for the key `hooks`.

    Args:
      every: Number of steps between calls; see `Hook`.
      name: The name in `hooks`, by default that of the function.

    Raises:
      UserError: If another module has registered the name, or if `every` is less than 1.
    """

    def decorate(function: Callable[[StepInfo], None]) -> Hook:
        new_hook = Hook(function, every=every, name=name)
        registered = _registered.get(new_hook.name)
        # The same module again: a changed file, or a cell of a notebook.
        if registered is not None and registered.function.__module__ != function.__module__:
            raise UserError(
                f"hook {new_hook.name}: the name is taken by {_file_of(registered.function)}. Give "
                "one of them another name: @hook(name=...)"
            )
        _registered[new_hook.name] = new_hook
        return new_hook

    return decorate


def user_hooks(
    names: Sequence[str], hooks: Sequence[Hook | Callable[[StepInfo], None]] = ()
) -> list[Hook]:
    """Returns the hooks of a run's user, each with a name of its own.

    Args:
      names: Registered hooks, those of the key `hooks`.
      hooks: More hooks, from Python. A plain function is called after every step.

    Raises:
      UserError: If no hook is registered under one of the names.
    """
    selected: list[Hook] = []
    for name in names:
        if name not in _registered:
            registered_names = ", ".join(sorted(_registered)) or "none"
            raise UserError(
                f"{KEY}: no hook is called {name!r} (registered: {registered_names}). Name the "
                "file that registers it in import_modules, and decorate the function with "
                "@hook(every=...) of MaxText.run.hooks."
            )
        selected.append(_registered[name])
    for given_hook in hooks:
        selected.append(given_hook if isinstance(given_hook, Hook) else Hook(given_hook))
    unique: dict[str, Hook] = {}
    for user_hook in selected:
        name = user_hook.name
        number = 1
        while name in unique or name in BUILT_IN:  # several lambdas, for example
            number += 1
            name = f"{user_hook.name}_{number}"
        unique[name] = dataclasses.replace(user_hook, name=name)
    return list(unique.values())


def call_user_hook(user_hook: Hook, info: StepInfo) -> None:
    """Calls a hook of the user.

    Raises:
      UserError: If it fails; names the hook, the step, the error and its line.
    """
    try:
        user_hook(info)
    except Exception as error:  # a function of the user's can raise anything
        message = first_line(error, default=type(error).__name__)
        code = getattr(user_hook.function, "__code__", None)
        line = raising_line(error, "" if code is None else code.co_filename)
        raise UserError(
            f"hook {user_hook.name} failed after step {info.step}: {type(error).__name__}: "
            f"{message} ({line})"
        ) from error


def _file_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return function.__module__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"
