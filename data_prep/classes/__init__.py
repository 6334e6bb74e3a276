"""Word classes for the two-level softmax, and classes of classes."""
