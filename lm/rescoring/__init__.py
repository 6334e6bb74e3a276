"""Rescoring of n-best lists and lattices.

`formats` tells files apart; `nbest`, `lattice` and `references` read them, `utterances` all of a
file. `models` score their words, `weights` chooses from lists, `lattice_search` searches
lattices, and `word_errors` compares with references.
"""
