"""Events of a run and their sinks: files, TensorBoard, W&B, the terminal."""

import sys

from MaxText import CallableModule

# Makes this package callable, because `MaxText.metrics(run)` is a public function.
sys.modules[__name__].__class__ = CallableModule
