"""Benchmarks: each module measures one thing, run as `python -m scripts.benchmarks.NAME`."""

from lm.openmp import limit_spinning

limit_spinning()  # before a benchmark imports torch
