"""Tokens per second of whole training steps of a recipe with several output layers.

A step is that of the training loop: forward, backward, clipping and the optimizer's update of the
same model on the same batches. The output layers run in turn in one process; a figure is the median
over the rounds, and the ratio is relative to the last output layer. Compare ratios, not absolute
figures. An output layer is a value of `output.tree`, `torch` for the full softmax written with
torch.nn.functional, or `none` for a step without an output layer, the upper bound for all of them.
Overrides of one layer follow its name after commas: two_level torch,train.matmul_precision=medium.

On a GPU, steps are recorded as a CUDA graph unless train.cuda_graph is off; the column "graph" says
whether they were. Those that were not are profiled: seconds of each kernel, and of all ("device").
"""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.commands.arguments import at_least_one
from lm.config import changed, load_config
from lm.device import keep_freed_memory, set_num_threads
from lm.output import HierarchicalSoftmax
from lm.output.inputs import followed_by_zeros
from lm.run import Run
from lm.training.batches import make_batches
from lm.training.devices import build_fabric
from lm.training.loop import train_step
from lm.training.state import TrainingState
from scripts import run
from scripts.benchmarks.measure import kernels
from scripts.benchmarks.reporting import Row, Table, benchmark_parser


def torch_loss(output: HierarchicalSoftmax, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss of a full softmax by PyTorch's functions."""
    logits = F.linear(followed_by_zeros(hidden, output.weight.shape[1]), output.weight, output.bias)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def no_loss(output: HierarchicalSoftmax, hidden: Tensor, targets: Tensor) -> Tensor:
    """The mean of the hidden vectors, in place of a loss."""
    return hidden.float().mean()


LOSSES = {"torch": torch_loss, "none": no_loss}
"""Computes a scalar from the output layer, hidden [T, B, H] and targets [T, B]."""


def start_training(
    config_file: str, overrides: list[str], layer: str, num_steps: int
) -> TrainingState:
    """The state of a new run of a recipe with an output layer, `layer` of the command line."""
    name, *others = layer.split(",")
    chosen = [f"output.tree={'full' if name in LOSSES else name}"]
    chosen += ["word_table.gradients=dense"] if name == "torch" else []
    config = changed(load_config(config_file, overrides), [f"--{o}" for o in [*chosen, *others]])
    set_num_threads(config.train.threads)
    run = Run(config).prepare()
    keep_freed_memory()
    fabric, batches = build_fabric(run), make_batches(run.config, run.prepared)
    batches.num_steps = num_steps
    state = TrainingState(fabric, run, batches, None)
    if name in LOSSES:
        output = cast(HierarchicalSoftmax, state.model.output)
        output.loss = partial(LOSSES[name], output)  # type: ignore[method-assign]
    return state


def time_in_turn(
    states: Mapping[str, TrainingState], num_rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Tokens per second of each run in each round of a few steps, after a round to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in states}
    for turn in range(num_rounds + 1):
        for name, state in states.items():
            before, start = state.progress.tokens_done, time.perf_counter()
            torch.set_float32_matmul_precision(state.config.train.matmul_precision)
            for _ in range(num_steps):
                train_step(state)
            if state.fabric.device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds = time.perf_counter() - start
                rates[name].append((state.progress.tokens_done - before) / seconds)
    return rates


def profiled(state: TrainingState) -> Row:
    """The kernels of a step on a GPU, unless it is recorded, and their seconds."""
    if state.fabric.device.type != "cuda" or state.graph.is_recorded:
        return {}
    found = kernels(partial(train_step, state))
    return {"device_seconds": sum(row["seconds"] for row in found), "kernels": found}


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__, "Overrides of the configuration: --section.key=value.")
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--trees", nargs="+", default=["two_level", "full"])
    parser.add_argument("--rounds", type=at_least_one, default=20)
    parser.add_argument("--steps", type=at_least_one, default=5, help="steps of each in a round")
    parser.add_argument("--threads", type=at_least_one, help="CPU threads")
    options, overrides = parser.parse_known_args()
    overrides += [f"--train.threads={options.threads}"] if options.threads else []
    states = {
        layer: start_training(
            options.config, overrides, layer, (options.rounds + 1) * options.steps
        )
        for layer in options.trees
    }
    rates = time_in_turn(states, options.rounds, options.steps)
    reference = options.trees[-1]
    columns = {
        "tree": "{tree}",
        "graph": "{graph}",
        "tokens/s": "{tokens_per_second_median:,.0f}",
        f"÷ {reference}": "{ratio:.2f}",
        "ms a step": "{step_seconds:.3f/1e-3}",
        "device": "{device_seconds:.3f/1e-3}",
    }
    table = Table(columns, options.json, states[reference].fabric.device.type)
    for layer, values in rates.items():
        state, rate = states[layer], statistics.median(values)
        train = state.config.train
        table.add(
            {
                "config": Path(options.config).name,
                "precision": train.precision,
                "tree": layer,
                "vocab_size": state.model.vocab_size,
                "batch_size": train.batch_size,
                "seq_len": train.seq_len,
                "graph": state.graph.is_recorded,
                "tokens_per_second_median": rate,
                "step_seconds": train.accumulate * train.batch_size * train.seq_len / rate,
                "ratio": rate / statistics.median(rates[reference]),
                "ratio_to": reference,
                "rounds": options.rounds,
                **profiled(state),
            }
        )


if __name__ == "__main__":
    run(main)
