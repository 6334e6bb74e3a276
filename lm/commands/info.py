"""`lm info`: sizes, cost and memory of a run."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from lm.commands.arguments import JSON, SOURCE
from lm.run import Run

HELP = "sizes, cost and memory of a run"
OPTIONS = SOURCE | JSON


def run(options: argparse.Namespace) -> None:
    """Print the figures, by name; allocates no weights."""
    run = Run.read(options.source, options.overrides)
    run.check_classes()
    from lm.training.batches import make_batches
    from lm.training.memory_estimate import estimate_memory

    config, tree, parameters = run.config, run.tree, run.model_without_weights.num_parameters()
    memory, available = estimate_memory(run), run.available_bytes
    values: dict[str, Any] = {
        "name": config.name,
        "run_dir": str(run.folder),
        "backbone": config.model.backbone,
        "layers": config.model.layers,
        "hidden": config.model.hidden,
        "vocab_size": run.prepared.vocab_size,
        "tree": config.output.tree,
    }
    if tree is not None:
        values |= {
            "tree_nodes": tree.num_nodes,
            "tree_depth": tree.depth,
            "columns_per_token_at_most": tree.max_path_columns,
        }
    values |= {
        "train_tokens": run.prepared.splits["train"].tokens,
        "batches_per_epoch": make_batches(config, run.prepared).per_epoch,
        **{f"{name}_parameters": count for name, count in parameters.items() if count},
        "parameters": sum(parameters.values()),
        "row_wise_gradients": run.word_table.row_wise,
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in asdict(memory).items()},
        "memory_mib": round(memory.total / 2**20, 1),
        "memory_available_mib": None if available is None else round(available / 2**20, 1),
    }
    if options.json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key:<{width}}  {value:,}" if type(value) is int else f"{key:<{width}}  {value}")
