"""Pre-trains language models in JAX.

The functions are those of MaxText/api.py, imported on first use: the programs import this package,
and a mistyped key has to be refused before jax is loaded. `MaxText.train` and `MaxText.arena` are
functions, also where something has imported the programs MaxText/train.py and MaxText/arena.py.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from MaxText.api import (
        Config,
        Hook,
        Run,
        StepInfo,
        UserError,
        arena,
        batches,
        hook,
        load,
        load_config,
        metrics,
        train,
    )

__all__ = [
    "Config",
    "Hook",
    "Run",
    "StepInfo",
    "UserError",
    "arena",
    "batches",
    "hook",
    "load",
    "load_config",
    "metrics",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("MaxText.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """Importing a submodule sets it as an attribute of its package: not over a function above."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
