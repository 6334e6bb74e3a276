"""Rescoring of n-best lists: `nbest` reads them, `weights` chooses, `command` is `lm rescore`."""
