"""Pre-trains language models in JAX.

The functions are those of MaxText/api.py, imported on first use: the programs import this package,
and a mistyped key has to be refused before jax is loaded. MaxText/train.py is a program, which no
module imports: `MaxText.train` is the function.
"""

import importlib
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("MaxText.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
