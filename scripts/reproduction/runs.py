"""The training runs behind the tables of results: what they are, how they run, what they log.

A run is `lm train` with a recipe and overrides, then `lm evaluate` on the test split. Its log is
TABLE/ROW-SEED.json in the folder of results: the command, the commit, the environment and the test
figures; TABLE/ROW-SEED.csv is its metrics.csv. A log of an older version names configuration keys
that have since been renamed: commands are compared after translation.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data_prep.errors import UserError
from data_prep.prepare import prepare
from data_prep.storage import write_json_atomically
from lm.config import load_config
from lm.config.renamed import translate_override
from lm.evaluation import evaluate_run
from lm.training.loop import train
from lm.training.metrics import Metrics, read_metrics
from lm.training.run_folder import check_folder
from scripts.benchmarks.reporting import commit

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
        return f"lm train {self.config} --data.dir=DIR {' '.join(self._options)}"

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

    def train(self, data_dir: str, runs: Path, *, progress: bool) -> None:
        """Train or resume the run, evaluate it and write the log.

        Args:
            data_dir: Folder of the corpus.
            runs: Folder in which run folders are created.
            progress: Whether to show progress bars.

        Raises:
            UserError: If the corpus or the run folder does not fit, as in `lm train`.
        """
        folder = runs / self.table / self.name
        self._train(data_dir, folder, progress=progress)
        test = evaluate_run(folder, "test", progress=progress).to_dict()
        last = read_metrics(folder / "metrics.csv")[-1]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "metrics.csv", self.curve_path)
        log = {
            "row": self.row,
            "seed": self.seed,
            "command": self.command,
            "commit": commit(),
            "environment": json.loads((folder / "env.json").read_text()),
            "tokens": last.tokens,
            "seconds": last.seconds,
            "test": test,
        }
        write_json_atomically(self.log_path, log)

    def check(self, data_dir: str, runs: Path, *, progress: bool) -> str:
        """Train again up to the first validation and compare it with the log.

        Args:
            data_dir: Folder of the corpus.
            runs: Folder for a temporary run folder.
            progress: Whether to show progress bars.

        Returns:
            The comparison, one line of text.

        Raises:
            UserError: If the corpus does not fit, as in `lm train`.
        """
        if not self.done:
            return f"{self.row}, seed {self.seed}: no log"
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=runs) as folder:
            now = self._first_validation(data_dir, Path(folder) / "run", progress=progress)
        logged = validations(self.curve_path)[0]
        result = f"{self.row}, seed {self.seed}: {now.valid_perplexity:.2f} after {now.step} steps"
        if logged.step != now.step:
            return f"{result}; the log's first validation is after {logged.step}"
        if logged.valid_perplexity == now.valid_perplexity:
            return f"{result}, equal to the log in every digit"
        assert now.valid_perplexity is not None
        assert logged.valid_perplexity is not None
        change = now.valid_perplexity / logged.valid_perplexity - 1
        return f"{result}, {logged.valid_perplexity:.2f} in the log ({change:+.1%})"

    @property
    def _options(self) -> list[str]:
        return [f"--{option}" for option in (*self.overrides, f"seed={self.seed}")]

    def _first_validation(self, data_dir: str, folder: Path, *, progress: bool) -> Metrics:
        self._train(data_dir, folder, progress=progress, stop_after_validation=True)
        rows = validations(folder / "metrics.csv")
        if not rows:
            raise UserError(f"{self.config}: {self.row} has no validation split")
        return rows[0]

    def _train(
        self, data_dir: str, folder: Path, *, progress: bool, stop_after_validation: bool = False
    ) -> None:
        """Prepare the corpus if necessary, then train or resume."""
        folders = [f"--data.dir={data_dir}", f"--run_dir={folder}"]
        config = load_config(TOP / self.config, [*self._options, *folders])
        resumes = check_folder(config, "auto") is not None
        prepare(
            config.data,
            config.tokenizer,
            config.needed_classes,
            config.prepared_path,
            keep=resumes,
            progress=progress,
        )
        train(
            config,
            resume="auto",
            progress=progress,
            stop_after_validation=stop_after_validation,
        )


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
