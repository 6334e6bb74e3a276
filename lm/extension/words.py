"""New words with contexts in a trained model: their classes, means of these, and the new tree."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.corpus.reader import read_lines as read_corpus
from data_prep.errors import UserError
from data_prep.prepare import Given
from data_prep.tokenizer.pieces import find_pieces
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.serialization import load_counts
from data_prep.tokenizer.tokenizer import WordTokenizer
from data_prep.tokenizer.vocabulary import count_words
from lm.config import Config
from lm.extension.contexts import Contexts
from lm.extension.rows import PRIOR, fit_rows, logits
from lm.model.files import load_model
from lm.model.input_pieces import PIECES
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.run import TrainedRun

State = dict[str, Tensor]
WORDS_AT_ONCE = 1 << 16
"""Words whose vectors are converted to fp64 at once."""
MAX_SCORES = 1 << 28
"""Scores of new words by classes in memory at once; of more, the data is read several times."""


class Extended(NamedTuple):
    """A trained model with new words, the last M of N + M."""

    given: Given  # for the preparation of the new data: words, counts there, classes; no speller
    state: State
    num_new: int


def extended(trained: TrainedRun, config: Config, *, progress: bool = True) -> Extended:
    """Add the words that the training split of a configuration has and a run lacks.

    A UserError says why the run cannot have others.
    """
    check_extensible(trained)
    model, tokenizer = trained.model.requires_grad_(False), trained.tokenizer
    tree, origin = model.path_tree, trained.description.weights_sha256
    node = torch.zeros(0, dtype=torch.int64)
    if not isinstance(tokenizer, WordTokenizer):
        given = Given(origin, tokenizer, None, levels_of(tree, node))
        return Extended(given, model.state_dict(), 0)
    tokenizer, counts = grown_vocabulary(tokenizer, config)
    num_old, words = model.vocab_size, tokenizer.words
    contexts = Contexts(tokenizer, config, num_old, trained.description.context, progress)
    pieces = None if model.input_pieces is None else model.input_pieces.pieces
    if num_new := len(words) - num_old:
        node = choose_classes(model, contexts)
        if pieces is not None:
            new = [words[id] for id in range(num_old, len(words))]
            pieces = extended_pieces(trained, pieces, new)
    levels = levels_of(tree, node)
    prior = 1.0 if contexts.are_items else PRIOR
    state = initial_state(model, node, levels, torch.from_numpy(counts), prior)
    if pieces is not None:
        state[PIECES] = pieces
    if num_new:
        larger, _ = load_model(trained.folder, trained.description, state)
        fit_rows(larger.requires_grad_(False).to(model.device), contexts, counts)
        state = larger.state_dict()
    return Extended(Given(origin, tokenizer, counts, levels), state, num_new)


def check_extensible(trained: TrainedRun) -> None:
    """Raises UserError if the words of a run have no classes that others could be added to."""
    output, model = trained.description.output, trained.description.model
    if output.tree not in ("full", "two_level", "multi_level"):
        expected = "output.tree: full, two_level or multi_level"
        raise UserError(f"{trained.folder}: new words require {expected}, not {output.tree}")
    if output.tree == "multi_level" and model.input_tree == "two_level":
        problem = "new words cannot be added with output.tree: multi_level and model.input_tree"
        raise UserError(f"{trained.folder}: {problem}: two_level")
    if trained.is_independent and trained.predicts_eos:
        problem = "new items require data.predict_eos: false, as an end is no item"
        raise UserError(f"{trained.folder}: {problem}")


def grown_vocabulary(old: WordTokenizer, config: Config) -> tuple[WordTokenizer, NDArray[np.int64]]:
    """The words of a tokenizer and the new ones of the training split; counts there [N + M].

    Known words remain however rare they are there.
    """
    every = replace(config.tokenizer, min_count=1, vocab_size=None)
    found = count_words(read_corpus(config.data, "train"), every)
    count_of = dict(zip(found.words, found.counts.tolist(), strict=True))
    words = [word for word in count_of if word not in (EOS, UNK)]
    limit, least = config.tokenizer.vocab_size, config.tokenizer.min_count
    words = words if limit is None else words[: limit - 2]
    known = {word: id for id, word in enumerate(old.words) if word in count_of}
    new = [word for word in words if word not in known and count_of[word] >= least]
    options = {"lowercase": old.lowercase, "split_punctuation": old.split_punctuation}
    tokenizer = WordTokenizer(old.words.with_new(new), **options)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    counts[list(known.values())] = [count_of[word] for word in known]
    counts[old.vocab_size :] = [count_of[word] for word in new]
    if config.data.sequences == "independent":
        counts[tokenizer.eos_id] = 0  # it is not predicted
    else:
        counts[tokenizer.unk_id] += found.counts.sum() - counts.sum()
    return tokenizer, counts


@torch.no_grad()
def choose_classes(model: LanguageModel, contexts: Contexts) -> Tensor:
    """The node [M] of the class of each new word, in the tree of the model without them."""
    tree = model.path_tree
    has_words = torch.bincount(tree.node_of_row[tree.row_of_word], minlength=tree.num_nodes) > 0
    has_words[0] &= not has_words[1:].any()
    new = range(model.vocab_size, contexts.tokenizer.vocab_size)
    if tree.num_nodes == 1:
        return torch.zeros(len(new), dtype=torch.int64)
    found, at_once = [], max(1, MAX_SCORES // tree.num_nodes)
    for first in range(0, len(new), at_once):
        ids = new[first : first + at_once]
        score = torch.zeros(len(ids), tree.num_nodes, device=model.device)
        for hidden, place in contexts.occurrences(model, ids):
            score.index_add_(0, place, _node_log_prob(model, hidden))
        found.append(score.masked_fill_(~has_words, -torch.inf).argmax(dim=1).cpu())
    return torch.cat(found)


def _node_log_prob(model: LanguageModel, hidden: Tensor) -> Tensor:
    """The log-probabilities [P, I] of each node's words: of its own, if it has any."""
    output, tree = model.tree_softmax, model.path_tree
    found = hidden.new_zeros(len(hidden), tree.num_nodes)
    if model.input_tree is not None:  # of two levels, and no tree of the output layer
        node = tree.node_of_row[tree.row_of_word]
        found.index_add_(1, node, output.log_prob(hidden).exp().type_as(found))
        return found.clamp(min=torch.finfo(found.dtype).tiny).log()
    parent = tree.node_of_row[tree.row_of_node[1:]]
    for node in torch.unique(parent).tolist():  # parents are before their children
        first = int(tree.first_row[node])
        rows = slice(first, first + int(tree.num_children[node]))
        children = 1 + (parent == node).nonzero().flatten()
        log_prob = logits(output, rows, hidden).log_softmax(1)
        place = tree.row_of_node[children] - first
        found[:, children] = found[:, node, None] + log_prob[:, place]
        if (is_word := tree.item_of_row[rows] >= 0).any():
            found[:, node] += log_prob[:, is_word].logsumexp(1)
    return found


def levels_of(tree: ClassTree, node: Tensor) -> NDArray[np.int32]:
    """The classes [levels, N + M] on the path of each word, and of new ones below nodes [M].

    `ClassTree.from_levels` of them numbers the nodes as the tree does.

    Example:
        >>> tree = ClassTree.from_levels([[0, -1, 1, 1]])
        >>> levels_of(tree, torch.tensor([2, 1])).tolist()
        [[0, -1, 1, 1, 1, 0]]
    """
    rows = tree.rows_on_path(torch.arange(tree.vocab_size, device=tree.row_of_word.device))
    above = torch.where(rows >= 0, ~tree.item_of_row[rows.clamp(min=0)], -1)[:, 1:].flip(1)
    order = (above < 0).long().argsort(dim=1, stable=True)
    levels = torch.full((max(1, tree.depth - 1), tree.vocab_size), -1)
    for level, nodes in zip(levels, above.gather(1, order).T.cpu(), strict=False):
        level[nodes >= 0] = torch.unique(nodes[nodes >= 0], return_inverse=True)[1]
    example = torch.empty(tree.num_nodes, dtype=torch.int64)  # a word of each node
    example[tree.node_of_row[tree.row_of_word].cpu()] = torch.arange(tree.vocab_size)
    return torch.cat([levels, levels[:, example[node]]], dim=1).int().numpy()


@torch.no_grad()
def initial_state(
    model: LanguageModel, node: Tensor, levels: NDArray[np.int32], counts: Tensor, prior: float
) -> State:
    """The state of a model with M new words, whose vectors are means of their classes.

    Args:
        model: without them.
        node: [M] of their classes.
        levels: [levels, N + M], the result of `levels_of`.
        counts: [N + M] events of all words.
        prior: number of events that each word has in addition, in the growth of classes.
    """
    output, classes, num_old = model.tree_softmax, model.path_tree, model.vocab_size
    assert output.bias is not None
    grown = ClassTree.from_levels(torch.from_numpy(levels).long())
    trees = {"input_tree.": (classes, grown), "output.tree.": (classes, grown)}
    if model.input_tree is not None:
        trees["output.tree."] = output.tree, ClassTree.full(grown.vocab_size)
    node, count = node.to(model.device), counts.to(model.device).double() + 1  # none is log 0
    old, own = count[:num_old], classes.node_of_row[classes.row_of_word]
    every = torch.arange(num_old, device=node.device)
    mass = old.new_zeros(classes.num_nodes).index_add(0, own, old)

    def mean(table: Tensor, rows: Tensor) -> Tensor:
        """The weighted mean [M, …] of a table's rows [N] of old words of each new one's class."""
        shape = -1, *[1] * (table.dim() - 1)
        total = old.new_zeros(classes.num_nodes, *table.shape[1:])
        for words in torch.split(every, WORDS_AT_ONCE):
            total.index_add_(0, own[words], old[words].view(shape) * table[rows[words]].double())
        found: Tensor = total[node] / mass[node].view(shape)
        return found

    def moved(table: Tensor, name: str, new: Tensor | None = None) -> Tensor:
        """A table [R, …] with the rows of a larger tree, and those of new words."""
        tree, larger = trees[name]
        row = larger.row_of_word.to(table.device)
        source = torch.zeros(larger.num_rows, dtype=torch.int64, device=table.device)
        source[row[:num_old]] = tree.row_of_word
        source[larger.row_of_node[1:].to(table.device)] = tree.row_of_node[1:]
        found = table[source]
        found[row[num_old:]] = (mean(table, tree.row_of_word) if new is None else new).to(found)
        return found

    state = model.state_dict()
    for prefix, (_, larger) in trees.items():
        arrays = {f"{prefix}{name}": array for name, array in larger.state_dict().items()}
        state |= {name: array for name, array in arrays.items() if name in state}
    tree, larger = trees["output.tree."]
    bias = mean(output.bias[tree.row_of_word].double() - old.log(), every) + count[num_old:].log()
    state["output.bias"] = moved(output.bias, "output.tree.", bias)
    events = count - 1 + prior
    after = larger.to(count.device).sum_below(events)
    growth = (after / tree.sum_below(events[:num_old])).log()[1:].to(output.bias.dtype)
    state["output.bias"][larger.row_of_node[1:].to(node.device)] += growth
    state["output.weight"] = moved(output.weight, "output.tree.")
    if model.embedding is not None:
        vectors = model.embedding.weight
        if not model.path_sum:
            state["embedding.weight"] = torch.cat([vectors, mean(vectors, every).to(vectors)])
        elif model.input_tree is None or not model.tied:
            state["embedding.weight"] = moved(vectors, "input_tree.")
    return state


def extended_pieces(trained: TrainedRun, pieces: Tensor, new: list[str]) -> Tensor:
    """The pieces [N + M, L] of the words of a run [N, L] and of new ones, by the same division.

    Raises:
        UserError: if the words do not lead to the pieces of the run again, as those of a run that
            has got words from others.
    """
    num_pieces, tokenizer = trained.description.model.input_pieces, trained.tokenizer
    assert num_pieces is not None
    assert isinstance(tokenizer, WordTokenizer)
    words, without = list(tokenizer.words), (tokenizer.eos_id, tokenizer.unk_id)
    every = find_pieces(words, load_counts(trained.folder), num_pieces, without, new)
    found, width = torch.from_numpy(every), pieces.shape[1]
    if not torch.equal(found[: len(words), :width], pieces.cpu()):
        problem = "new words have no pieces: those of the run (model.input_pieces) are not found"
        raise UserError(f"{trained.folder}: {problem} again in its vocabulary")
    return found.to(pieces.device)
