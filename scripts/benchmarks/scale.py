"""Cost of a training step as the vocabulary grows.

A step is forward, backward and the optimizer's update. Its cost is that of the rows that a batch
visits, not of all N rows. The methods:

  layer    the output layer alone: row-wise gradients, row-wise Adagrad
  step     a whole language model (LSTM, tied, 32 sequences): forward, backward, clipping, AdamW of
           the backbone, row-wise Adagrad of the word table

On a GPU, and with --dtype bf16, the forward runs under autocast to bf16, as with `train.precision:
bf16-mixed`: hidden vectors are bf16. On a GPU, `layer` is also timed as a CUDA graph, and rows have
the seconds of each kernel.

Words are drawn by inverse rank (Zipf) for each step, outside the timed region; √N classes have
equal sums of √count. Every measurement is a process, whose memory the operating system limits.

A figure is the median over the steps after the first. On a shared machine CPU seconds are steadier
than wall-clock seconds. The peak is that of the whole process, including about 0.4 GB of libraries.
The rows visited belong to the root and the targets' classes; `step` also visits the rows that it
reads as input vectors. The benchmark runs on Linux only.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm.device import process_bytes
from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import row_size
from lm.output.backends.visits import route
from lm.output.rowwise import RowAdagrad
from scripts.benchmarks import reporting
from scripts.benchmarks.measure import DTYPES, in_new_process, kernels, memory_limit
from scripts.benchmarks.methods import captured, parameter, zipf
from scripts.benchmarks.reporting import Row, Table

if TYPE_CHECKING:  # `step` alone needs more than torch
    from lm.config import WordTable
    from lm.model.language_model import LanguageModel

NUM_SEQUENCES = 32
"""Sequences of the batch that `step` reads."""
LEARNING_RATE = 0.1
INIT_RANGE = 0.05
"""Weights are initialised uniformly in ±INIT_RANGE."""
COLUMNS = {
    "N": "{vocab_size:,}",
    "method": "{method}",
    "dtype": "{dtype}",
    "s/step": "{seconds:.4f}",
    "CUDA graph": "{graph_seconds:.4f}",
    "CPU s": "{cpu_seconds:.4f}",
    "µs/position": "{microseconds_per_position:.1f}",
    "positions run": "{run_positions:,}",
    "rows visited": "{rows_visited:,.0f}",
    "peak GB": "{process_peak_bytes:.2f/1e9}",
    "GPU peak GB": "{device_peak_bytes:.2f/1e9}",
    "table GB": "{table_bytes:.3f/1e9}",
}


class Task:
    """The input of a method."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        num_steps, num_positions = options.steps + 1, options.positions
        words, counts = zipf(vocab_size, num_steps * 2 * num_positions)
        self.dtype = dtype  # the table's
        # Whether a step is one of `train.precision: bf16-mixed`.
        self.is_mixed = options.device.type == "cuda" or dtype == torch.bfloat16
        mass = counts.double().sqrt()
        middle = mass.cumsum(0) - mass / 2
        word_class = (middle * (round(math.sqrt(vocab_size)) / mass.sum())).long()
        self.tree = ClassTree.two_level(word_class).to(options.device)
        # [steps, 2, P]: input words and target words of each step
        self.words = words.view(num_steps, 2, num_positions).to(options.device)
        hidden = torch.randn(num_positions, options.hidden)
        self.hidden = hidden.to(options.device).requires_grad_()  # [P, H] fp32

    def loss(self, method: "Method", words: Tensor) -> Tensor:
        """The method's loss, under autocast to bf16 where users train so."""
        with torch.autocast(self.hidden.device.type, torch.bfloat16, enabled=self.is_mixed):
            return method.loss(words)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """Rows [R, W] and biases [R], with the same numbers for every method; zeros from H on."""
        size = self.hidden.shape[1]
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.hidden.device}
        weight = torch.zeros(self.tree.num_rows, row_size(size), **like)
        bias = torch.empty(self.tree.num_rows, **like)
        for tensor in (weight[:, :size], bias):
            tensor.uniform_(-INIT_RANGE, INIT_RANGE)
        return weight, bias


class Method(NamedTuple):
    """One way to make a step."""

    loss: Callable[[Tensor], Tensor]  # from words [2, P] to the mean over the positions
    update: Callable[[], object]  # applies the gradients to the weights and clears them


def layer(task: Task) -> Method:
    """The output layer alone."""
    weight, bias = map(parameter, task.table)

    def loss(words: Tensor) -> Tensor:
        return hierarchical_cross_entropy(
            task.hidden, weight, words[1], task.tree, bias, row_wise=True
        )

    return Method(loss, _update(RowAdagrad([weight, bias], LEARNING_RATE)))


def step(task: Task, model: "LanguageModel | None" = None) -> Method:
    """A whole language model of this project, by default `step_model(task)`."""
    from lm.config import OptimConfig
    from lm.training.optimizers import build_optimizer

    model = model or step_model(task)
    optim = OptimConfig(optimizer="adamw", clip=1.0)
    update = _update(build_optimizer(model, optim, _word_table(task)))

    def loss(words: Tensor) -> Tensor:
        inputs, targets = words.view(2, -1, NUM_SEQUENCES)
        return model.loss(inputs, targets)[0]

    def clip_and_update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        update()

    return Method(loss, clip_and_update)


def step_model(task: Task) -> "LanguageModel":
    """The language model of `step`: one LSTM layer, tied rows."""
    from lm.config import ModelConfig, OutputConfig
    from lm.model.build import build_model

    num_positions, size = task.hidden.shape
    config = ModelConfig(hidden=size, layers=1, init_range=INIT_RANGE)
    context = num_positions // NUM_SEQUENCES
    with task.hidden.device:
        return build_model(config, OutputConfig(), _word_table(task), task.tree, context)


def _word_table(task: Task) -> "WordTable":
    from lm.config import WordTable

    dtype: Literal["fp32", "bf16"] = "bf16" if task.dtype == torch.bfloat16 else "fp32"
    return WordTable(tied=True, dtype=dtype, row_wise=True, optimizer="adagrad", lr=LEARNING_RATE)


def _update(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


METHODS: dict[str, Callable[[Task], Method]] = {"layer": layer, "step": step}


def visited_rows(task: Task, words: Tensor, *, reads_inputs: bool) -> int:
    """Distinct rows of the nodes on paths of targets, and rows read as input vectors."""
    tree = task.tree
    inputs, targets = words
    node = route(targets, tree.arrays, tree.depth, ignore_index=-100).node
    nodes = torch.unique(node[node >= 0])
    visited = int(tree.num_children[nodes].sum())
    if reads_inputs:
        row = torch.unique(tree.row_of_word[inputs])
        visited += int((~torch.isin(tree.node_of_row[row], nodes)).sum())
    return visited


class Timing(NamedTuple):
    """Wall-clock seconds and CPU seconds of one step, and its loss."""

    wall: float
    cpu: float
    loss: float


def make_step(task: Task, method: Method, words: Tensor) -> Tensor:
    """Make a step; returns its loss."""
    task.hidden.grad = None
    loss = task.loss(method, words)
    torch.autograd.backward(loss)
    method.update()
    return loss.detach()


def timed(task: Task, method: Method, words: Tensor) -> Timing:
    """Make a step."""
    start = time.perf_counter(), time.process_time()
    value = float(make_step(task, method, words))
    if task.hidden.is_cuda:
        torch.cuda.synchronize()
    stop = time.perf_counter(), time.process_time()
    return Timing(stop[0] - start[0], stop[1] - start[1], value)


def on_the_device(task: Task, method: Method, *, records: bool) -> dict[str, Any]:
    """Seconds of a step as a CUDA graph if it `records`, and the kernels of one that runs as it is.

    A graph that does not fit into memory has no seconds.
    """
    words, seconds = task.words[0].clone(), list[float]()

    def step() -> None:
        make_step(task, method, words)

    if records:
        torch.cuda.empty_cache()
        with suppress(torch.OutOfMemoryError):
            graph = captured(step, torch.cuda.synchronize)
            for each in task.words[1:]:
                words.copy_(each)
                torch.cuda.synchronize()
                start = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
    return {
        "graph_seconds": statistics.median(seconds) if seconds else None,
        "kernels": kernels(step),
    }


def measure(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> Row:
    """The figures of one method, measured in this process."""
    task = Task(vocab_size, DTYPES[dtype], options)
    method = METHODS[name](task)
    times = [timed(task, method, words) for words in task.words]
    seconds = statistics.median(timing.wall for timing in times[1:])
    reads_inputs = name == "step"
    visited = [visited_rows(task, words, reads_inputs=reads_inputs) for words in task.words[1:]]
    peak = torch.cuda.max_memory_allocated() if task.hidden.is_cuda else None
    figures = on_the_device(task, method, records=name == "layer") if task.hidden.is_cuda else {}
    return {
        **figures,
        "outcome": "done",
        "precision": "bf16-mixed" if task.is_mixed else "32-true",
        "seconds": seconds,
        "cpu_seconds": statistics.median(timing.cpu for timing in times[1:]),
        "run_positions": options.positions,
        "microseconds_per_position": 1e6 * seconds / options.positions,
        "rows_visited": statistics.median(visited),
        "process_peak_bytes": process_bytes("VmHWM"),
        "device_peak_bytes": peak,
        "table_bytes": task.tree.num_rows * options.hidden * DTYPES[dtype].itemsize,
        "num_rows": task.tree.num_rows,
        "loss": times[0].loss,
    }


def measure_limited(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> Row:
    """The figures of one method, measured in this process with limited memory."""
    torch.set_num_threads(options.threads)
    with memory_limit(options.memory_limit_gb * 1e9, options.device):
        return measure(name, vocab_size, dtype, options)


def measure_alone(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> Row:
    """The figures of one method, measured in a new process; raises SystemExit if it fails."""
    row = {"vocab_size": vocab_size, "method": name, "dtype": dtype, "cpus": os.cpu_count()}
    shared = ("positions", "hidden", "steps", "memory_limit_gb", "threads")
    row |= {option: getattr(options, option) for option in shared}
    figures, code = in_new_process(measure_limited, name, vocab_size, dtype, options)
    if figures is None:
        raise SystemExit(f"scale: {name} at {vocab_size:,} words ended with exit code {code}")
    return row | figures


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    from lm.commands.arguments import at_least_one  # not in the measured processes

    parser = reporting.benchmark_parser(__doc__)
    add = parser.add_argument
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    add("--sizes", type=int, nargs="+", default=sizes, metavar="N", help="numbers of words")
    of_batch = f"of a batch, a multiple of {NUM_SEQUENCES}"
    add("--positions", type=at_least_one, default=2048, help=of_batch)
    add("--hidden", type=at_least_one, default=300, metavar="H")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="dtype of the table")
    add("--steps", type=at_least_one, default=5, help="timed, after one to warm up")
    add("--memory-limit-gb", type=float, default=18.0, metavar="GB", help="limit of a process")
    add("--threads", type=at_least_one, default=1, help="CPU threads")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if not options.memory_limit_gb > 0:
        parser.error(f"--memory-limit-gb must be positive, got {options.memory_limit_gb}")
    if min(options.sizes) < 2:
        parser.error(f"--sizes must be at least 2, got {min(options.sizes)}")
    if options.positions % NUM_SEQUENCES:
        parser.error(f"--positions must be a multiple of {NUM_SEQUENCES}, got {options.positions}")
    options.device = torch.device(options.device)
    return options


def main() -> None:
    """Print a table, and write a log if asked."""
    options = parse_options()
    table = Table(COLUMNS, options.json, options.device.type)
    for vocab_size, dtype, name in product(sorted(options.sizes), options.dtype, options.methods):
        table.add(measure_alone(name, vocab_size, dtype, options))


if __name__ == "__main__":
    main()
