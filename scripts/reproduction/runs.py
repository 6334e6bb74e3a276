"""The training runs behind the tables of results, and their logs.

A run is `lm train` with a recipe and overrides, then `lm evaluate` on the test split. Its log is a
line of TABLE/runs.jsonl in the folder of results: the command, the commit, the environment, the
validations and the test figures. Of several lines with its row and seed the last counts.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import UserError
from scripts import TOP

Log = dict[str, Any]
TABLES = Path(__file__).with_name("tables.yaml")
RESULTS = TOP / "scripts" / "results"
LOG = "runs.jsonl"


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
        """Name of the run's folder."""
        return re.sub(r"[^\w.]+", "_", self.row) + f"-{self.seed}"

    @property
    def command(self) -> str:
        """The training command, without its folders."""
        return f"lm train {self.config} --data.dir=DIR {' '.join(self.options)}"

    @property
    def log(self) -> Log | None:
        """The last log of the row and seed, if it is of this command and has test figures."""
        log = read_logs(self.results / self.table).get((self.row, self.seed))
        return log if log and "test" in log and log["command"] == self.command else None

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


def read_logs(folder: Path) -> dict[tuple[str, int], Log]:
    """The last log of each row and seed of a table."""
    path = folder / LOG
    if not path.exists():
        return {}
    logs = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(log["row"], log["seed"]): log for log in logs}
