"""Everything that measures: each module is run as `python -m scripts.benchmarks.NAME` from the top
folder, and `--help` describes it.
"""
