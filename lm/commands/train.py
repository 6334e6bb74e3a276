"""`lm train`: a trained model from a configuration."""

import argparse

from lm.commands.arguments import NO_PROGRESS, SOURCE, Options
from lm.run import Run

HELP = "train a model (prepares the data if needed)"
_RESUME: Options = {
    "--resume": {"metavar": "auto|PATH", "help": "continue the last checkpoint or that at PATH"}
}
OPTIONS = SOURCE | _RESUME | NO_PROGRESS


def run(options: argparse.Namespace) -> None:
    """Train; print the folder of the run."""
    run, progress = Run.read(options.source, options.overrides), not options.no_progress
    # Imported after the configuration is known to be valid: torch takes seconds.
    from lm.training.devices import check_devices
    from lm.training.loggers import check_wandb
    from lm.training.loop import train
    from lm.training.run_folder import check_folder

    # Before the preparation, which can take hours.
    check_wandb(run.config)
    check_devices(run)
    checkpoint = check_folder(run.config, options.resume)
    run.prepare(keep=checkpoint is not None, progress=progress)
    if train(run, resume=options.resume, progress=progress):
        print(run.folder)
