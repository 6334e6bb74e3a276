"""The verbs of the command `lm`, one file each, and what they share.

A verb's file has `HELP`, one line; `OPTIONS`, of which at most one of `EXCLUSIVE` can be given, if
it has that; and `run(options)`, which prints the result on stdout and raises `UserError` for a
mistake of the user's. It imports heavy libraries inside `run` only, because every verb is imported
for `--help`.
"""
