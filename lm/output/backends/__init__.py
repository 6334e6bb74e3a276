"""Implementations of the output layer."""
