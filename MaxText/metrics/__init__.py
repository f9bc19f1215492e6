"""Events of a run, and where they go: files, TensorBoard, W&B, the terminal."""

import sys

from MaxText import CallableModule

# `MaxText.metrics(run)` is a call: the package's attribute of that name is this folder.
sys.modules[__name__].__class__ = CallableModule
