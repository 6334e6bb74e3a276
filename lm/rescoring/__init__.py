"""Rescoring of n-best lists.

`nbest` reads them, `models` score their words, `unknown` counts those that a model does not know,
and `weights` chooses from them.
"""
