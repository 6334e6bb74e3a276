"""The lines of `metrics.csv`: the figures of a run over its steps."""

import csv
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of `metrics.csv`.

    Attributes:
        step: Optimizer steps done.
        epoch: Passes over the training split, with a fraction.
        tokens: Tokens trained on so far, over all devices.
        learning_rate: Learning rate of the last step.
        train_perplexity: exp of the mean nll of the tokens since the previous line.
        valid_perplexity: Perplexity of the whole validation split; None where it was not measured.
        seconds: Training time so far, without validation and checkpoints.
        tokens_per_second: Tokens since the previous line over their training time.
    """

    step: int
    epoch: float
    tokens: int
    learning_rate: float
    train_perplexity: float
    valid_perplexity: float | None
    seconds: float
    tokens_per_second: float


def read_metrics(path: Path) -> list[Metrics]:
    """Read the complete lines of a `metrics.csv`; none if there is no file."""
    if not path.exists():
        return []
    optional = "valid_perplexity"
    names = [field.name for field in fields(Metrics) if field.name != optional]
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row.get(name) for name in names)]
    return [
        Metrics(
            step=int(row["step"]),
            epoch=float(row["epoch"]),
            tokens=int(row["tokens"]),
            learning_rate=float(row["learning_rate"]),
            train_perplexity=float(row["train_perplexity"]),
            valid_perplexity=float(row[optional]) if row[optional] else None,
            seconds=float(row["seconds"]),
            tokens_per_second=float(row["tokens_per_second"]),
        )
        for row in rows
    ]
