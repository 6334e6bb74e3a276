"""Tokens per second of `lm train`, `evaluate`, `score` and `generate`, as users call them.

A run is trained for --steps steps with `train.cuda_graph` auto and off; the rate is the median of
the lines of its `metrics.csv` but the first. Each other command runs on few and on many tokens,
after once on few that load what later calls share; the rate is that of the tokens that the last
call has more, in the seconds that it takes longer. All run in this process, on a GPU if there is
one. The text is the test split of the configuration, a file of words.
"""

import argparse
import csv
import io
import statistics
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lm.cli import main as lm
from lm.run import TrainedRun
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive

GRAPHS = ("auto", "off")
FEW_LINES, FEW_TOKENS = 10, 40
NUM_LINES = {"evaluate": 10_000, "score": 2_000}
"""Most lines of the longer text."""
SAMPLES = 100
COLUMNS = {
    "command": "{command}",
    "cuda_graph": "{cuda_graph}",
    "tokens": "{tokens:,}",
    "seconds": "{seconds:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
}


def seconds_of(*arguments: object) -> float:
    """Seconds of a command, whose output is discarded; raises SystemExit if it fails."""
    start = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        code = lm([*map(str, arguments)])
    if code:
        raise SystemExit(f"commands: lm {arguments[0]} ended with exit code {code}")
    return time.perf_counter() - start


def train(folder: Path, graph: str, options: argparse.Namespace, overrides: list[str]) -> Path:
    """Train a run; returns its folder."""
    found = folder / graph
    chosen = [f"--run_dir={found}", f"--data.prepared_dir={folder / 'data'}"]
    chosen += ["--train.max_epochs=null", f"--train.max_steps={options.steps}"]
    chosen += [f"--train.cuda_graph={graph}", f"--log.every_steps={max(1, options.steps // 10)}"]
    seconds_of("train", options.config, "--no-progress", *overrides, *chosen)
    return found


def first_lines(source: Path, file: Path, num_lines: int) -> tuple[Path, int]:
    """A file with the first lines of another one, and their number of words and line ends."""
    with source.open(encoding="utf-8") as lines:
        text = list(islice(lines, num_lines))
    file.write_text("".join(text), encoding="utf-8")
    return file, sum(len(line.split()) + 1 for line in text)


Commands = list[tuple[Sequence[object], int]]
"""A command on few and on many tokens, with their number."""


def ways(trained: Path, num_generated: int, folder: Path) -> dict[str, Commands]:
    """The commands of a trained run by name; `folder` is for their texts."""
    data, found = TrainedRun.open(trained).config.data, dict[str, Commands]()
    test = Path(data.dir, str(data.files.test))
    for verb, num_lines in NUM_LINES.items():
        texts = [first_lines(test, folder / str(n), n) for n in (FEW_LINES, num_lines)]
        options = ["--json", "--text"] if verb == "evaluate" else []
        found[verb] = [([verb, trained, *options, file], count) for file, count in texts]
    for option, samples in {
        "--samples=1": 1,
        "--top-k=10": 1,
        f"--samples={SAMPLES}": SAMPLES,
    }.items():
        found[f"generate {option}"] = [
            (["generate", trained, option, f"--tokens={count}"], samples * count)
            for count in (FEW_TOKENS, num_generated)
        ]
    return found


def measure(options: argparse.Namespace, overrides: list[str], folder: Path) -> None:
    """Print and log the rows."""
    table = Table(COLUMNS, options.json, "cuda" if torch.cuda.is_available() else "cpu")
    for graph in GRAPHS:
        trained = train(folder, graph, options, overrides)
        with (trained / "metrics.csv").open(encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        rates = [float(line["tokens_per_second"]) for line in lines[1:]]
        figures = {"tokens": int(lines[-1]["tokens"]), "seconds": float(lines[-1]["seconds"])}
        figures["tokens_per_second"] = statistics.median(rates)
        row = {"command": "train", "cuda_graph": graph, **figures}
        table.add(row)
    for name, ((command, few), (longer, many)) in ways(trained, options.tokens, folder).items():
        seconds_of(*command)
        short, long = seconds_of(*command), seconds_of(*longer)
        rate = (many - few) / (long - short) if long > short else None
        table.add({"command": name, "tokens": many, "seconds": long, "tokens_per_second": rate})


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__, takes_config=True)
    parser.add_argument("--steps", type=int, default=1000, help="of each training run")
    parser.add_argument("--tokens", type=int, default=400, help="generated, of each sample")
    options, overrides = parser.parse_known_args()
    require_positive(parser, options, ["steps", "tokens"])
    if options.steps < 2 or options.tokens <= FEW_TOKENS:
        parser.error(f"--steps must be at least 2, --tokens more than {FEW_TOKENS}")
    with TemporaryDirectory() as folder:
        measure(options, overrides, Path(folder))


if __name__ == "__main__":
    run(main)
