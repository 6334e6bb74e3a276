"""`output.tree: best`: the tree that a run takes, chosen by the cost model when it begins."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from data_prep.storage import write_hashed
from lm.config import Config, resolve_word_table
from lm.output import ClassTree
from lm.output.cost.best import best_classes, best_tree
from lm.output.cost.rates import CPU, GPU, Rates
from lm.output.cost.work import Batch

FILE = "tree.txt"
"""File of the tree in the folder of a run, unless it is one of classes."""

_log = logging.getLogger(__name__)


def batch_and_rates(config: Config, num_devices: int, *, on_gpu: bool) -> tuple[Batch, Rates]:
    """What the cost of a run's output layer depends on, besides its tree."""
    num_positions = config.train.batch_size // num_devices * config.train.seq_len
    return Batch(num_positions, config.model.hidden), GPU if on_gpu else CPU


def with_best_tree(config: Config, prepared: Prepared, num_devices: int, *, on_gpu: bool) -> Config:
    """The configuration with the best tree in place of `output.tree: best`.

    With classes.method: frequency, a tree of any depth whose words are sorted by frequency, written
    to `tree.txt` in the folder of the run. With other methods, as many classes, and as many words
    in no class, as are fastest; the full softmax if it is faster.
    """
    batch, rates = batch_and_rates(config, num_devices, on_gpu=on_gpu)
    counts = torch.tensor(prepared.counts())
    row_wise = resolve_word_table(config, len(counts), num_devices).row_wise
    if config.classes.method == "frequency":
        tree = best_tree(counts, batch, rates, row_wise=row_wise)
        chosen = str(config.run_path / FILE) if tree.depth > 1 else "full"
        if tree.depth > 1:
            words = [prepared.tokenizer().token(word) for word in range(tree.vocab_size)]
            write_hashed(chosen, _lines(tree, words))
        classes, text = config.classes, f"{chosen}, {tree}"
    else:
        sizes = best_classes(counts, batch, rates, row_wise=row_wise)
        chosen, text, classes = "full", "full", config.classes
        if sizes is not None:
            chosen, classes = "two_level", replace(classes, **sizes._asdict())
            text = f"two_level with {sizes.num_word_classes} classes of data and a shortlist of"
            text += f" {sizes.shortlist}"
    if chosen == "full" and config.model.input_embedding == "path_sum":
        raise UserError(
            "output.tree: best is the full softmax here, which cannot be combined with"
            " model.input_embedding: path_sum"
        )
    _log.info("output.tree: best is %s", text)
    return replace(config, output=replace(config.output, tree=chosen), classes=classes)


def _lines(tree: ClassTree, words: Sequence[str]) -> Iterator[bytes]:
    """The lines of a file of paths, see `ClassTree.from_file`."""
    for word, path in zip(words, child_numbers(tree).tolist(), strict=True):
        yield " ".join([word, *(str(child) for child in path if child >= 0)]).encode() + b"\n"


def child_numbers(tree: ClassTree) -> Tensor:
    """The child numbers [N, depth] on each word's path, root first; -1 before or after it."""
    row = tree.rows_on_path(torch.arange(tree.vocab_size)).flip(1)
    number = row - tree.first_row[tree.node_of_row[row.clamp(min=0)]]
    return torch.where(row >= 0, number, -1)
