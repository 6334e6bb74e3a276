"""Training a run: the loop, its state, checkpoints, metrics."""
