"""Trees of softmaxes: the data structure and its shapes."""

from lm.output.tree.class_tree import ClassTree, TreeArrays

__all__ = ["ClassTree", "TreeArrays"]
