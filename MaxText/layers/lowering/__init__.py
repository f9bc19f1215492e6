"""Workarounds for one compiler or backend, each behind a function that says what it computes.

The modules of layers state mathematics. Where XLA, cuDNN or a TPU needs the same result spelled in
a particular way to be fast or to fit in memory, the spelling lives here: one function per trick.
Its docstring says what it works around, on which backend, and what was measured. Every function
returns what its plain form returns, up to the order in which floating-point numbers are added, and
does the plain thing on backends that do not need it. A trick that a compiler no longer needs can be
deleted by replacing its calls with the plain form.
"""
