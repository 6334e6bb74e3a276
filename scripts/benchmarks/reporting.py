"""The options, tables and log records that all benchmarks share.

A log is a file of JSON lines. Each line holds the figures of one row of the printed table, and the
command, versions, processor and commit that they come from.
"""

import argparse
import importlib
import importlib.util
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.errors import UserError
from lm.training.environment import processor_name

TOP = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
FOLDER = re.compile(r"(^|=)/(?:[^/]+/)*")
"""An absolute folder in an argument; a log has DIR instead."""


class Column(NamedTuple):
    """A column of a printed table."""

    title: str
    field: str  # of the row
    format: str = ""  # specification; empty for text, which is left-aligned
    unit: float = 1  # that the values are divided by
    width: int = 0  # in characters, if the title is not wider

    def align(self, text: str) -> str:
        """Pad a cell to the width of the column."""
        width = max(self.width, len(self.title))
        return text.rjust(width) if self.format else text.ljust(width)

    def cell(self, row: Row) -> str:
        """The row's value as it is printed; a dash for None."""
        value = row[self.field]
        if value is None:
            return self.align("–")
        return self.align(format(value if self.unit == 1 else value / self.unit, self.format))


class Table:
    """A table that is printed and logged row by row; by default with all fields of the first."""

    def __init__(
        self, columns: Sequence[Column] = (), log: Path | None = None, device: str = "cpu"
    ) -> None:
        self.columns, self.log, self.device = columns, log, device
        self.rows: list[Row] = []

    def add(self, row: Row, note: str = "") -> None:
        """Print and log a row; only the columns before the first missing field are printed."""
        self.columns = self.columns or [
            Column(name, name, width=15 if isinstance(row[name], str) else 8) for name in row
        ]
        if not self.rows:
            print("  ".join(column.align(column.title) for column in self.columns).rstrip())
        known = takewhile(lambda column: column.field in row, self.columns)
        print("  ".join([*(column.cell(row) for column in known), note]).rstrip(), flush=True)
        self.rows.append(row)
        append_row(self.log, row, self.device)


def append_row(log: Path | None, row: Row, device: str = "cpu") -> None:
    """Append a row with its environment to a file of JSON lines; does nothing without a file."""
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **environment(device), **row}) + "\n")


def benchmark_parser(
    description: str | None, *, takes_config: bool = False
) -> argparse.ArgumentParser:
    """A parser with the option --json.

    With `takes_config`, the first argument is a config file, and overrides of its keys are the
    unknown arguments of `parse_known_args`.
    """
    parser = argparse.ArgumentParser(
        prog=_program(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Overrides of the configuration: --section.key=value." if takes_config else None,
    )
    if takes_config:
        parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def require_positive(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str]
) -> None:
    """Exit with an error of the parser if a numeric option is not positive; None is accepted."""
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, Sequence) else [value]
        for number in numbers:
            if number is not None and not number > 0:
                parser.error(f"--{name.replace('_', '-')} must be positive, got {number}")


def problem_size(text: str) -> tuple[int, int]:
    """Parse N:H, for argparse."""
    vocab_size, _, hidden_size = text.partition(":")
    if not (vocab_size.isdecimal() and hidden_size.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected N:H, as in 10000:300, got {text!r}")
    if int(vocab_size) < 10 or int(hidden_size) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 10 words and H ≥ 1, got {text!r}")
    return int(vocab_size), int(hidden_size)


def environment(device: str = "cpu") -> dict[str, Any]:
    """What figures depend on and come from: device, processor, versions, commit and command."""
    import torch  # not needed by every benchmark without a log

    has_triton = importlib.util.find_spec("triton") is not None
    on_gpu = device == "cuda"
    arguments = [FOLDER.sub(r"\1DIR/", argument) for argument in sys.argv[1:]]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "environment": processor_name(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if has_triton else None,
        "python": platform.python_version(),
        "command": shlex.join([*_program().split(), *arguments]),
    }


@cache
def commit() -> str | None:
    """Commit of the working tree, with "+" if the tree differs from it; None outside of git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(TOP), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def run(main: Callable[[], None]) -> None:
    """Run the `main` of a benchmark; a user's mistake is a single-line error and exit code 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def _program() -> str:
    path = Path(sys.argv[0])
    return f"python -m scripts.{path.parent.name}.{path.stem}"
