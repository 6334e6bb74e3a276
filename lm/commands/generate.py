"""`lm generate`."""

import argparse

HELP = "generate"


def add_options(parser: argparse.ArgumentParser) -> None:
    """X."""
    from lm.commands.stub import add

    add(parser, "generate")


def run(options: argparse.Namespace) -> None:
    """X."""
    from lm.generation.command import run

    end = "" if "generate" == "generate" else None
    for x in run(options):
        print(x, end=end, flush=True)
