"""Gradients of visited rows, and lookups and optimizers that touch only these rows."""

from lm.output.rowwise.factors import RowFactors
from lm.output.rowwise.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD
from lm.output.rowwise.row_gradient import RowGradient, lookup

__all__ = ["RowAdagrad", "RowAdam", "RowFactors", "RowGradient", "RowOptimizer", "RowSGD", "lookup"]
