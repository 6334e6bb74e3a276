"""Gradients of visited rows, and lookups and optimizers that touch nothing else."""

from lm.output.rowwise.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD
from lm.output.rowwise.row_gradient import RowGradient, lookup

__all__ = ["RowAdagrad", "RowAdam", "RowGradient", "RowOptimizer", "RowSGD", "lookup"]
