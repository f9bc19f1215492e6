"""Pre-trains language models in JAX.

Attributes are imported on first use: the programs import this package, and a mistyped key has to be
refused before jax is loaded.
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from MaxText.api import (
        Hook,
        Run,
        StepInfo,
        UserError,
        batches,
        hook,
        load,
        load_config,
        metrics,
        train,
    )

__all__ = [
    "Hook",
    "Run",
    "StepInfo",
    "UserError",
    "batches",
    "hook",
    "load",
    "load_config",
    "metrics",
    "train",
]


class CallableModule(types.ModuleType):
    """A module callable as its function in api.py: `train`, `metrics`."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        function = getattr(importlib.import_module("MaxText.api"), self.__name__.rpartition(".")[2])
        return function(*arguments, **keywords)


def __getattr__(name: str) -> Any:
    if name in ("train", "metrics"):  # the modules of these names, which are callable
        return importlib.import_module(f"MaxText.{name}")
    if name in __all__:
        return getattr(importlib.import_module("MaxText.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
