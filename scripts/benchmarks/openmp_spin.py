"""Tokens per second of a small LSTM for several OpenMP settings, on a quiet and on a busy computer.

Each figure comes from a new process that trains an LSTM of 2 × 200 with a two-level softmax
of 10,000 words on random tokens. The settings take turns; a figure is the median over the rounds.
The loads are: none; one busy loop for each processor and one more; as many copies of the training
itself with libgomp's default settings. Read the ratios, not the absolute figures.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

from scripts.benchmarks.reporting import Column, Row, Table, benchmark_parser, require_positive

SETTINGS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "spin count 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin count 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "by load": {},
}
LOADS = ("none", "busy loops", "OpenMP programs")
COLUMNS = (
    Column("load", "load", width=16),
    Column("setting", "setting", width=18),
    Column("tokens/s", "tokens_per_second", ","),
    Column("÷ one thread", "ratio_to_one_thread", ".2f"),
    Column("÷ default", "ratio_to_default", ".2f"),
)
BATCH_SIZE, SEQ_LEN, HIDDEN, VOCAB_SIZE = 32, 35, 200, 10_000


def train(seconds: float) -> float:
    """Train for a while in this process; returns tokens per second, warm-up left out."""
    import torch

    from lm.output import ClassTree, HierarchicalSoftmax

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN)
    lstm = torch.nn.LSTM(HIDDEN, HIDDEN, num_layers=2)
    tree = ClassTree.two_level(torch.arange(VOCAB_SIZE) // 100)
    softmax = HierarchicalSoftmax(HIDDEN, tree)
    model = torch.nn.ModuleList([embedding, lstm, softmax])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    tokens = torch.randint(VOCAB_SIZE, (SEQ_LEN + 1, BATCH_SIZE))
    num_steps, start = 0, 0.0
    while num_steps < 3 or time.perf_counter() - start < seconds:
        if num_steps == 2:
            start = time.perf_counter()
        optimizer.zero_grad()
        hidden, _ = lstm(embedding(tokens[:-1]))
        torch.autograd.backward(softmax.loss(hidden, tokens[1:]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        num_steps += 1
    return (num_steps - 2) * SEQ_LEN * BATCH_SIZE / (time.perf_counter() - start)


def child(seconds: float, setting: dict[str, str]) -> subprocess.Popen[str]:
    """A process that trains under a setting and prints its tokens per second."""
    code = f"from scripts.benchmarks.openmp_spin import train; print(train({seconds}))"
    names = {name for values in SETTINGS.values() for name in values}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment | setting
    )


@contextmanager
def loaded(load: str) -> Iterator[None]:
    """Run other programs in the background."""
    count = 0 if load == "none" else (os.cpu_count() or 1) + 1
    if load == "busy loops":
        command = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(command, text=True) for _ in range(count)]
    else:
        others = [child(600, SETTINGS["libgomp's default"]) for _ in range(count)]
        time.sleep(5 if count else 0)  # until they train
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(settings: Sequence[str], seconds: float, rounds: int) -> list[Row]:
    """A row for each load and setting."""
    rates: dict[tuple[str, str], list[float]] = {pair: [] for pair in product(LOADS, settings)}
    for _, load in product(range(rounds), LOADS):
        with loaded(load):
            for setting in settings:
                printed, _ = child(seconds, SETTINGS[setting]).communicate()
                rates[load, setting].append(float(printed))
    medians = {pair: statistics.median(values) for pair, values in rates.items()}
    return [
        {
            "load": load,
            "setting": setting,
            "tokens_per_second": round(rate),
            "ratio_to_one_thread": round(rate / medians[load, "one thread"], 3),
            "ratio_to_default": round(rate / medians[load, "libgomp's default"], 3),
            "cpus": os.cpu_count(),
            "rounds": rounds,
        }
        for (load, setting), rate in medians.items()
    ]


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each training process")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    require_positive(parser, options, ["seconds", "rounds"])
    settings = dict.fromkeys(["one thread", "libgomp's default", *options.settings])
    table = Table(COLUMNS, options.json)
    for row in measure(list(settings), options.seconds, options.rounds):
        table.add(row)


if __name__ == "__main__":
    main()
