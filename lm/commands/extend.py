"""`lm extend`: the items of newer data in a trained run, without training."""

import argparse
import logging

from lm.commands.arguments import COMPUTING, RUN, Options
from lm.run import Run, TrainedRun

HELP = "add the new items of newer data to a trained run, without training"
OPTIONS: Options = {"source": RUN["run_dir"]} | COMPUTING
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Write the run; print its folder."""
    config = Run.read(options.source, options.overrides).config
    trained = TrainedRun.open(options.source, device=options.device, threads=options.threads)
    from lm.extension import extend

    added = extend(trained, config)
    _log.info("%d new items, %d in all", added.new, added.items)
    print(config.run_path)
