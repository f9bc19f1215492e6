"""Compiled train steps: lowering, ahead-of-time compilation, saved executables, the cache."""
