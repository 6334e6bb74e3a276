"""`lm config`: the reference of the configuration."""

import argparse

from lm.commands.arguments import Options
from lm.config.reference import describe_keys

HELP = "type, default and meaning of the configuration's keys"
OPTIONS: Options = {"key": {"metavar": "KEY|SECTION", "nargs": "?", "help": "default: all keys"}}


def run(options: argparse.Namespace) -> None:
    """Print the reference of a section or key, by default of everything."""
    print(describe_keys(options.key))
