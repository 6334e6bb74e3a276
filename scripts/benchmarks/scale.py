"""Cost of a training step as the vocabulary grows, and the largest vocabulary of each method.

A step is forward, backward and the optimizer's update. The cost of this project's layer is that of
the rows that a batch visits, not of all N rows. The methods:

  layer    ours, the output layer alone: row-wise gradients, row-wise Adagrad
  step     ours, a whole language model (LSTM, tied, 32 sequences): forward, backward, clipping,
           AdamW of the backbone, row-wise Adagrad of the word table
  dense    ours with gradients of the table's size, SGD: the cost of not being row-wise
  full     the ordinary softmax: linear + cross_entropy, SGD
  gather   the rows of each position's class copied, padded to the widest class of the batch, for
           one batched product; dense gradient, SGD
  loop     one position after the other, every class a separate parameter, SGD; run on a few
           positions, its time scaled to all (its peak memory is that of the few)

On a GPU, and with --dtype bf16, the forward runs under autocast to bf16, as with `train.precision:
bf16-mixed`: hidden vectors are bf16. On a GPU, `layer` is also timed as a CUDA graph, and rows have
the seconds of each kernel.

Words are drawn by inverse rank (Zipf) for each step, outside the timed region; √N classes have
equal sums of √count. Every measurement is a process whose memory the operating system limits, so a
method that does not fit fails alone; it is not tried at larger N. The outcome is `done`, `memory`
(more than --memory-limit-gb) or `time` (more than --time-limit). Methods over classes must agree
in their loss on the same words and weights, otherwise the run stops.

A figure is the median over the steps after the first. On a shared machine CPU seconds are steadier
than wall-clock seconds. The peak is that of the whole process, including about 0.4 GB of libraries.
The rows visited belong to the root and the targets' classes; `step` also visits the rows that it
reads as input vectors. The benchmark runs on Linux only.
"""

import argparse
import os
import signal
import sys
from itertools import product

import torch

from scripts.benchmarks import reporting
from scripts.benchmarks.measure import (
    DTYPES,
    TOLERANCE,
    in_new_process,
    is_out_of_memory,
    memory_limit,
)
from scripts.benchmarks.reporting import Row, Table
from scripts.benchmarks.scale_methods import METHODS, NUM_SEQUENCES, measure

AGREEING = ("layer", "dense", "gather", "loop")
"""Methods that have the same loss."""
COLUMNS = {
    "N": "{vocab_size:,}",
    "method": "{method}",
    "dtype": "{dtype}",
    "outcome": "{outcome}",
    "s/step": "{seconds:.4f}",
    "CUDA graph": "{graph_seconds:.4f}",
    "CPU s": "{cpu_seconds:.4f}",
    "µs/position": "{microseconds_per_position:.1f}",
    "positions run": "{run_positions:,}",
    "rows visited": "{rows_visited:,.0f}",
    "peak GB": "{peak_bytes:.2f/1e9}",
    "GPU peak GB": "{device_peak_bytes:.2f/1e9}",
    "table GB": "{table_bytes:.3f/1e9}",
}


def measure_limited(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> Row:
    """The figures of one method, measured in this process with limited memory."""
    torch.set_num_threads(options.threads)
    try:
        with memory_limit(options.memory_limit_gb * 1e9, options.device):
            return measure(name, vocab_size, dtype, options)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return {"outcome": "memory"}


def measure_alone(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> Row:
    """The figures of one method, measured in a new process; its errors are printed to stderr."""
    row = {"vocab_size": vocab_size, "method": name, "dtype": dtype}
    shared = ("positions", "hidden", "steps", "memory_limit_gb", "seed", "threads")
    row |= {option: getattr(options, option) for option in shared}
    row |= {"time_limit_seconds": options.time_limit, "cpus": os.cpu_count()}
    figures, code = in_new_process(measure_limited, name, vocab_size, dtype, options)
    ended = {-signal.SIGALRM: "time", -signal.SIGKILL: "memory"}  # the latter by the system
    return row | (figures if figures else {"outcome": ended.get(code, f"failed: {code}")})


def measure_all(options: argparse.Namespace) -> list[Row]:
    """The rows of all measurements; a method that failed is not tried at larger N."""
    table = Table(COLUMNS, options.json, options.device.type)
    broken: set[tuple[str, str]] = set()
    for vocab_size, dtype in product(sorted(options.sizes), options.dtype):
        num_rows = len(table.rows)
        for name in options.methods:
            if (name, dtype) not in broken:
                row = measure_alone(name, vocab_size, dtype, options)
                table.add(row)
                if row["outcome"] != "done":
                    broken.add((name, dtype))
        check_losses(table.rows[num_rows:])
    return table.rows


def check_losses(rows: list[Row]) -> None:
    """Compare the losses of methods that should agree; raises SystemExit if they do not."""
    same = [row for row in rows if row["method"] in AGREEING and "loss" in row]
    for first, row in product(same[:1], same[1:]):
        tolerance = TOLERANCE[DTYPES[row["dtype"]]] * abs(first["loss"])
        if not abs(row["loss"] - first["loss"]) <= tolerance:
            raise SystemExit(
                f"scale: N = {row['vocab_size']:,}: loss of {row['method']} is"
                f" {row['loss']}, of {first['method']} {first['loss']}"
            )


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = reporting.benchmark_parser(__doc__)
    add = parser.add_argument
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    add("--sizes", type=int, nargs="+", default=sizes, metavar="N", help="numbers of words")
    add("--positions", type=int, default=2048, help=f"of a batch, a multiple of {NUM_SEQUENCES}")
    add("--hidden", type=int, default=300, metavar="H")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="dtype of the table")
    add("--steps", type=int, default=5, help="timed, after one to warm up")
    add("--memory-limit-gb", type=float, default=18.0, metavar="GB", help="limit of a process")
    add("--time-limit", type=float, default=60.0, metavar="SECONDS", help="limit of a step")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--seed", type=int, default=1)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    positive = ["positions", "hidden", "steps", "memory_limit_gb", "time_limit", "threads"]
    reporting.require_positive(parser, options, positive)
    if min(options.sizes) < 2:
        parser.error(f"--sizes must be at least 2, got {min(options.sizes)}")
    if options.positions % NUM_SEQUENCES:
        parser.error(f"--positions must be a multiple of {NUM_SEQUENCES}, got {options.positions}")
    options.device = torch.device(options.device)
    return options


def main() -> None:
    """Print a table; exit code 1 if a method failed for another reason than memory and time."""
    rows = measure_all(parse_options())
    if any(row["outcome"].startswith("failed") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
