#!/usr/bin/env python
"""Trains and evaluates the rows of a table of results, and keeps the logs beside it.

A row is `lm train` of the table's recipe with the row's overrides, once for each seed, then `lm
evaluate` on the test split. What comes out lies in scripts/results/TABLE: ROW-SEED.json with the
command, the environment and the figures of the test split, and ROW-SEED.csv with the curve. Rows
whose logs are there, of the same settings, are not run again; interrupted ones go on. At the end
the table is printed, from the logs alone; --show does only that, --plot draws validation perplexity
against training time. --check begins the trainings of the logs anew, up to the first validation,
and tells whether it gives the logs' perplexity: on the same kind of machine every digit of it,
elsewhere some percent off, as sums of another order make it. `scripts/reproduce summary` prints,
for all tables, the rows that they name for it, beside how many tokens a second the output layer
trains (of bench_train.jsonl) and what has been published.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))

from data_prep.errors import UserError  # noqa: E402
from data_prep.storage import write_json_atomically  # noqa: E402
from lm.training.metrics import Metrics, read_metrics  # noqa: E402

TABLES = TOP / "scripts" / "tables.yaml"
RESULTS = TOP / "scripts" / "results"
SPEEDS = "bench_train.jsonl"
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Run:
    """One training of a table.

    Attributes:
        table: name of the table.
        row: what the table calls it.
        seed: of the training.
        config: the recipe.
        overrides: `section.key=value`, without the corpus, the seed and the folder.
        results: folder of the logs.
    """

    table: str
    row: str
    seed: int
    config: str
    overrides: tuple[str, ...]
    results: Path

    @property
    def name(self) -> str:
        """File name of the row's logs, without ending."""
        return re.sub(r"[^\w.]+", "_", self.row) + f"-{self.seed}"

    @property
    def log(self) -> Path:
        """Command, environment and test figures."""
        return self.results / self.table / f"{self.name}.json"

    @property
    def curve(self) -> Path:
        """metrics.csv of the training."""
        return self.log.with_suffix(".csv")

    @property
    def done(self) -> bool:
        """Whether the logs are there, and of these settings."""
        if not (self.log.exists() and self.curve.exists()):
            return False
        return bool(json.loads(self.log.read_text())["command"] == self.command)

    @property
    def command(self) -> str:
        """How the row is trained, but for the folders."""
        return f"lm train {self.config} --data.dir=DIR {' '.join(self._options)}"

    def train(self, data_dir: str, runs: Path, progress: bool) -> None:
        """Train, evaluate, and write the logs.

        Raises:
            UserError: as `lm train`.
        """
        from lm.evaluation import evaluate_run  # takes seconds to import

        folder = runs / self.table / self.name
        self._train(data_dir, folder, progress)
        test = evaluate_run(folder, "test", progress=progress).to_dict()
        last = read_metrics(folder / "metrics.csv")[-1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "metrics.csv", self.curve)
        write_json_atomically(
            self.log,
            {
                "row": self.row,
                "seed": self.seed,
                "command": self.command,
                "environment": json.loads((folder / "env.json").read_text()),
                "tokens": last.tokens,
                "seconds": last.seconds,
                "test": test,
            },
        )

    def check(self, data_dir: str, runs: Path, progress: bool) -> str:
        """Train anew until the first validation: what comes out beside the log's curve, in a line.

        Raises:
            UserError: as `lm train`.
        """
        if not self.done:
            return f"{self.row}, seed {self.seed}: no log"
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=runs) as folder:
            now = self._first_validation(data_dir, Path(folder) / "run", progress)
        logged = [line for line in read_metrics(self.curve) if line.valid_perplexity is not None]
        told = f"{self.row}, seed {self.seed}: {now.valid_perplexity:.2f} after {now.step} steps"
        if logged[0].step != now.step:
            return f"{told}, the log's first is after {logged[0].step}"
        if logged[0].valid_perplexity == now.valid_perplexity:
            return f"{told}, every digit as in the log"
        off = now.valid_perplexity / logged[0].valid_perplexity - 1
        return f"{told}, {logged[0].valid_perplexity:.2f} in the log ({off:+.1%})"

    def _first_validation(self, data_dir: str, folder: Path, progress: bool) -> Metrics:
        from lm.training.callbacks import Observer

        class Reached(Exception):
            pass

        class UntilValidated(Observer):
            def line(self, line: Metrics) -> None:
                if line.valid_perplexity is not None:
                    raise Reached(line)

        try:
            self._train(data_dir, folder, progress, UntilValidated())
        except Reached as reached:
            line: Metrics = reached.args[0]
            return line
        raise UserError(f"{self.config}: {self.row} has no validation split")

    @property
    def _options(self) -> list[str]:
        """What the row and its seed mean to `lm train`."""
        return [f"--{option}" for option in (*self.overrides, f"seed={self.seed}")]

    def _train(self, data_dir: str, folder: Path, progress: bool, *observers: Any) -> None:
        """Prepare and train, or go on."""
        from data_prep.prepare import prepare  # these take seconds to import
        from lm.config import load_config
        from lm.training.loop import check_folder, train

        places = [f"--data.dir={data_dir}", f"--run_dir={folder}"]
        config = load_config(TOP / self.config, [*self._options, *places])
        keep = check_folder(config, "auto") is not None
        what = (config.data, config.tokenizer, config.classes, config.prepared_path)
        prepare(*what, keep=keep, progress=progress)
        train(config, resume="auto", progress=progress, observers=observers)


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables by name, as the file has them."""
    tables: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tables


def runs_of(
    name: str,
    table: dict[str, Any],
    results: Path,
    rows: Sequence[str] | None,
    seeds: Sequence[int] | None,
) -> list[Run]:
    """The trainings of a table, or of some rows and seeds of it.

    Raises:
        UserError: if a row is not in the table.
    """
    for row in rows or ():
        if row not in table["rows"]:
            raise UserError(f"{name} has no row {row!r}; its rows: {', '.join(table['rows'])}")
    return [
        Run(name, row, seed, config_of(table, row), overrides_of(table, row), results)
        for seed in seeds or table["seeds"]
        for row in table["rows"]
        if not rows or row in rows
    ]


def config_of(table: dict[str, Any], row: str) -> str:
    """The recipe of a row: its own, or the table's."""
    own = table["rows"][row]
    return str(own["config"] if isinstance(own, dict) else table["config"])


def overrides_of(table: dict[str, Any], row: str) -> tuple[str, ...]:
    """The table's overrides and those of a row."""
    own = table["rows"][row]
    return (*table.get("shared", ()), *(own["overrides"] if isinstance(own, dict) else own))


def as_markdown(table: dict[str, Any], runs: Sequence[Run]) -> str:
    """The table from the logs that are there: means over seeds, and the first figure by seed."""
    names = [name.replace("_", " ") for name in table["figures"]]
    lines = [f"| output layer | test {' | '.join(names)} | {names[0]} by seed |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in dict.fromkeys(run.row for run in runs):
        logs = [json.loads(run.log.read_text()) for run in runs if run.row == row and run.done]
        if logs:
            means = [
                statistics.fmean(_figure(log, name) for log in logs) for name in table["figures"]
            ]
            first = ", ".join(
                f"{log['seed']}: {_short(_figure(log, table['figures'][0]))}" for log in logs
            )
            lines.append(f"| {row} | {' | '.join(map(_short, means))} | {first} |")
    return "\n".join(lines)


def _figure(log: dict[str, Any], name: str) -> float:
    """A figure of the test split, or the minutes that the training took."""
    return float(log["seconds"] / 60 if name == "minutes" else log["test"][name])


def summary(tables: dict[str, dict[str, Any]], results: Path) -> str:
    """The rows that the tables name for it, in one table."""
    speed = read_speeds(results / SPEEDS)
    lines = [
        "| corpus, model | published | tokens | output layer | perplexity | relative tokens/s |",
        "|---" * 6 + "|",
    ]
    for name, table in tables.items():
        first = True
        for row, tree in table.get("summary", {}).items():
            runs = [run for run in runs_of(name, table, results, [row], None) if run.done]
            logs = [json.loads(run.log.read_text()) for run in runs]
            if not logs:
                continue
            perplexity = statistics.fmean(log["test"]["word_perplexity"] for log in logs)
            rate = speed.get((Path(config_of(table, row)).name, tree))
            cells = [
                table["title"] if first else "",
                str(table.get("published", "–")) if first else "",
                f"{logs[0]['tokens'] / 1e6:.1f}M",
                row,
                _short(perplexity),
                "–" if rate is None else f"{rate:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            first = False
    return "\n".join(lines)


def read_speeds(path: Path) -> dict[tuple[str, str], float]:
    """Tokens per second ÷ those of the full softmax, in bf16-mixed, by recipe and output layer, of
    the last measurement.
    """
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return {
        (row["config"], row["tree"]): row["ratio"]
        for row in rows
        if "--train.precision=bf16-mixed" in row["overrides"]
    }


def _short(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 1000 or value == round(value)
        else f"{value:.2f}"
        if value >= 10
        else f"{value:.4g}"
    )


def plot(table: dict[str, Any], runs: Sequence[Run], path: Path) -> None:
    """Draw validation perplexity against seconds of training, a line for each log."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        if run.done:
            lines = [line for line in read_metrics(run.curve) if line.valid_perplexity is not None]
            minutes = [line.seconds / 60 for line in lines]
            axes.plot(
                minutes,
                [line.valid_perplexity for line in lines],
                "o-",
                label=f"{run.row} ({run.seed})",
            )
    axes.set(
        xlabel="minutes of training",
        ylabel="validation perplexity",
        yscale="log",
        title=table["title"],
    )
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, default=TABLES, help=argparse.SUPPRESS)
    names = ", ".join(read_tables(TABLES))
    parser.add_argument("table", help=f"one of {TABLES.name}: {names}; or summary")
    parser.add_argument("--data-dir", metavar="DIR", help="where the recipe's corpus is")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these seeds")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/reproduce"), help="folder of the runs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the logs")
    parser.add_argument("--show", action="store_true", help="train nothing, print what there is")
    parser.add_argument(
        "--check", action="store_true", help="begin the logs' trainings anew, and compare"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw perplexity over time")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    options = parser.parse_args()
    tables = read_tables(options.tables)
    if options.table == "summary":
        print(summary(tables, options.results))
        return
    if options.table not in tables:
        raise UserError(f"no table {options.table!r}; there are {', '.join(tables)}")
    if options.plot and not (options.plot.parent.is_dir() and options.plot.suffix in PICTURES):
        raise UserError(f"--plot {options.plot}: expected a {', '.join(PICTURES)} in a folder")
    table = tables[options.table]
    runs = runs_of(options.table, table, options.results, options.rows, options.seeds)
    missing = [] if options.show else [run for run in runs if not run.done]
    if (missing or options.check) and options.data_dir is None:
        raise UserError("--data-dir: where is the corpus? (--show prints what there is)")
    if options.check:
        for run in runs:
            print(run.check(options.data_dir, options.runs, not options.no_progress), flush=True)
        return
    for number, run in enumerate(missing, 1):
        print(
            f"{run.table}, {number} of {len(missing)}: {run.row}, seed {run.seed}", file=sys.stderr
        )
        run.train(options.data_dir, options.runs, not options.no_progress)
    print(as_markdown(table, runs))
    if options.plot:
        plot(table, runs, options.plot)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"reproduce: {error}")
