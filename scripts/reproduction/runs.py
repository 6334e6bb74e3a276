"""The training runs behind the tables of results, and their logs.

A run is `lm train` with a recipe and overrides, then `lm evaluate` on the test split. Its log is
TABLE/ROW-SEED.json in the folder of results: the command, the commit, the environment and the test
figures; TABLE/ROW-SEED.csv is its metrics.csv. A log of an older version names configuration keys
that have since been renamed: commands are compared after translation.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import UserError
from lm.config.renamed import translate_override
from lm.training.metrics import Metrics, read_metrics

TOP = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).with_name("tables.yaml")
RESULTS = TOP / "scripts" / "results"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a table.

    Attributes:
        table: Name of the table.
        row: Name of the row.
        seed: Random seed.
        config: Path of the recipe, relative to the top folder.
        overrides: `section.key=value`, without corpus, seed and run folder.
        results: Folder of all logs.
    """

    table: str
    row: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    results: Path

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
    def command(self) -> str:
        """The training command, without its folders."""
        return f"lm train {self.config} --data.dir=DIR {' '.join(self.options)}"

    @property
    def done(self) -> bool:
        """Whether there is a log of this command with test figures."""
        if not (self.log_path.exists() and self.curve_path.exists()):
            return False
        log = self.read_log()
        return "test" in log and translate_command(log["command"]) == self.command

    def read_log(self) -> dict[str, Any]:
        """The contents of the log."""
        log: dict[str, Any] = json.loads(self.log_path.read_text(encoding="utf-8"))
        return log

    @property
    def options(self) -> list[str]:
        """Overrides and seed as arguments of `lm train`."""
        return [f"--{option}" for option in (*self.overrides, f"seed={self.seed}")]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of training runs, as described at the top of tables.yaml.

    Attributes:
        name: Its key in the file.
        title: Corpus and model.
        rows: Recipe and overrides of each row, those shared by all rows first.
        seeds: Seeds of every row.
        figures: Columns.
        published: Perplexity reported by others.
        summary: Rows for the table of all corpora; value: the output layer's name in the log of
            training speed, None if its speed was not measured.
        overview: Rows for README.md.
    """

    name: str
    title: str
    rows: dict[str, tuple[str, tuple[str, ...]]]
    seeds: list[int]
    figures: list[str]
    published: str = "–"
    summary: dict[str, str | None] = field(default_factory=dict)
    overview: list[str] = field(default_factory=list)

    def runs(
        self,
        results: Path,
        rows: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Run]:
        """The runs of the table.

        Args:
            results: Folder of all logs.
            rows: Only these rows.
            seeds: These seeds instead of the table's.

        Raises:
            UserError: If a row is not in the table.
        """
        for row in rows or ():
            if row not in self.rows:
                raise UserError(f"{self.name} has no row {row!r}; its rows: {', '.join(self.rows)}")
        return [
            Run(
                table=self.name,
                row=row,
                seed=seed,
                config=config,
                overrides=overrides,
                results=results,
            )
            for seed in seeds or self.seeds
            for row, (config, overrides) in self.rows.items()
            if not rows or row in rows
        ]

    def logs(self, results: Path, row: str) -> list[dict[str, Any]]:
        """The logs of a row, one for each seed that has been trained."""
        return [run.read_log() for run in self.runs(results, [row]) if run.done]


def read_tables(path: Path = TABLES) -> dict[str, Table]:
    """The tables of a file, by name."""
    tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: _table(name, **fields) for name, fields in tables.items()}


def _table(
    name: str, *, rows: dict[str, Any], config: str = "", shared: Sequence[str] = (), **others: Any
) -> Table:
    resolved = {}
    for row, options in rows.items():
        recipe, overrides = config, options
        if isinstance(options, dict):
            recipe, overrides = options["config"], options["overrides"]
        resolved[row] = (recipe, (*shared, *overrides))
    return Table(name=name, rows=resolved, **others)


def translate_command(command: str) -> str:
    """A logged command with the configuration keys of today."""
    return " ".join(map(translate_override, command.split(" ")))


def validations(path: Path) -> list[Metrics]:
    """The rows of a metrics.csv that have a validation perplexity."""
    return [row for row in read_metrics(path) if row.valid_perplexity is not None]
