"""A corpus as a stream of lines."""
