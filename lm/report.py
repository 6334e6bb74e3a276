"""What the commands print and draw: evaluations, word classes, sizes and memory of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from lm.config import Config, load_config, load_run_config, resolve_word_table

if TYPE_CHECKING:
    from data_prep.classes.report import ClassReport

LABELLED_CLASSES = 25  # in the picture: those with the most tokens


def open_source(source: str, overrides: Sequence[str]) -> tuple[Config, Prepared]:
    """The configuration of a run's folder or of a file, and the data prepared with it.

    Raises:
        UserError: if the configuration is wrong, or the data were not prepared with it.
    """
    from data_prep.prepare import open_made_by

    load = load_run_config if Path(source).is_dir() else load_config
    config = load(Path(source), overrides)
    prepared = open_made_by(*config.preparation)
    if config.needed_classes is not None and Path(source).is_dir():
        _check_same_classes(Path(source), prepared)
    return config, prepared


def _check_same_classes(folder: Path, prepared: Prepared) -> None:
    """Raise `UserError` unless the run in a folder has the classes of the prepared data."""
    path = folder / "classes.npy"
    if not path.exists():
        return
    try:
        word_class = np.load(path)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged, or not an array of numbers") from error
    if not np.array_equal(word_class, prepared.word_class()):
        problem = f"was prepared again: its classes are not those of {path}"
        raise UserError(f"{prepared.folder} {problem}")


def report_classes(config: Config, prepared: Prepared, *, num_top_words: int) -> "ClassReport":
    """Figures of the word classes; `UserError` if the tree of the configuration has none."""
    from data_prep.classes.report import class_report

    if config.needed_classes is None:
        raise UserError(f"output.tree: {config.output.tree} has no word classes to report on")
    return class_report(
        *(prepared.counts(), prepared.word_class(), prepared.tokens("train")),
        shortlist=prepared.shortlist,
        num_top_words=num_top_words,
    )


def classes_table(report: "ClassReport", prepared: Prepared) -> str:
    """Format a class report as lines of text, in decreasing order of token mass."""
    tokenizer = prepared.tokenizer()
    summary = [
        f"{report.num_word_classes:,} classes of {report.min_words:,} to {report.max_words:,}"
        f" words, median {report.median_words:g};"
        f" shortlist of {report.shortlist:,} words with {100 * report.shortlist_mass:.1f} % of the"
        " tokens",
        f"columns per token   {report.columns_per_token:.1f} of {prepared.vocab_size:,}",
        f"bigram likelihood   {report.log_likelihood:.4f} nats per token "
        f"(perplexity {math.exp(-report.log_likelihood):.1f})",
        f"entropy             class {report.class_entropy:.3f} bits,"
        f" word in class {report.word_entropy:.3f} bits",
        "",
        "class   words   mass %  top words",
    ]
    heaviest = sorted(range(report.num_word_classes), key=lambda c: -report.token_mass[c])
    rows = [
        f"{c:5d} {report.sizes[c]:7,d} {100 * report.token_mass[c]:8.3f}  "
        + " ".join(tokenizer.token(word) for word in report.top_words[c])
        for c in heaviest
    ]
    return "\n".join(summary + rows)


def classes_json(report: "ClassReport", prepared: Prepared) -> dict[str, Any]:
    """Convert a class report to plain values, with top words as text instead of ids."""
    tokenizer = prepared.tokenizer()
    words = [[tokenizer.token(word) for word in top_words] for top_words in report.top_words]
    return asdict(report) | {"top_words": words}


def draw_classes(report: "ClassReport", prepared: Prepared, path: Path) -> None:
    """Draw the top words of classes, their sizes and token masses, and their cumulated cost."""
    from matplotlib.figure import Figure

    tokenizer = prepared.tokenizer()
    sizes, mass = np.array(report.sizes), np.array(report.token_mass)
    heaviest = np.argsort(-mass, kind="stable")
    figure = Figure(figsize=(13, 7), layout="constrained")
    bars, cloud, curve = figure.subplot_mosaic([["bars", "cloud"], ["bars", "curve"]]).values()
    shown = heaviest[:LABELLED_CLASSES]
    bars.barh(range(len(shown)), 100 * mass[shown])
    labels = [" ".join(tokenizer.token(w) for w in report.top_words[c][:5]) for c in shown]
    bars.set_yticks(range(len(shown)), labels, fontsize=8, parse_math=False)
    bars.invert_yaxis()
    bars.set(xlabel="% of the tokens", title="classes with the most tokens")
    cloud.scatter(sizes, 100 * mass, s=12, alpha=0.6)
    cloud.set(xlabel="words in the class", ylabel="% of the tokens", title="all classes")
    if mass.min() > 0:
        cloud.set_yscale("log")
    rank = np.arange(1, len(mass) + 1)
    curve.plot(rank, 100 * mass[heaviest].cumsum(), label="tokens")
    cost = (mass * sizes)[heaviest].cumsum()
    curve.plot(rank, 100 * cost / cost[-1], label="columns within classes")
    curve.set(
        xlabel="classes by token mass", ylabel="% of the total", title="cumulated tokens and cost"
    )
    curve.legend()
    for axes in (bars, cloud, curve):
        axes.grid(True, alpha=0.3)
    figure.suptitle(
        f"{report.num_word_classes:,} classes, {report.columns_per_token:,.0f} columns per token,"
        f" {report.class_entropy:.2f} bits for the class + {report.word_entropy:.2f} for the word"
    )
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # unknown format
        raise UserError(f"{path}: {error}") from error


def describe(config: Config, prepared: Prepared) -> dict[str, Any]:
    """Name → value of the sizes, the cost and the memory of a run; allocates no weights."""
    # Imports torch, which the other functions do not use.
    from lm.model.build import build_model, build_tree, without_weights
    from lm.output import HierarchicalSoftmax
    from lm.training.batches import training_batches
    from lm.training.memory_estimate import available_bytes, estimate_memory

    tree, vocab_size = build_tree(config, prepared), prepared.vocab_size
    word_table = resolve_word_table(config, vocab_size if tree is None else tree.num_rows)
    sections = (config.model, config.output, word_table, tree, config.train.seq_len)
    with without_weights():
        model = build_model(*sections, vocab_size=vocab_size)
    parameters = {
        name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()
    }
    if isinstance(model.output, HierarchicalSoftmax):  # the zeros after its rows are not trained
        parameters["output"] -= model.output.weight[:, config.model.hidden :].numel()
    memory = estimate_memory(config, tree, vocab_size)
    available = available_bytes(config)
    batches = training_batches(config, prepared)
    tree_figures = {}
    if tree is not None:
        tree_figures = {
            "tree_nodes": tree.num_nodes,
            "tree_depth": tree.depth,
            "columns_per_token_at_most": tree.max_path_columns,
        }
    return {
        "name": config.name,
        "run_dir": str(config.run_path),
        "backbone": config.model.backbone,
        "layers": config.model.layers,
        "hidden": config.model.hidden,
        "vocab_size": vocab_size,
        "tree": config.output.tree,
        **tree_figures,
        "train_tokens": prepared.splits["train"].tokens,
        "batches_per_epoch": batches.per_epoch,
        **{f"{name}_parameters": count for name, count in parameters.items() if count},
        "parameters": sum(parameters.values()),
        "row_wise_gradients": word_table.row_wise,
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in asdict(memory).items()},
        "memory_mib": round(memory.total / 2**20, 1),
        "memory_available_mib": None if available is None else round(available / 2**20, 1),
    }


def info_table(values: Mapping[str, Any]) -> str:
    """Format the values of `describe` as lines of text."""
    width = max(map(len, values))
    return "\n".join(
        f"{key:<{width}}  {value:,}" if type(value) is int else f"{key:<{width}}  {value}"
        for key, value in values.items()
    )
