"""`lm new`: a recipe for a text of the user's."""

import argparse
from pathlib import Path

HELP = "write a recipe for your own text"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file to write")
    parser.add_argument("--text", metavar="FILE", required=True, help="training text, one file")
    for split, name in (("valid", "validation"), ("test", "test")):
        text = f"{name} text (default: taken from the text)"
        parser.add_argument(f"--{split}", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--split-by", choices=("lines", "documents"), help="documents: between empty lines"
    )


def run(options: argparse.Namespace) -> None:
    """Write the recipe and the splits; print what was chosen."""
    from lm.recipe import new_recipe

    text, valid, test = Path(options.text), options.valid, options.test
    print(new_recipe(Path(options.config), text, valid=valid, test=test, unit=options.split_by))
