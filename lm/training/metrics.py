"""metrics.csv: the figures of a training over its steps, a line at a time."""

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from data_prep.storage import write_atomically


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the training split, with a fraction.
        tokens: trained on so far.
        learning_rate: of the last step.
        train_perplexity: exp of the mean nll over the tokens since the line before.
        valid_perplexity: of the whole validation split; None where it was not measured.
        seconds: spent training so far, validation and checkpoints left out.
        tokens_per_second: since the line before.
    """

    step: int
    epoch: float
    tokens: int
    learning_rate: float
    train_perplexity: float
    valid_perplexity: float | None
    seconds: float
    tokens_per_second: float


_NAMES = [field.name for field in fields(Metrics)]


class MetricsFile:
    """Appends to metrics.csv.

    Args:
        path: the file.
        after_step: lines of later steps are removed first: a continuation writes them again.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line.step <= after_step]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, _NAMES)
        writer.writeheader()
        writer.writerows(asdict(line) for line in kept)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))

    def append(self, line: Metrics) -> None:
        """Write one line through to the file."""
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, _NAMES).writerow(asdict(line))


def read_metrics(path: Path) -> list[Metrics]:
    """The lines of a metrics.csv that are whole; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if all(row.get(name) for name in _NAMES if name != "valid_perplexity")
        ]
    return [
        Metrics(
            step=int(row["step"]),
            epoch=float(row["epoch"]),
            tokens=int(row["tokens"]),
            learning_rate=float(row["learning_rate"]),
            train_perplexity=float(row["train_perplexity"]),
            valid_perplexity=float(row["valid_perplexity"]) if row["valid_perplexity"] else None,
            seconds=float(row["seconds"]),
            tokens_per_second=float(row["tokens_per_second"]),
        )
        for row in rows
    ]
