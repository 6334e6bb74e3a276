"""Training: one loop on Lightning Fabric, and what it reads and writes.

A step is in `loop`: it reads `batches`, computes the loss and the state carried between them by
`carried_loss`, clips and updates by `optimizers`, and is recorded by `cuda_graph` on a GPU. `state`
has all that a run continues from; `contents` gathers it, from all devices, and `checkpoint` writes
it durably. `devices` configures Fabric, `signals` records SIGTERM and Ctrl-C, `clock` measures
time, and `progress` has what is done and the best figures, of `validation`. A run's folder is in
`run_folder`, its figures are in `metrics` and `loggers`, its memory is in `memory_estimate`.
"""
