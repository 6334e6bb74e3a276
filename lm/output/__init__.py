"""The output layer: a softmax over N words as a tree of softmaxes, for any PyTorch model.

It requires torch alone. `HierarchicalSoftmax` is the module, `hierarchical_cross_entropy` the loss
function, `ClassTree` the shape of the tree. The loss costs a word's path, about 2√N columns with √N
classes, instead of N. Sampling and its restrictions are exact.
"""

from lm.output.decoding.draws import Sampling
from lm.output.functional import hierarchical_cross_entropy
from lm.output.layer import HierarchicalSoftmax
from lm.output.tree.class_tree import ClassTree

__all__ = ["ClassTree", "HierarchicalSoftmax", "Sampling", "hierarchical_cross_entropy"]
