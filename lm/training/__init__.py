"""Training: one loop on Lightning Fabric, and what it reads and writes.

`loop` is the whole training loop. `devices` configures Fabric, `batches` cuts a token file into
batches, `optimizers` builds the optimizer and the learning-rate schedule, `state` holds everything
that a checkpoint must contain, `checkpoint` reads and writes it, `signals` records SIGTERM and
Ctrl-C. A run's folder is in `run_folder`, its figures are in `metrics` and `loggers`, its
memory is in `memory_estimate`, and the computer it ran on is in `environment`.
"""
