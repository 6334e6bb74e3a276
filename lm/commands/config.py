"""`lm config`: the reference of the configuration."""

import argparse
from pathlib import Path

from lm.config.reference import describe_keys, write_reference

HELP = "type, default and meaning of the configuration's keys"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("key", metavar="KEY|SECTION", nargs="?", help="default: all keys")
    parser.add_argument(
        "--markdown", metavar="PAGE", type=Path, help="rewrite the tables of configs/README.md"
    )


def run(options: argparse.Namespace) -> None:
    """Print the reference, or rewrite the page."""
    if options.markdown:
        write_reference(options.markdown)
    else:
        print(describe_keys(options.key))
