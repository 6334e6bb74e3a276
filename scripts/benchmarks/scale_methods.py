"""The task that `scale` poses, the ways to make its training step, and their time."""

import argparse
import math
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import row_size
from lm.output.backends.visits import route
from lm.output.rowwise import RowAdagrad
from scripts.benchmarks import methods
from scripts.benchmarks.measure import DTYPES, PROCESS, kernels, proc_bytes
from scripts.benchmarks.methods import captured, parameter, zipf

if TYPE_CHECKING:  # `step` alone needs more than torch
    from lm.config import WordTable
    from lm.model.language_model import LanguageModel

NUM_SEQUENCES = 32
"""Sequences of the batch that `step` reads."""
LEARNING_RATE = 0.1
INIT_RANGE = 0.05
"""Weights are initialised uniformly in ±INIT_RANGE."""
ROWS_AT_ONCE = 1 << 16
"""Rows initialised at a time."""
LOOP_POSITIONS = 16
"""Positions that `loop` is run on; its time is proportional to their number."""


class Task:
    """The input of the method `name`."""

    def __init__(
        self, name: str, vocab_size: int, dtype: torch.dtype, options: argparse.Namespace
    ) -> None:
        torch.manual_seed(options.seed)
        num_steps, num_positions = options.steps + 1, options.positions
        words, counts = zipf(vocab_size, num_steps * 2 * num_positions)
        tree = ClassTree.full(vocab_size) if name == "full" else rank_tree(counts)
        self.dtype = dtype  # the table's
        self.is_mixed = is_mixed(options.device, dtype)
        self.tree = tree.to(options.device)
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
            for rows in torch.split(tensor, ROWS_AT_ONCE):
                drawn = torch.empty(rows.shape, device=self.hidden.device)
                rows.copy_(drawn.uniform_(-INIT_RANGE, INIT_RANGE))
        return weight, bias

    @property
    def peer_table(self) -> tuple[Tensor, Tensor]:
        """Rows [R, H] and biases [R]."""
        weight, bias = self.table
        return weight[:, : self.hidden.shape[1]], bias


def is_mixed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step is one of `train.precision: bf16-mixed`: on a GPU, and with a bf16 table."""
    return device.type == "cuda" or dtype == torch.bfloat16


class Method(NamedTuple):
    """One way to make a step."""

    loss: Callable[[Tensor], Tensor]  # from words [2, P'] to the mean of the first P' positions
    update: Callable[[], object]  # applies the gradients to the weights and clears them


def rank_classes(counts: Tensor) -> Tensor:
    """Class of each word [N]: √N intervals of ranks with equal sums of √count."""
    mass = counts.double().sqrt()
    middle = mass.cumsum(0) - mass / 2
    return (middle * (round(math.sqrt(len(counts))) / mass.sum())).long()


def rank_tree(counts: Tensor) -> ClassTree:
    """The tree of two levels with `rank_classes`, whose rows are in the order of the words."""
    sizes = torch.bincount(rank_classes(counts))
    sizes = sizes[sizes > 0]
    num_classes = len(sizes)
    num_children = torch.cat([torch.tensor([num_classes]), sizes])
    row_of_word = num_classes + torch.arange(len(counts))
    return ClassTree(num_children, torch.arange(-1, num_classes), row_of_word)


def ours(task: Task, optimizer: Callable[..., torch.optim.Optimizer], *, row_wise: bool) -> Method:
    """This project's layer alone."""
    weight, bias = map(parameter, task.table)

    def loss(words: Tensor) -> Tensor:
        hidden = task.hidden[: words.shape[1]]
        return hierarchical_cross_entropy(
            hidden, weight, words[1], task.tree, bias, row_wise=row_wise
        )

    return Method(loss, _update(optimizer([weight, bias], LEARNING_RATE)))


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


def peer(task: Task, build: Callable[[ClassTree, Tensor, Tensor], methods.Layer]) -> Method:
    """A layer of `methods`, with dense gradients."""
    compute, parameters = build(task.tree, *task.peer_table)

    def loss(words: Tensor) -> Tensor:
        return compute(task.hidden[: words.shape[1]].to(task.dtype), words[1])

    return Method(loss, _update(torch.optim.SGD(parameters, LEARNING_RATE)))


def _update(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


METHODS: dict[str, Callable[[Task], Method]] = {
    "layer": partial(ours, optimizer=RowAdagrad, row_wise=True),
    "step": step,
    "dense": partial(ours, optimizer=torch.optim.SGD, row_wise=False),
    "full": partial(peer, build=methods.full),
    "gather": partial(peer, build=methods.gather),
    "loop": partial(peer, build=methods.loop),
}


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


def timed(task: Task, method: Method, words: Tensor, limit: float) -> Timing:
    """Make a step; the operating system ends the process after `limit` seconds."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    start = time.perf_counter(), time.process_time()
    value = float(make_step(task, method, words))
    if task.hidden.is_cuda:
        torch.cuda.synchronize()
    stop = time.perf_counter(), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 0)
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
        "kernels": kernels(step, on_gpu=task.hidden.is_cuda),
    }


def measure(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one method, measured in this process."""
    num_positions = options.positions
    task = Task(name, vocab_size, DTYPES[dtype], options)
    method = METHODS[name](task)
    num_run = min(LOOP_POSITIONS, num_positions) if name == "loop" else num_positions
    with torch.no_grad():
        first_loss = None if num_run == num_positions else float(task.loss(method, task.words[0]))
    times = [timed(task, method, words[:, :num_run], options.time_limit) for words in task.words]
    scale = num_positions / num_run
    seconds = scale * statistics.median(timing.wall for timing in times[1:])
    reads_inputs = name == "step"
    visited = [visited_rows(task, words, reads_inputs=reads_inputs) for words in task.words[1:]]
    peak = torch.cuda.max_memory_allocated() if task.hidden.is_cuda else None
    figures = on_the_device(task, method, records=name == "layer") if task.hidden.is_cuda else {}
    return {
        **figures,
        "outcome": "time" if seconds > options.time_limit else "done",
        "precision": "bf16-mixed" if task.is_mixed else "32-true",
        "seconds": seconds,
        "cpu_seconds": scale * statistics.median(timing.cpu for timing in times[1:]),
        "run_positions": num_run,
        "microseconds_per_position": 1e6 * seconds / num_positions,
        "rows_visited": statistics.median(visited),
        "peak_bytes": proc_bytes(PROCESS / "status", "VmHWM"),
        "device_peak_bytes": peak,
        "table_bytes": task.tree.num_rows * options.hidden * DTYPES[dtype].itemsize,
        "num_rows": task.tree.num_rows,
        "loss": times[0].loss if first_loss is None else first_loss,
    }
