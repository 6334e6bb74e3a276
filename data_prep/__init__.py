"""Text → tokens → classes: everything that happens before a model sees a token.

Imports neither `lm` nor torch.
"""
