"""Training: one loop on Lightning Fabric, and what it reads and writes.

A step is in `loop`: it reads `batches`, computes the loss and the state carried between them in
`state`, clips and updates by `optimizers`, and is recorded by `cuda_graph` on a GPU. `state` has
all that a checkpoint contains, random numbers among them; `checkpoint` writes it durably. `devices`
configures Fabric, `shards` converts dealt tables for checkpoints, `signals` records SIGTERM and
Ctrl-C, `clock` measures time. A run's folder is in `run_folder`, its figures are in `metrics` and
`loggers`, and its memory is in `memory_estimate`.
"""
