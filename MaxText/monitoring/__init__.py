"""Events of a run and their sinks: files, TensorBoard, W&B, the terminal."""
