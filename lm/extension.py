"""`lm extend`: new items of a catalogue in a trained run, without training.

The new items are those that the training split of newer data has and the run lacks. With h the
state before an occurrence of a new item i, made from the known items before it, and means over its
occurrences:

- Its class is argmax_c Σ log P(c | h).
- Its row and its input vector are the mean of Σ_j P(j | c, h) w_j over the members j of the class:
  what the model expects there.
- Its bias is log n_i plus the mean of Σ_j P(j | c, h) (b_j - log n_j), where n counts events.
- The bias of the class rises by the log of the growth of its events.

So the probabilities sum to 1 as before, and within a class those of the other items keep their
ratios. In a full softmax, the root is the class of all items.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.corpus.lines import read_lines as read_corpus
from data_prep.errors import UserError
from data_prep.prepare import prepare_with
from data_prep.storage import new_folder, write_hashed
from data_prep.tokenizer.tokenizer import WordTokenizer
from data_prep.tokenizer.vocabulary import count_words
from data_prep.tokenizer.word_index import WordIndex
from lm.config import Config, differences, to_yaml
from lm.model.files import save_model
from lm.model.language_model import LanguageModel
from lm.model.reader import read_lines
from lm.output import ClassTree, HierarchicalSoftmax
from lm.run import Parts, Run, TrainedRun
from lm.training.run_folder import write_run_metadata

LINES = 128
"""Sequences that are read at once."""
_OF_DATA = ("data.", "name", "run_dir")
"""Keys, or prefixes of keys, that may differ from those of the run."""
Ints = NDArray[np.int64]


class Added(NamedTuple):
    """Numbers of an extension."""

    new: int  # items that the run lacked
    items: int  # of the catalogue, with these


def extend(trained: TrainedRun, config: Config) -> Added:
    """Write a run with the new items of other data to `config.run_path`.

    Args:
        trained: the run, which remains as it is.
        config: that of the run, with other data and another folder.

    Raises:
        UserError: the data has no new item, another key differs, the run is not one on items with
            an output layer of at most two levels, or a file cannot be read or written.
    """
    config = replace(config, data=replace(config.data, prepared_dir=None))
    _check(trained, config)
    model, old = trained.model, trained.tokenizer
    assert isinstance(old, WordTokenizer)
    found = count_words(read_corpus(config.data, "train"), replace(config.tokenizer, min_count=1))
    count_of = dict(zip(found.words, found.counts.tolist(), strict=True))
    new = [
        word
        for word, count in count_of.items()
        if old.words.id(word) < 0 and count >= config.tokenizer.min_count
    ]
    if not new:
        raise UserError(f"{trained.folder} has all items of the training split of the data")
    tokenizer = WordTokenizer(WordIndex.of([*old.words, *new]))
    counts = np.array([count_of.get(word, 0) for word in tokenizer.words])
    evidence = _Evidence(model, tokenizer, config)
    tree = evidence.output.tree
    node = choose_nodes(evidence)
    state = model.state_dict() | new_tensors(evidence, node, torch.from_numpy(counts))
    with new_folder(config.run_path) as folder:
        own = tree.node_of_row[tree.row_of_word]
        word_class = (torch.cat([own.cpu(), node]) - 1).clamp(min=0)[None].int().numpy()
        data, tokens, classes, _ = config.preparation
        path = folder / "data"
        prepared = prepare_with(data, tokens, classes, path, tokenizer, counts, word_class)
        run = Run(replace(config, run_dir=str(folder)), Parts(prepared))
        write_run_metadata(run)
        write_hashed(folder / "config.yaml", [to_yaml(config).encode()])
        sha256 = prepared.tokenizer_sha256
        description = replace(trained.description, tokenizer_sha256=sha256, valid_perplexity=None)
        save_model(folder, state, description)
    return Added(len(new), tokenizer.vocab_size - 2)


def _check(trained: TrainedRun, config: Config) -> None:
    """Raises UserError if the run cannot be extended so."""
    name, model, has_words = trained.folder, trained.model, trained.tokenizer.kind == "words"
    if not trained.is_independent or not has_words:
        raise UserError(f"{name}: lm extend requires a run with data.sequences: independent")
    others = [
        f"{key}: {old} → {new}"
        for key, (old, new) in differences(trained.config, config).items()
        if not key.startswith(_OF_DATA)
    ]
    if others:
        raise UserError(f"lm extend changes the data alone, not {', '.join(others)}")
    if config.run_path.resolve() == Path(name).resolve():
        raise UserError("lm extend writes another run: name its folder, --run_dir=FOLDER")
    output = model.output
    if not isinstance(output, HierarchicalSoftmax) or output.tree.depth > 2:
        raise UserError(f"{name}: lm extend requires output.tree: two_level or full")
    if model.input_tree is not None or model.input_pieces is not None:
        raise UserError(f"{name}: lm extend requires input vectors of the output layer's tree")


class _Evidence:
    """The states before the occurrences of new items in a training split.

    Iterating yields hidden vectors [P, H] and the number of the new item [P] that follows each.
    """

    def __init__(self, model: LanguageModel, tokenizer: WordTokenizer, config: Config) -> None:
        assert isinstance(model.output, HierarchicalSoftmax)
        self.model, self.output = model, model.output
        self._tokenizer, self._data = tokenizer, config.data
        self.num_new = tokenizer.vocab_size - model.vocab_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        lines = read_corpus(self._data, "train")
        while chunk := list(islice(lines, LINES)):
            ids = [np.array(line, np.int64) for line in self._tokenizer.encode_lines(chunk)]
            if has_new := [line for line in ids if (line >= self.model.vocab_size).any()]:
                yield self._read(has_new)

    def _read(self, lines: list[Ints]) -> tuple[Tensor, Tensor]:
        """The evidence of sequences, each with a new item."""
        eos_id, num_old = self._tokenizer.eos_id, self.model.vocab_size
        known = [np.append(line[line < num_old], eos_id) for line in lines]
        read = [(hidden, index) for hidden, _, index in read_lines(self.model, known, eos_id)]
        order = np.concatenate([index for _, index in read]).argsort(kind="stable")
        first = np.cumsum([0, *map(len, known)])  # of each sequence in this order
        places, items = [], []
        for line, begin in zip(lines, first, strict=False):
            is_new = line >= num_old
            places.append(begin + np.cumsum(~is_new)[is_new])
            items.append(line[is_new] - num_old)
        device = self.model.device
        row = torch.from_numpy(order[np.concatenate(places)]).to(device)
        hidden = torch.cat([hidden for hidden, _ in read])[row]
        return hidden.float(), torch.from_numpy(np.concatenate(items)).to(device)


@torch.no_grad()
def choose_nodes(evidence: _Evidence) -> Tensor:
    """The node [M] that each new item becomes a child of; the root in a full softmax."""
    output = evidence.output
    row = output.tree.row_of_node[1:]
    if not len(row):
        return torch.zeros(evidence.num_new, dtype=torch.int64)
    score = torch.zeros(evidence.num_new, len(row), device=row.device)
    for hidden, item in evidence:
        score.index_add_(0, item, _log_softmax(output, 0, hidden)[:, row])
    return 1 + score.argmax(dim=1).cpu()


@torch.no_grad()
def new_tensors(evidence: _Evidence, node: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The tensors of the model's state that M new items change.

    Args:
        evidence: their occurrences.
        node: [M] what each becomes a child of.
        counts: [N + M] events of all items.
    """
    model, output, tree = evidence.model, evidence.output, evidence.output.tree
    assert output.bias is not None
    grown, moved = extended_tree(tree, node)
    node, count = node.to(model.device), counts.to(model.device) + 1.0  # none is log 0
    log_count = torch.zeros(tree.num_rows, device=model.device)
    log_count[tree.row_of_word] = count[: tree.vocab_size].log()
    by_row = {"output.weight": output.weight, "output.bias": output.bias.float() - log_count}
    embedding = model.embedding
    if embedding is not None:
        of_row = slice(None) if model.path_sum else tree.item_of_row.clamp(min=0)
        by_row["embedding.weight"] = embedding.weight[of_row]
    mean = _expected(evidence, node, by_row)
    mean["output.bias"] += count[tree.vocab_size :].log()
    row = grown.row_of_word[tree.vocab_size :].to(model.device)
    of_class = grown.row_of_node[1:].to(model.device)
    changed = {f"output.tree.{name}": array for name, array in grown.state_dict().items()}
    for name, parameter in model.named_parameters():
        if name == "embedding.weight" and not model.path_sum:
            changed[name] = torch.cat([parameter, mean[name].to(parameter.dtype)])
        elif name in mean:
            table = parameter.new_empty(grown.num_rows, *parameter.shape[1:])
            table[moved], table[row] = parameter, mean[name].to(parameter.dtype)
            changed[name] = table
    growth = tree.num_children.new_zeros(tree.num_nodes, dtype=torch.float32)
    own = tree.node_of_row[tree.row_of_word]
    before = growth.index_add(0, own, count[: tree.vocab_size])
    growth = (before.index_add(0, node, count[tree.vocab_size :]) / before).log()
    changed["output.bias"][of_class] += growth[1:].to(output.bias.dtype)
    return changed


def extended_tree(tree: ClassTree, node: Tensor) -> tuple[ClassTree, Tensor]:
    """A tree with M new words as the last children of some nodes, and the new rows [R] of its rows.

    Example:
        >>> tree, moved = extended_tree(ClassTree.two_level([0, 0, 1]), torch.tensor([1, 2, 1]))
        >>> tree.num_children.tolist(), tree.row_of_word.tolist(), moved.tolist()
        ([2, 4, 2], [2, 3, 6, 4, 7, 5], [0, 1, 2, 3, 6])
    """
    num_children, node_of_row, row_of_node, row_of_word = (
        array.cpu()
        for array in (tree.num_children, tree.node_of_row, tree.row_of_node, tree.row_of_word)
    )
    num_new = torch.bincount(node, minlength=len(num_children))
    moved = torch.arange(tree.num_rows) + (num_new.cumsum(0) - num_new)[node_of_row]
    order = node.argsort(stable=True)
    row = torch.empty_like(node)
    row[order] = num_children.cumsum(0)[node[order]] + torch.arange(len(node))
    of_node = torch.cat([row_of_node[:1], moved[row_of_node[1:]]])
    grown = ClassTree(num_children + num_new, of_node, torch.cat([moved[row_of_word], row]))
    return grown, moved


def _expected(evidence: _Evidence, node: Tensor, by_row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over the occurrences of each new item of Σ_j P(j | its node, h) · row j of tables."""
    output, num_new = evidence.output, evidence.num_new
    mean = {
        name: torch.zeros(num_new, *table.shape[1:], device=table.device)
        for name, table in by_row.items()
    }
    occurrences = torch.zeros(num_new, device=node.device)
    for hidden, item in evidence:
        occurrences.index_add_(0, item, occurrences.new_ones(len(item)))
        for each in torch.unique(node[item]).tolist():
            among = node[item] == each
            prob, rows = _log_softmax(output, each, hidden[among]).exp(), _rows(output.tree, each)
            for name, table in by_row.items():
                mean[name].index_add_(0, item[among], prob @ table[rows].float())
    for table in mean.values():
        table /= occurrences.view(-1, *[1] * (table.dim() - 1))
    return mean


def _log_softmax(output: HierarchicalSoftmax, node: int, hidden: Tensor) -> Tensor:
    """Log-probabilities of the children of a node, [P, children], by hidden vectors [P, H]."""
    rows = _rows(output.tree, node)
    assert output.bias is not None
    weight = output.weight[rows, : output.hidden_size].float()
    return torch.log_softmax(hidden @ weight.T + output.bias[rows].float(), dim=1)


def _rows(tree: ClassTree, node: int) -> slice:
    first = int(tree.first_row[node])
    return slice(first, first + int(tree.num_children[node]))
