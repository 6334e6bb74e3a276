"""Training a run of a table and writing its log, or comparing it with its log."""

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import NotFiniteError, UserError
from lm.evaluation import evaluate_split
from lm.figures import as_json, perplexity
from lm.run import Run as TrainingRun
from lm.run import TrainedRun
from lm.scoring.comparison import sums_of_lines
from lm.scoring.frequency import frequency_report
from lm.scoring.mixture import token_log_probs
from lm.scoring.ngram import NGramModel
from lm.training.loop import train
from lm.training.metrics import Metrics, read_metrics
from lm.training.run_folder import check_folder
from scripts.benchmarks.kneser_ney import write_model
from scripts.benchmarks.reporting import commit
from scripts.reproduction.runs import TOP, Run, Validation
from scripts.reproduction.search_tables import Lines


def train_run(run: Run, data_dir: str, runs: Path, *, progress: bool) -> None:
    """Train or resume a run in a folder of `runs`, evaluate it and write its log."""
    log = train_and_validate(run, data_dir, runs, progress=progress)
    opened = TrainedRun.open(runs / run.table / run.name)
    settings = {"progress": progress, "open_vocabulary": run.open_vocabulary}
    test = evaluate_split(opened, "test", **settings).to_dict()
    run.write(log | {"test": test})


def train_and_validate(run: Run, data_dir: str, runs: Path, *, progress: bool) -> dict[str, Any]:
    """Train or resume a run in a folder of `runs`.

    Returns the content of its log, without test figures. A run that diverges ends there. Seconds of
    the processor are those of this process, and unknown if an earlier one trained a part.
    """
    folder = runs / run.table / run.name
    diverged, start, resumes = None, time.process_time(), (folder / "metrics.csv").exists()
    try:
        _train(run, data_dir, folder, progress=progress)
    except NotFiniteError as error:
        diverged = str(error)
    cpu_seconds = None if resumes else time.process_time() - start
    metrics = read_metrics(folder / "metrics.csv")
    return {
        "command": run.command,
        "commit": commit(),
        "environment": json.loads((folder / "env.json").read_text()),
        "tokens": metrics[-1].tokens if metrics else 0,
        "seconds": metrics[-1].seconds if metrics else 0.0,
        "cpu_seconds": cpu_seconds,
        **({} if diverged is None else {"diverged": diverged}),
        "curve": _validations(metrics),
    }


def _validations(metrics: Iterable[Metrics]) -> list[Validation]:
    return [
        Validation(row.step, row.tokens, row.seconds, row.valid_perplexity)
        for row in metrics
        if row.valid_perplexity is not None
    ]


def nats_of_test(run: Run, runs: Path) -> tuple[dict[str, Any], Lines]:
    """The perplexity of a trained run on the test split, and the nats of each of its lines."""
    opened = TrainedRun.open(runs / run.table / run.name)
    tokens = opened.prepared.tokens("test")
    num_parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    figures, lines = _test_figures(opened, tokens, -token_log_probs(opened, tokens))
    return {"parameters": num_parameters} | figures, lines


def nats_of_ngrams(run: Run, runs: Path, order: int) -> tuple[dict[str, Any], Lines]:
    """Figures of the Kneser–Ney model of a trained run's data; its parameters are n-grams."""
    opened = TrainedRun.open(runs / run.table / run.name)
    tokens = opened.prepared.tokens("test")
    with tempfile.TemporaryDirectory() as folder:
        arpa = Path(folder) / "model.arpa"
        model = write_model(opened.prepared.folder, arpa, order)
        nll = -NGramModel(arpa, opened.tokenizer).log_prob(tokens)
    num_ngrams = sum(len(each.frequency) for each in model.orders)
    figures, lines = _test_figures(opened, tokens, nll)
    return {"parameters": num_ngrams} | figures, lines


def _test_figures(
    opened: TrainedRun, tokens: NDArray[Any], nll: NDArray[np.float64]
) -> tuple[dict[str, Any], Lines]:
    eos_id = opened.description.eos_id
    line_tokens = sums_of_lines(np.ones(len(tokens)), tokens, eos_id)
    figures = {
        "tokens": len(tokens),
        "perplexity": perplexity(float(nll.sum()), len(tokens)),
        "by_frequency": as_json(frequency_report(opened.prepared, tokens, nll)),
    }
    line_nats = sums_of_lines(nll, tokens, eos_id).astype(np.float64)
    return figures, Lines(line_tokens.astype(np.int64), line_nats)


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
    now, logged = measured[0], run.curve[0]
    perplexity, expected = now.valid_perplexity, logged.valid_perplexity
    result = f"{run.row}, seed {run.seed}: {perplexity:.2f} after {now.step} steps"
    if logged.step != now.step:
        return f"{result}; the log's first validation is after {logged.step}"
    if perplexity == expected:
        return f"{result}, equal to the log in every digit"
    return f"{result}, {expected:.2f} in the log ({perplexity / expected - 1:+.1%})"


def _train(
    run: Run, data_dir: str, folder: Path, *, progress: bool, stop_after_validation: bool = False
) -> None:
    """Prepare the corpus if necessary, then train or resume."""
    folders = [f"--data.dir={data_dir}", f"--run_dir={folder}"]
    opened = TrainingRun.read(TOP / run.config, [*run.options, *folders])
    resumes = check_folder(opened.config, "auto") is not None
    opened = opened.prepare(keep=resumes, progress=progress)
    train(opened, resume="auto", progress=progress, stop_after_validation=stop_after_validation)
