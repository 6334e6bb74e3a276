"""The portable backend, in torch."""
