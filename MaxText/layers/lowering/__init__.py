"""Workarounds for compilers: one function for each, with what it was measured to save.

None of these functions changes a result, except for rounding where its docstring says so. Each
expresses a computation in the form that XLA for one backend compiles well: a barrier that keeps the
compiler from postponing or repeating an operation, a gradient of its own that avoids a large
temporary array, a cast or a layout in another place. Without them the model and the train step
compute the same values, with more time or memory.

A docstring here states the backend, what the compiler does otherwise, and the measurement. When a
new version of XLA or JAX makes a workaround unnecessary, its function is the one to delete.
"""
