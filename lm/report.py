"""Pictures and tables of a run, for people."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.classes.report import ClassReport, class_report
from data_prep.errors import UserError
from data_prep.prepared import Prepared
from lm.config import Config, has_sparse_table
from lm.evaluation import Evaluation
from lm.model.build_tree import build_tree
from lm.model.language_model import build_model
from lm.training.batches import Batches
from lm.training.memory_estimate import available, footprint
from lm.training.metrics import read_metrics

LABELLED_CLASSES = 25
"""Heaviest classes whose top words stand in the picture."""


def draw_curves(folder: Path, title: str) -> Path:
    """Draw `curves.png` from `metrics.csv`: perplexity of training and validation text over the
    tokens trained on.
    """
    from matplotlib.figure import Figure  # takes a second, and only this function needs it

    lines = read_metrics(folder / "metrics.csv")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [line.tokens for line in lines],
        [line.train_perplexity for line in lines],
        label="training",
        linewidth=1,
    )
    validated = [
        (line.tokens, line.valid_perplexity) for line in lines if line.valid_perplexity is not None
    ]
    if validated:
        tokens, perplexities = zip(*validated, strict=True)
        axes.plot(tokens, perplexities, "o-", label=f"validation, best {min(perplexities):.1f}")
    axes.set(xlabel="tokens trained on", ylabel="perplexity", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def evaluation_table(result: Evaluation, split: str) -> str:
    """The figures of `lm evaluate` as lines of text."""
    rows = [
        ("tokens predicted", f"{result.tokens:,}"),
        ("words, without <eos>", f"{result.words:,}"),
        ("out of vocabulary", f"{result.oov:,}"),
        ("negative log-likelihood", f"{result.nll_nats:.1f} nats"),
        ("perplexity", f"{result.perplexity:.2f}"),
        ("  excluding out of vocabulary", f"{result.perplexity_excluding_oov:.2f}"),
        (
            "  class × within class",
            f"{result.class_perplexity:.2f} × {result.within_class_perplexity:.2f}",
        ),
        ("word perplexity", f"{result.word_perplexity:.2f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
        ("context", result.context),
        ("line ends", result.eos_rule),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([split, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def check_own_classes(folder: Path, prepared: Prepared) -> None:
    """Refuse prepared data whose classes are no longer those of a run.

    Raises:
        UserError: if they differ, or the run's file is damaged.
    """
    path = folder / "classes.npy"
    try:
        own = np.load(path) if path.exists() else prepared.word_class()
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not np.array_equal(own, prepared.word_class()):
        raise UserError(
            f"{prepared.folder} was prepared again since: its classes are not those of {path}"
        )


def report_classes(prepared: Prepared, num_words: int) -> ClassReport:
    """Sizes, mass, cost and likelihood of the word classes of a prepared corpus, and the top words
    of each.
    """
    return class_report(
        prepared.counts(),
        prepared.word_class(),
        prepared.tokens("train"),
        head=prepared.head,
        num_top_words=num_words,
    )


def classes_table(report: ClassReport, prepared: Prepared) -> str:
    """The class report as lines of text, heaviest class first."""
    tokenizer = prepared.tokenizer()
    head = [
        f"{report.num_word_classes:,} classes of {report.min_words:,} to {report.max_words:,}"
        f" words, median {report.median_words:g};"
        f" {report.head:,} words beside them, {100 * report.head_mass:.1f} % of the tokens",
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
    return "\n".join(head + rows)


def classes_json(report: ClassReport, prepared: Prepared) -> dict[str, Any]:
    """The class report for JSON, the top words spelt out."""
    tokenizer = prepared.tokenizer()
    words = [[tokenizer.token(word) for word in own] for own in report.top_words]
    return asdict(report) | {"top_words": words}


def draw_classes(report: ClassReport, prepared: Prepared, path: Path) -> None:
    """Draw the classes by size and token mass, the heaviest ones with their top words, and how the
    mass and the cost of a token spread over them.

    Raises:
        UserError: if the file's ending names no format.
    """
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
    bars.set(xlabel="% of the tokens", title="the heaviest classes")
    cloud.scatter(sizes, 100 * mass, s=12, alpha=0.6)
    cloud.set(xlabel="words in the class", ylabel="% of the tokens", title="all classes")
    if mass.min() > 0:
        cloud.set_yscale("log")
    rank = np.arange(1, len(mass) + 1)
    curve.plot(rank, 100 * mass[heaviest].cumsum(), label="tokens")
    cost = (mass * sizes)[heaviest].cumsum()
    curve.plot(rank, 100 * cost / cost[-1], label="columns within classes")
    curve.set(xlabel="classes, heaviest first", ylabel="% of the whole", title="what they carry")
    curve.legend()
    for axes in (bars, cloud, curve):
        axes.grid(True, alpha=0.3)
    figure.suptitle(
        f"{report.num_word_classes:,} classes, {report.columns_per_token:,.0f} columns a token,"
        f" {report.class_entropy:.2f} bits a class + {report.word_entropy:.2f} bits a word in it"
    )
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # no such format
        raise UserError(f"{path}: {error}") from error


def describe(config: Config, prepared: Prepared) -> dict[str, Any]:
    """Sizes, cost and memory of a run, from its prepared data; without allocating its weights."""
    tree = build_tree(config, prepared)
    with torch.device("meta"):
        model = build_model(config.model, config.output, tree, config.train.seq_len)
    parameters = {
        name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()
    }
    total = sum(parameters.values())
    need, there = footprint(config, tree), available(config)
    batches = Batches(
        prepared.tokens("train"),
        eos_id=prepared.eos_id,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        shuffle=not model.backbone.carries_state,
        seed=config.seed,
    )
    return {
        "name": config.name,
        "run_dir": str(config.run_path),
        "backbone": config.model.backbone,
        "layers": config.model.layers,
        "hidden": config.model.hidden,
        "vocab_size": tree.vocab_size,
        "tree": config.output.tree,
        "tree_nodes": tree.num_nodes,
        "tree_depth": tree.depth,
        "columns_per_token_at_most": tree.max_path_columns,
        "train_tokens": prepared.splits["train"].tokens,
        "batches_per_epoch": batches.per_epoch,
        **{f"{name}_parameters": count for name, count in parameters.items() if count},
        "parameters": total,
        "sparse_gradients": has_sparse_table(config, tree.num_rows),
        **{f"{name}_mib": round(size / 2**20, 1) for name, size in asdict(need).items()},
        "memory_mib": round(need.total / 2**20, 1),
        "memory_there_mib": None if there is None else round(there / 2**20, 1),
    }
