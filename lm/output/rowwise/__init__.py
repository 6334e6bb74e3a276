"""Gradients of visited rows, and lookups and optimizers that touch only these rows."""

from lm.output.rowwise.blocks import Product, RowFactors, Rows
from lm.output.rowwise.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD
from lm.output.rowwise.row_gradient import RowGradient, lookup

__all__ = [
    "Product",
    "RowAdagrad",
    "RowAdam",
    "RowFactors",
    "RowGradient",
    "RowOptimizer",
    "RowSGD",
    "Rows",
    "lookup",
]
