"""The lines of `metrics.csv`: the figures of a run over its steps."""

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of `metrics.csv`."""

    step: int  # optimizer steps done
    epoch: float  # passes over the training split, with a fraction
    tokens: int  # trained on so far, over all devices
    learning_rate: float  # of the last step
    train_perplexity: float  # exp of the mean nll of the tokens since the previous line
    valid_perplexity: float | None  # of the whole validation split; None where it was not measured
    seconds: float  # training time so far, without validation and checkpoints
    tokens_per_second: float  # tokens since the previous line over their training time


def read_metrics(path: Path) -> list[Metrics]:
    """Read the complete lines of a `metrics.csv`; none if there is no file.

    Raises:
        UserError: if a line is not one of figures.
    """
    if not path.exists():
        return []
    types = {field.name: int if field.type is int else float for field in fields(Metrics)}
    lines = []
    with open(path, newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                if all(row.get(name) or name == "valid_perplexity" for name in types):
                    values: Any = {n: types[n](row[n]) if row[n] else None for n in types}
                    lines.append(Metrics(**values))
        except (ValueError, csv.Error) as error:
            raise UserError(
                f"{path}, line {reader.line_num}, is damaged ({error}): delete it to continue"
            ) from error
    return lines
