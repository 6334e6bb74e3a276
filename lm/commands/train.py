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
    from lm.training.metrics import draw_curves
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
    num_steps = train(run, resume=resume, progress=progress)
    if num_steps is not None:
        draw_curves(run.folder, run.config.name)
        _report(run, num_steps)
        print(run.folder)


def _report(run: Run, num_steps: int) -> None:
    """Say which model the folder has, and what may be done with it."""
    from lm.figures import ITEM, perplexity_rule, token_unit
    from lm.model.files import read_description
    from lm.training.batches import make_batches
    from lm.training.validation import RANKED_USERS, K

    description, figure = read_description(run.folder), "no validation split"
    if description.valid_perplexity is not None:
        is_independent = run.prepared.is_independent
        rule = perplexity_rule(ITEM if is_independent else token_unit(run.config.tokenizer))
        perplexity = f"perplexity {description.valid_perplexity:,.2f}"
        figure = f"validation {perplexity}, {rule}"
        if description.valid_ndcg is not None:
            valid = run.prepared.sequences("valid", items_alone=True)
            num_users = int((valid.num_targets > 0).sum())
            users = f"{min(num_users, RANKED_USERS):,} of {num_users:,} users"
            ndcg = f"NDCG@{K} of {users} {description.valid_ndcg:.4f}"
            figure = f"validation {perplexity} ({ndcg}), {rule}"
            if run.config.criterion == "ndcg":
                figure = f"validation {ndcg} ({perplexity}, {rule})"
    where = f"{run.folder} has the model of step {description.step:,} of {num_steps:,}"
    planned = make_batches(run.config, run.prepared).num_steps or 0
    if planned > num_steps:
        where += f" ({planned:,} planned)"
    _log.info("%s: %s", where, figure)
    split = next(name for name in ("test", "valid", "train") if name in run.prepared.splits)
    ranking = " --ranking" * run.prepared.is_independent
    _log.info("next: lm evaluate %s --split %s%s", run.folder, split, ranking)
