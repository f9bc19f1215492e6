"""Models put together from parts: blocks, stacks of layers, pipeline stages, the decoder."""
