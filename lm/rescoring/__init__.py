"""Rescoring of n-best lists and lattices.

`formats` tells files apart, `nbest`, `lattice` and `references` read them, `models` score their
words, `unknown` counts those that a model does not know, `weights` chooses from lists,
`lattice_search` searches lattices, and `word_errors` compares with references.
"""
