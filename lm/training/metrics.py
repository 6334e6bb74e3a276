"""The lines of `metrics.csv`: the figures of a run over its steps."""

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of `metrics.csv`.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the training split, with a fraction.
        tokens: tokens trained on so far, over all devices.
        learning_rate: learning rate of the last step.
        train_perplexity: exp of the mean nll of the tokens since the previous line.
        valid_perplexity: perplexity of the whole validation split; None where it was not measured.
        seconds: training time so far, without validation and checkpoints.
        tokens_per_second: tokens since the previous line over their training time.
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
    types = {field.name: int if field.type is int else float for field in fields(Metrics)}
    with open(path, newline="") as file:
        rows = [{name: row.get(name) for name in types} for row in csv.DictReader(file)]
    lines: list[dict[str, Any]] = [
        {name: types[name](value) if value else None for name, value in row.items()}
        for row in rows
        if all(value or name == "valid_perplexity" for name, value in row.items())
    ]
    return [Metrics(**line) for line in lines]
