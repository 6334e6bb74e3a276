"""The output layer: a softmax as a tree of classes. Needs torch alone and may be used in any
model.
"""

from lm.output.functional import hierarchical_cross_entropy
from lm.output.layer import HierarchicalSoftmax
from lm.output.tree.class_tree import ClassTree

__all__ = ["ClassTree", "HierarchicalSoftmax", "hierarchical_cross_entropy"]
