"""Accelerators: memory, bandwidth and peak FLOP/s of each chip."""
