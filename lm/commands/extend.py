"""`lm extend`: the items of newer data in a trained run, without training."""

import argparse

from lm.commands.arguments import COMPUTING, NO_PROGRESS, Options
from lm.run import Run, TrainedRun

HELP = "add the new items of newer data to a trained run, without training"
_RUN: Options = {
    "source": {
        "metavar": "RUN",
        "help": "folder of the run; --run_dir=FOLDER is the new one, --data.files.train=FILE the"
        " newer data, with all events so far",
    }
}
OPTIONS = _RUN | COMPUTING | NO_PROGRESS


def run(options: argparse.Namespace) -> None:
    """Write the run; print its folder."""
    config = Run.read(options.source, options.overrides).config
    trained = TrainedRun.open(options.source, device=options.device, threads=options.threads)
    from lm.extension import extend

    extend(trained, config, progress=not options.no_progress)
    print(config.run_path)
