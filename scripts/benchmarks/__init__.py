"""Everything that measures.

Each benchmark is run as `python -m scripts.benchmarks.NAME` from the top folder; `--help` describes
it. `methods`, `peers`, `measure` and `reporting` are what they share.
"""

from lm import limit_spinning

limit_spinning()  # before a benchmark imports torch
