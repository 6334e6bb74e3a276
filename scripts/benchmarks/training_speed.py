#!/usr/bin/env python
"""Whole training steps of a recipe with several output layers: tokens per second, side by side.

Forward, backward, clipping and optimizer step of the same model on the same batches, the output
layers in turn in one process; a figure is the median over the rounds. Ratios are to be read, not
absolute figures. An output layer is a name of output.tree, torch for the full softmax as one writes
it with torch.nn.functional, or none for a step without one, which no output layer can be faster
than; with settings of its own behind commas: two_level torch,train.matmul_precision=medium.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.errors import UserError
from data_prep.prepare import prepare
from lm.config import has_sparse_table, load_config
from lm.model.build_tree import build_tree
from lm.model.language_model import LanguageModel, State, build_model
from lm.training.batches import Batches
from lm.training.environment import processor_name
from lm.training.optimizers import build_optimizer, table_by_rows

FOLDERS = ("--data.", "--run_dir")
"""Options that say where things are on this machine; the log leaves them out."""


def torch_loss(
    model: LanguageModel, tokens: Tensor, targets: Tensor, state: State | None
) -> tuple[Tensor, State | None]:
    """`LanguageModel.loss` of a full softmax, in PyTorch's own functions."""
    hidden, state = model(tokens, state)
    logits = F.linear(hidden, model.output.weight, model.output.bias)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), state


def no_loss(
    model: LanguageModel, tokens: Tensor, targets: Tensor, state: State | None
) -> tuple[Tensor, State | None]:
    """In place of `LanguageModel.loss`: mean of the hidden vectors."""
    hidden, state = model(tokens, state)
    return hidden.float().mean(), state


def trainer(config_file: str, overrides: list[str], tree: str) -> Callable[[int], int]:
    """A function that trains on a batch, given its number, and returns the number of its tokens."""
    name, *own = tree.split(",")
    losses = {"torch": torch_loss, "none": no_loss}
    own = [f"output.tree={'full' if name in losses else name}", *own]
    overrides = [*overrides, *(f"--{option}" for option in own)]
    config = load_config(config_file, overrides)
    if config.train.precision not in ("32-true", "bf16-mixed"):
        raise UserError(f"bench_train knows 32-true and bf16-mixed, not {config.train.precision}")
    if config.train.accumulate != 1:
        raise UserError(f"bench_train knows no train.accumulate: {config.train.accumulate}")
    prepared = prepare(
        config.data, config.tokenizer, config.classes, config.prepared_path, progress=True
    )
    torch.manual_seed(config.seed)
    class_tree = build_tree(config, prepared)
    model = build_model(
        config.model,
        config.output,
        class_tree,
        config.train.seq_len,
        counts=torch.tensor(prepared.counts()),
        sparse=name != "torch" and has_sparse_table(config, class_tree.num_rows),
    )
    batches = Batches(
        prepared.tokens("train"),
        eos_id=prepared.eos_id,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        shuffle=not model.backbone.carries_state,
        seed=config.seed,
    )
    mixed = config.train.precision == "bf16-mixed"
    table = table_by_rows(model, config.optim)
    optimizer = build_optimizer(model, config.optim, table=table)
    loss_of = losses.get(name, LanguageModel.loss)
    carried: State | None = None

    def step(number: int) -> int:
        nonlocal carried
        torch.set_float32_matmul_precision(config.train.matmul_precision)
        batch = batches[number]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss, state = loss_of(
                model, batch.inputs, batch.targets, carried if batch.continues else None
            )
        torch.autograd.backward(loss)
        if config.optim.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        if state is not None and model.backbone.carries_state:
            carried = model.backbone.detach_state(state)
        return batch.targets.numel()

    return step


def main() -> None:
    """Print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Overrides of the configuration: --section.key=value.",
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--trees", nargs="+", default=["two_level", "full"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of each in a round")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines")
    options, overrides = parser.parse_known_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    steps = {tree: trainer(options.config, overrides, tree) for tree in options.trees}
    rates: dict[str, list[float]] = {tree: [] for tree in steps}
    for turn in range(options.rounds + 1):
        for tree, step in steps.items():
            start = time.perf_counter()
            tokens = sum(step(turn * options.steps + i) for i in range(options.steps))
            if turn:  # the first round warms up
                rates[tree].append(tokens / (time.perf_counter() - start))
    last = statistics.median(rates[options.trees[-1]])
    width = max(map(len, rates))
    print(f"{'tree':<{width}}   tokens/s  × {options.trees[-1]}")
    for tree, values in rates.items():
        median = statistics.median(values)
        print(f"{tree:<{width}} {median:10.0f}  {median / last:.2f}")
        if options.json:
            row = {
                "config": Path(options.config).name,
                "tree": tree,
                "tokens_per_second_median": median,
                "ratio": median / last,
                "ratio_to": options.trees[-1],
                "rounds": options.rounds,
                "threads": torch.get_num_threads(),
                "overrides": [each for each in overrides if not each.startswith(FOLDERS)],
                "torch": torch.__version__,
                "machine": processor_name(),
            }
            with open(options.json, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_train: {error}")
