"""What a tree of softmaxes costs, computed from its shape, and trees chosen by it."""
