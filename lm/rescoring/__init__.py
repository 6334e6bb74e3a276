"""Rescoring of n-best lists: `nbest` reads them, `weights` chooses from them."""
