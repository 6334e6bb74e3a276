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
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lm.device import processor_name
from scripts import TOP
from scripts.reproduction import markdown

Row = dict[str, Any]
FOLDER = re.compile(r"(^|=)/(?:[^/]+/)*")
"""An absolute folder in an argument; a log has DIR instead."""


class Table:
    """A Markdown table that is printed and, with a `log`, appended to it row by row."""

    def __init__(self, columns: markdown.Columns, log: Path | None, device: str) -> None:
        self.columns, self.log, self.device = columns, log, device
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Print and log a row."""
        widths = [max(10, len(title)) for title in self.columns]
        lines = [[markdown.cell(template, row) for template in self.columns.values()]]
        if not self.rows:
            lines = [list(self.columns), ["-" * width for width in widths], *lines]
        for cells in lines:
            print(markdown.line(map(str.ljust, cells, widths)), flush=True)
        self.rows.append(row)
        if self.log is not None:
            append_log(self.log, {**row, **environment(self.device), **row})


def append_log(path: Path, row: Row) -> None:
    """Append a line of JSON to a log, in a single write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())


def benchmark_parser(description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser with the option --json."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(_program(), None, description, epilog, formatter_class=form)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def problem_size(text: str) -> tuple[int, int]:
    """Parse N:H, for argparse."""
    vocab_size, _, hidden_size = text.partition(":")
    if not (vocab_size.isdecimal() and hidden_size.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected N:H, as in 10000:300, got {text!r}")
    if int(vocab_size) < 10 or int(hidden_size) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 10 words and H ≥ 1, got {text!r}")
    return int(vocab_size), int(hidden_size)


def environment(device: str = "cpu") -> dict[str, Any]:
    """The origin of figures: device, processor, versions, commit and command."""
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


def _program() -> str:
    path = Path(sys.argv[0].removesuffix("/__main__.py"))
    return f"python -m scripts.{path.parent.name}.{path.stem}"
