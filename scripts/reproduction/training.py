"""Training a run of a table and writing its log, or comparing it with its log."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from data_prep.errors import UserError
from lm.evaluation import evaluate_split
from lm.run import Run as TrainingRun
from lm.run import TrainedRun
from lm.training.loop import train
from lm.training.metrics import Metrics, draw_curves, read_metrics
from lm.training.run_folder import prepare_run
from scripts import TOP
from scripts.benchmarks.reporting import append_log, commit
from scripts.reproduction.runs import LOG, Run

Validation = tuple[int, int, float, float]
"""Step, tokens, seconds and perplexity of a validation."""


def train_run(run: Run, data_dir: str, runs: Path, *, progress: bool) -> None:
    """Train or resume a run in a folder of `runs`, evaluate it and write its log."""
    folder = runs / run.table / run.name
    _train(run, data_dir, folder, progress=progress)
    draw_curves(folder, run.name)
    metrics = read_metrics(folder / "metrics.csv")
    settings = {"progress": progress, "open_vocabulary": run.open_vocabulary}
    log = {
        "row": run.row,
        "seed": run.seed,
        "command": run.command,
        "commit": commit(),
        "environment": json.loads((folder / "env.json").read_bytes()),
        "tokens": metrics[-1].tokens,
        "seconds": metrics[-1].seconds,
        "curve": _validations(metrics),
        "test": evaluate_split(TrainedRun.open(folder), "test", **settings).to_dict(),
    }
    append_log(run.results / run.table / LOG, log)


def _validations(metrics: Iterable[Metrics]) -> list[Validation]:
    return [
        (row.step, row.tokens, row.seconds, row.valid_perplexity)
        for row in metrics
        if row.valid_perplexity is not None
    ]


def check_run(run: Run, data_dir: str, runs: Path, *, progress: bool) -> str:
    """Train a run up to its first validation; a line that compares it with the log."""
    if run.log is None:
        return f"{run.row}, seed {run.seed}: no log"
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs) as temporary:
        folder = Path(temporary) / "run"
        _train(run, data_dir, folder, progress=progress, stop_after_validation=True)
        measured = _validations(read_metrics(folder / "metrics.csv"))
    if not measured:
        raise UserError(f"{run.config}: {run.row} has no validation split")
    (step, *_, perplexity), (logged_step, *_, expected) = measured[0], run.log["curve"][0]
    result = f"{run.row}, seed {run.seed}: {perplexity:.2f} after {step} steps"
    if logged_step != step:
        return f"{result}; the log's first validation is after {logged_step}"
    if perplexity == expected:
        return f"{result}, equal to the log in every digit"
    return f"{result}, {expected:.2f} in the log ({perplexity / expected - 1:+.1%})"


def _train(
    run: Run, data_dir: str, folder: Path, *, progress: bool, stop_after_validation: bool = False
) -> None:
    """Prepare the corpus if necessary, then train or resume."""
    folders = [f"--data.dir={data_dir}", f"--run_dir={folder}"]
    opened = TrainingRun.read(TOP / run.config, [*run.options, *folders])
    opened = prepare_run(opened, "auto", progress=progress)
    train(opened, resume="auto", progress=progress, stop_after_validation=stop_after_validation)
