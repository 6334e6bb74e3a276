"""Trees of softmaxes: the data structure and its shapes."""
