"""Where the time of a training step goes, and what the training loop adds to a plain one.

The loop of `lm train` runs as it is, with its logger. After every few of its steps, a loop of plain
PyTorch makes as many steps with a model of its own, built from the same configuration, and both
exchange places again: forward under autocast, backward, `clip_grad_norm_`, the optimizer's step.
Overhead is the time of ours over that of the plain loop, less 1; a figure is the median over these
rounds, the first of which warm up. The parts of a step of ours:

  data          a batch is made from the token file
  embedding     input vectors, forward and backward
  backbone      from input vectors to hidden vectors, forward and backward
  layer         from hidden vectors to the loss, forward and backward
  clipping      of gradients
  optimizer     the update
  loop          the rest: learning rate, clock, signals, loggers

System time (mostly first touches of memory) is that of the process, relative to its user time, over
all rounds but the first. Overrides of the configuration: --section.key=value.
"""

import argparse
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lm.model.language_model import State
from lm.training import loop
from lm.training.loggers import Logger, MetricsFile
from lm.training.shards import clip_gradients
from lm.training.signals import StopSignals
from lm.training.state import TrainingState
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive
from scripts.benchmarks.training_speed import start_training
from scripts.reproduction.figures import PARTS

COLUMNS = {
    "N": "{vocab_size:,}",
    "tree": "{tree}",
    "milliseconds": "{seconds:.2f/1e-3}",
    "overhead, %": "{overhead:.1f/0.01}",
    "system ÷ user, %": "{system_share:.1f/0.01}",
    **{f"{part}, %": f"{{{part}:.1f/0.01}}" for part in PARTS},
}


class Stopwatch:
    """Adds the time since its last mark to a part, in one round after another."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = [defaultdict(float)]
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """A part of a step ends."""
        now = time.perf_counter()
        self.rounds[-1][part] += now - self._last
        self._last = now

    def resume(self) -> None:
        """What ran since the last mark belongs to no part; a round begins."""
        self.rounds.append(defaultdict(float))
        self._last = time.perf_counter()


def after(action: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
    """The action, followed by a mark."""

    def marked(*arguments: Any, **options: Any) -> Any:
        result = action(*arguments, **options)
        mark()
        return result

    return marked


def mark_parts(state: TrainingState, watch: Stopwatch) -> list[Any]:
    """Let the parts of a step mark their ends; returns the patches of the loop to apply."""
    model, fabric = state.model, state.fabric

    def marking(part: str) -> Callable[..., None]:
        return lambda *_: watch.mark(part)

    def embedded(_: Any, arguments: tuple[Tensor, ...]) -> None:
        watch.mark("embedding")
        if arguments[0].requires_grad:
            arguments[0].register_hook(marking("backbone"))  # type: ignore[no-untyped-call]

    def hidden(_: Any, arguments: Any, output: tuple[Tensor, Any]) -> None:
        watch.mark("backbone")
        if output[0].requires_grad:
            output[0].register_hook(marking("layer"))  # type: ignore[no-untyped-call]

    model.backbone.register_forward_pre_hook(embedded)  # type: ignore[attr-defined]
    model.backbone.register_forward_hook(hidden)  # type: ignore[attr-defined]
    model.output.loss = after(model.output.loss, marking("layer"))  # type: ignore[method-assign]
    state.next_batches = after(state.next_batches, marking("data"))  # type: ignore[method-assign]
    fabric.backward = after(fabric.backward, marking("embedding"))  # type: ignore[method-assign]
    state.optimizer.step = after(state.optimizer.step, marking("optimizer"))
    clip = after(clip_gradients, marking("clipping"))
    train_step = loop.train_step

    def marked_step(of: TrainingState) -> float:
        watch.mark("loop")
        return train_step(of)

    patched = {"clip_gradients": clip, "train_step": marked_step}
    return [mock.patch.object(loop, name, value) for name, value in patched.items()]


def plain_steps(state: TrainingState) -> Iterator[None]:
    """Training in plain PyTorch, a step at a time."""
    model, batches, config = state.model, state.batches, state.config
    optimizer: torch.optim.Optimizer = state.optimizer.optimizer
    carried: State | None = None
    for number in range(batches.num_steps or 0):
        batch = batches[number]
        with torch.autocast("cpu", torch.bfloat16, config.train.precision == "bf16-mixed"):
            loss, carried = model.loss(batch.inputs, batch.targets, carried)
        carried = None if carried is None else tuple(part.detach() for part in carried)
        torch.autograd.backward(loss)
        if config.optim.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        yield


class Rounds(Logger):
    """After every `num_steps` steps of ours, as many of the plain loop."""

    def __init__(self, watch: Stopwatch, plain: Iterator[None], num_steps: int) -> None:
        self.watch, self._plain, self._num_steps = watch, plain, num_steps
        self.plain_seconds: list[float] = []
        self.cpu: list[tuple[float, float]] = []  # user and system seconds of each round
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def step(self, step: int) -> None:
        """Run the plain loop and begin a new round if it is time."""
        if step % self._num_steps:
            return
        self.watch.mark("loop")
        before, usage = self._usage, resource.getrusage(resource.RUSAGE_SELF)
        self.cpu.append((usage.ru_utime - before.ru_utime, usage.ru_stime - before.ru_stime))
        start = time.perf_counter()
        for _ in range(self._num_steps):
            next(self._plain)
        self.plain_seconds.append(time.perf_counter() - start)
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self.watch.resume()


def measure(tree: str, overrides: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one output layer."""
    num_steps = (options.rounds + 1) * options.steps
    overrides = [*overrides, f"--train.max_steps={num_steps}"]
    ours, other = (start_training(options.config, overrides, tree, num_steps) for _ in range(2))
    torch.set_float32_matmul_precision(ours.config.train.matmul_precision)
    ours.run.prepared.splits.pop("valid", None)
    watch = Stopwatch()
    rounds = Rounds(watch, plain_steps(other), options.steps)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        for patch in (*mark_parts(ours, watch), mock.patch.object(ours, "save")):
            stack.enter_context(patch)
        loggers = [MetricsFile(Path(folder, "metrics.csv"), 0), rounds]
        with StopSignals() as signals:
            loop._fit(ours, loggers, signals, stop_after_validation=False)
    seconds = [sum(parts.values()) for parts in watch.rounds[1:-1]]
    pairs = zip(seconds, rounds.plain_seconds[1:], strict=True)
    user, system = map(sum, zip(*rounds.cpu[1:], strict=True))
    return {
        "config": Path(options.config).name,
        "precision": ours.config.train.precision,
        "vocab_size": ours.model.vocab_size,
        "tree": tree,
        "seconds": statistics.median(seconds) / options.steps,
        "overhead": statistics.median(own / plain for own, plain in pairs) - 1,
        "system_share": system / user,
        **{
            part: statistics.median(
                parts[part] / sum(parts.values()) for parts in watch.rounds[1:-1]
            )
            for part in PARTS
        },
        "rounds": options.rounds,
        "steps": options.steps,
    }


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__, takes_config=True)
    parser.add_argument("--trees", nargs="+", default=["two_level"], help="as of training_speed")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of each loop in a round")
    parser.add_argument("--threads", type=int, help="CPU threads")
    options, overrides = parser.parse_known_args()
    require_positive(parser, options, ["rounds", "steps", "threads"])
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(COLUMNS, options.json)
    for tree in options.trees:
        table.add(measure(tree, overrides, options))


if __name__ == "__main__":
    run(main)
