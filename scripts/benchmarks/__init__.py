"""Everything that measures.

Each benchmark is run as `python -m scripts.benchmarks.NAME` from the top folder; `--help` describes
it. `methods`, `peers`, `measure` and `table` belong to `output_layer`, `scale_*` to `scale`;
`reporting` is shared by all.
"""

from lm.openmp import limit_spinning

limit_spinning()  # before a benchmark imports torch
