"""`lm train`: a trained model from a configuration."""

import argparse
import logging

from lm.commands.arguments import NO_PROGRESS, SOURCE, Options
from lm.run import Run, TrainedRun

HELP = "train a model (prepares the data if needed)"
_RESUME: Options = {
    "--resume": {"metavar": "auto|PATH", "help": "continue the last checkpoint or that at PATH"}
}
_INIT: Options = {
    "--init-from": {
        "metavar": "RUN",
        "help": "begin a new run with the weights, words and classes of RUN, and new words",
    }
}
OPTIONS = SOURCE | _RESUME | _INIT | NO_PROGRESS
_SGD_TRANSFORMER = (
    "a Transformer trains poorly with optim.optimizer: sgd; add --optim.optimizer=adamw"
    " --optim.lr=0.001 --optim.clip=1 --optim.weight_decay=0.1 --optim.warmup_steps=400, or write"
    " the recipe with lm new --model.backbone=transformer"
)
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Train; print the folder of the run."""
    run, progress = Run.read(options.source, options.overrides), not options.no_progress
    if run.config.model.backbone == "transformer" and run.config.optim.optimizer == "sgd":
        _log.warning(_SGD_TRANSFORMER)
    # Imported after the configuration is known to be valid: torch takes seconds.
    from lm.training.devices import check_devices
    from lm.training.loggers import check_wandb
    from lm.training.loop import train
    from lm.training.run_folder import prepare_run

    # Before the preparation, which can take hours.
    check_wandb(run.config)
    check_devices(run)
    resume = options.resume
    if options.init_from is None:
        run = prepare_run(run, resume, progress=progress)
    else:
        from lm.extension import begin_from

        trained = TrainedRun.open(options.init_from, threads=run.config.train.threads)
        run = begin_from(trained, run, resume, progress=progress)
        resume = resume or "auto"  # the checkpoint that it begins with
    if train(run, resume=resume, progress=progress):
        print(run.folder)
