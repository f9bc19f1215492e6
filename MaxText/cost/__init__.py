"""Cost of a training run: FLOPs, memory, time; ahead-of-time compilation."""
