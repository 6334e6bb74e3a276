"""Train the rows of a table of results and print the table from their logs.

  scripts/reproduce TABLE --data-dir DIR          trains and evaluates the rows without a log
  scripts/reproduce TABLE --show                  prints the table, trains nothing
  scripts/reproduce TABLE --data-dir DIR --check  trains logged rows again up to the first
                                                  validation and compares the perplexity: equal
                                                  in every digit on the same kind of machine, up
                                                  to some percent different elsewhere
  scripts/reproduce pages                         generates the tables and figures of all pages

A row is trained once for each seed. An interrupted run resumes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import scripts
from data_prep.errors import UserError
from scripts.reproduction.pages import write_pages
from scripts.reproduction.runs import RESULTS, TABLES, read_tables
from scripts.reproduction.tables import table_of_runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; raises UserError if the options do not fit."""
    parser = argparse.ArgumentParser(
        prog="scripts/reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tables", type=Path, default=TABLES, help=argparse.SUPPRESS)
    add("table", help=f"one of {', '.join(read_tables())}; or pages")
    add("--data-dir", metavar="DIR", help="folder of the corpus")
    add("--rows", nargs="+", default=(), metavar="ROW", help="only these rows")
    add("--seeds", nargs="+", default=(), type=int, metavar="N", help="only these seeds")
    add("--runs", type=Path, default=Path("runs/reproduce"), help="folder of the runs")
    add("--results", type=Path, default=RESULTS, help="folder of the logs")
    add("--show", action="store_true", help="train nothing, print the table")
    add("--check", action="store_true", help="train up to the first validation and compare")
    add("--no-progress", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    if options.table == "pages":
        write_pages()
        return
    tables = read_tables(options.tables)
    if options.table not in tables:
        raise UserError(f"no table {options.table!r}; there are {', '.join(tables)}")
    table = tables[options.table]
    runs = table.runs(options.results, options.rows, options.seeds)
    missing = [] if options.show else [run for run in runs if run.log is None]
    if missing or options.check:
        if options.data_dir is None:
            raise UserError("--data-dir is required, the folder of the corpus (or --show)")
        # Imports PyTorch, which the other commands do not require.
        from scripts.reproduction.training import check_run, train_run

    progress = not options.no_progress
    if options.check:
        for run in runs:
            print(check_run(run, options.data_dir, options.runs, progress=progress), flush=True)
        return
    for number, run in enumerate(missing, 1):
        where = f"{run.table}, {number} of {len(missing)}"
        print(f"{where}: {run.row}, seed {run.seed}", file=sys.stderr)
        train_run(run, options.data_dir, options.runs, progress=progress)
    print(table_of_runs(table, runs))


if __name__ == "__main__":
    scripts.run(main, "reproduce")
