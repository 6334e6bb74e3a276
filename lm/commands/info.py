"""`lm info`: sizes, cost and memory of a run."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from lm.commands.arguments import JSON, SOURCE, SWITCH, Options
from lm.run import Run

HELP = "sizes, cost and memory of a run"
_TREES: Options = {
    "--trees": SWITCH | {"help": "rank trees by their predicted time for the words of this run"}
}
OPTIONS = SOURCE | _TREES | JSON
_DECODING = "sample_ms", "topk_ms"
_TREE_TITLES = (
    "output layer, ms  ratio  depth      nodes  columns/token  rows/batch  sample, ms  top-10, ms"
    "     MiB  tree"
)
_TREE = (
    "{step_ms:16.2f}  {ratio:5.2f}  {depth:5}  {nodes:9,}  {columns:13,.0f}  {visited_rows:10,.0f}"
    "  {sample_ms:>10}  {topk_ms:>10}  {memory_mib:6,.0f}  {tree}"
)


def run(options: argparse.Namespace) -> None:
    """Print the figures, by name; allocates no weights."""
    run = Run.read(options.source, options.overrides)
    run.choose_tree()
    if options.trees:
        _print_trees(run, as_json=options.json)
        return
    run.check_classes()
    from lm.output import HierarchicalSoftmax
    from lm.training.batches import training_batches
    from lm.training.memory_estimate import estimate_memory

    config, tree, model = run.config, run.tree, run.model_without_weights
    parameters = {
        name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()
    }
    if isinstance(model.output, HierarchicalSoftmax):  # the zeros after its rows are not trained
        parameters["output"] -= model.output.weight[:, config.model.hidden :].numel()
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
        "batches_per_epoch": training_batches(config, run.prepared).per_epoch,
        **{f"{name}_parameters": count for name, count in parameters.items() if count},
        "parameters": sum(parameters.values()),
        "row_wise_gradients": run.word_table.row_wise,
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in asdict(memory).items()},
        "memory_mib": round(memory.total / 2**20, 1),
        "memory_available_mib": None if available is None else round(available / 2**20, 1),
    }
    if config.train.strategy == "shard_output":
        from lm.training.shards import placement_of

        values["sharded"] = placement_of(run)[1]
    if options.json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key:<{width}}  {value:,}" if type(value) is int else f"{key:<{width}}  {value}")


def _print_trees(run: Run, *, as_json: bool) -> None:
    """Print the predicted cost of trees over the words of a run, the fastest first."""
    import torch

    from lm.model.best_tree import batch_and_rates
    from lm.model.tree_costs import tree_costs

    counts, row_wise = torch.tensor(run.prepared.counts()), run.word_table.row_wise
    batch, rates = batch_and_rates(run.config, run.num_devices, on_gpu=run.on_gpu)
    rows = tree_costs(run.config, counts, run.tree, batch, rates, row_wise=row_wise)
    if as_json:
        print(json.dumps({"device": rates.device, "source": rates.source, "trees": rows}))
        return
    print(f"predicted for {rates.device}; constants from {rates.source}")
    print(_TREE_TITLES)
    for row in rows:
        known = {name: "–" if row[name] is None else f"{row[name]:.2f}" for name in _DECODING}
        print(_TREE.format(**row | known))
