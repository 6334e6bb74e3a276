"""Train, evaluate and generate with language models of very large vocabularies."""

__version__ = "0.2.0"
