"""Language models with very large vocabularies: train, evaluate, score and generate from one config
file.
"""

__version__ = "0.1.0"
