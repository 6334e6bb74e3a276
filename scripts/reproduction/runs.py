"""The training runs behind the tables of results, and their logs.

A run is `lm train` with a recipe and overrides, then `lm evaluate` on the test split. Its log is
TABLE/ROW-SEED.json in the folder of results: the command, the commit, the environment and the test
figures; TABLE/ROW-SEED.csv is its metrics.csv.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import UserError
from lm.training.metrics import Metrics, read_metrics

TOP = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).with_name("tables.yaml")
RESULTS = TOP / "scripts" / "results"


@dataclass(frozen=True)
class Run:
    """One training run of a table."""

    table: str
    row: str
    seed: int
    config: str  # recipe, relative to the top folder
    overrides: tuple[str, ...]  # `section.key=value`, without corpus, seed and run folder
    results: Path  # folder of all logs
    open_vocabulary: bool = False  # whether unknown words are spelled in the test figures

    @property
    def name(self) -> str:
        """File name of the log, without suffix."""
        return re.sub(r"[^\w.]+", "_", self.row) + f"-{self.seed}"

    @property
    def log_path(self) -> Path:
        """Command, environment and test figures."""
        return self.results / self.table / f"{self.name}.json"

    @property
    def curve_path(self) -> Path:
        """The run's metrics.csv."""
        return self.log_path.with_suffix(".csv")

    @property
    def speed_path(self) -> Path:
        """Tokens per second of the runs of the table, timed in turn."""
        return self.results / self.table / "speed.jsonl"

    @property
    def speed(self) -> dict[str, Any]:
        """The last row of this run in the log of speeds, without its origin; empty if none."""
        lines = self.speed_path.read_text("utf-8").splitlines() if self.speed_path.exists() else []
        rows = [row for row in map(json.loads, lines) if row["row"] == self.row]
        names = "tokens_per_second", "step_milliseconds"
        return {name: rows[-1][name] for name in names} if rows else {}

    @property
    def command(self) -> str:
        """The training command, without its folders."""
        return f"lm train {self.config} --data.dir=DIR {' '.join(self.options)}"

    @property
    def log(self) -> dict[str, Any] | None:
        """The log, if there is one of this command with test figures."""
        if not (self.log_path.exists() and self.curve_path.exists()):
            return None
        log: dict[str, Any] = json.loads(self.log_path.read_text(encoding="utf-8"))
        return log if "test" in log and log["command"] == self.command else None

    @property
    def options(self) -> list[str]:
        """Overrides and seed as arguments of `lm train`."""
        return [f"--{option}" for option in (*self.overrides, f"seed={self.seed}")]


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """A table of training runs, as described at the top of tables.yaml."""

    name: str
    title: str
    rows: dict[str, tuple[str, tuple[str, ...]]]  # recipe and overrides, the shared ones first
    seeds: list[int]
    figures: list[str]
    open_vocabulary: bool = False
    published: str = "–"
    summary: dict[str, str | None] = field(default_factory=dict)
    vocabulary: dict[str, Any] = field(default_factory=dict)

    def runs(self, results: Path, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
        """The runs of the table, or of some of its rows or with other seeds."""
        for row in rows:
            if row not in self.rows:
                raise UserError(f"{self.name} has no row {row!r}; its rows: {', '.join(self.rows)}")
        return [
            Run(self.name, row, seed, config, overrides, results, self.open_vocabulary)
            for seed in seeds or self.seeds
            for row, (config, overrides) in self.rows.items()
            if not rows or row in rows
        ]


def read_tables(path: Path = TABLES) -> dict[str, RunTable]:
    """The tables of a file, by name."""
    tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: _table(name, **fields) for name, fields in tables.items()}


def _table(
    name: str, *, rows: dict[str, Any], config: str = "", shared: Sequence[str] = (), **others: Any
) -> RunTable:
    resolved = {}
    for row, options in rows.items():
        own = options if isinstance(options, dict) else {"config": config, "overrides": options}
        resolved[row] = (own["config"], (*shared, *own["overrides"]))
    return RunTable(name=name, rows=resolved, **others)


def validations(path: Path) -> list[Metrics]:
    """The rows of a metrics.csv that have a validation perplexity."""
    return [row for row in read_metrics(path) if row.valid_perplexity is not None]
