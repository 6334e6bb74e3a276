"""Everything that measures.

Each benchmark is run as `python -m scripts.benchmarks.NAME` from the top folder; `--help` describes
it. `methods` and `peers` belong to `output_layer`; all use `measure` or `reporting`.
"""

from lm import limit_spinning

limit_spinning()  # before a benchmark imports torch
