"""`lm export`: a trained model as files that need nothing of this package."""

import argparse
from pathlib import Path

from lm.commands.arguments import RUN, SWITCH, Options, open_run

HELP = "a trained model with a script of 150 lines that computes it without this package"
OPTIONS: Options = RUN | {
    "folder": {"metavar": "DIR", "help": "new folder to write"},
    "--bf16": SWITCH | {"help": "round weights to bf16"},
}


def run(options: argparse.Namespace) -> None:
    """Write the folder; print it."""
    from lm.export import export

    options.device, options.threads = "cpu", None
    export(open_run(options), Path(options.folder), bf16=options.bf16)
    print(options.folder)
