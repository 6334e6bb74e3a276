"""Word classes for the two-level softmax."""
