"""`lm info`: sizes, cost and memory of a run."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from lm.commands.arguments import add_json, add_source
from lm.run import Run

HELP = "sizes, cost and memory of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_source(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Print the figures, by name."""
    run = Run.read(options.source, options.overrides)
    run.check_classes()
    values = describe(run)
    if options.json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key:<{width}}  {value:,}" if type(value) is int else f"{key:<{width}}  {value}")


def describe(run: Run) -> dict[str, Any]:
    """Name → value of the sizes, the cost and the memory of a run; allocates no weights."""
    from lm.output import HierarchicalSoftmax
    from lm.training.batches import training_batches
    from lm.training.memory_estimate import estimate_memory

    config, tree, vocab_size = run.config, run.tree, run.prepared.vocab_size
    model = run.model_without_weights
    parameters = {
        name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()
    }
    if isinstance(model.output, HierarchicalSoftmax):  # the zeros after its rows are not trained
        parameters["output"] -= model.output.weight[:, config.model.hidden :].numel()
    memory, available = estimate_memory(run), run.available_bytes
    tree_figures = {}
    if tree is not None:
        tree_figures = {
            "tree_nodes": tree.num_nodes,
            "tree_depth": tree.depth,
            "columns_per_token_at_most": tree.max_path_columns,
        }
    return {
        "name": config.name,
        "run_dir": str(run.folder),
        "backbone": config.model.backbone,
        "layers": config.model.layers,
        "hidden": config.model.hidden,
        "vocab_size": vocab_size,
        "tree": config.output.tree,
        **tree_figures,
        "train_tokens": run.prepared.splits["train"].tokens,
        "batches_per_epoch": training_batches(config, run.prepared).per_epoch,
        **{f"{name}_parameters": count for name, count in parameters.items() if count},
        "parameters": sum(parameters.values()),
        "row_wise_gradients": run.word_table.row_wise,
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in asdict(memory).items()},
        "memory_mib": round(memory.total / 2**20, 1),
        "memory_available_mib": None if available is None else round(available / 2**20, 1),
    }
