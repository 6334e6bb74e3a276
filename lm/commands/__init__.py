"""The verbs of the command `lm`, one file each: its help, its options and its function.

A file has `HELP`, one line; `add_options(parser)`; and `run(options)`, which prints the result on
stdout. It imports heavy libraries inside `run` only, because every verb is imported for `--help`.
"""
