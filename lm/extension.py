"""`lm extend`: new items of a catalogue in a trained run, without training the network.

The new items are those that the training split of newer data has and the run lacks. Everything else
remains as it is, but for the biases of classes:

- The class of a new item is argmax_c Σ log P(c | h) over its occurrences, with h the state after
  the known items before each. The bias of a class rises by the log of the growth of its events, so
  that old items give up the share of the new ones.
- Then the network reads the new data. The rows w and biases of the new items minimize

      Σ -log P(item | class, h) over all events of their classes, plus λ/2 Σ ‖w - w₀‖²

  where w₀ is the mean of the rows of the class's old items, weighted by events. The problem is
  convex; L-BFGS begins at w₀.
- The input vector of a new item is its row if the run ties them, and else the mean of those of its
  class.

The probabilities sum to 1 as before, and within a class those of the other items keep their ratios.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data_prep.corpus.reader import read_lines as read_corpus
from data_prep.errors import UserError
from data_prep.prepare import prepare_with
from data_prep.storage import new_folder, write_hashed
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.serialization import MODEL_FILE
from data_prep.tokenizer.tokenizer import WordTokenizer
from data_prep.tokenizer.vocabulary import count_words
from data_prep.tokenizer.word_index import WordIndex
from lm.config import Config, differences, to_yaml
from lm.model.build import build_model, without_weights
from lm.model.files import Description, save_model
from lm.model.language_model import LanguageModel
from lm.model.reader import read_lines
from lm.output import ClassTree, HierarchicalSoftmax
from lm.run import Run, TrainedRun
from lm.training.run_folder import write_run_metadata

LINES = 128
"""Sequences that are read at once."""
MAX_EVENTS = 1 << 20
"""Events that rows are found from; of more, a sample in which each one stands for several."""
MIN_EVENTS = 100
"""Events of each new item that are in the sample, if it has as many."""
PENALTY = 5.0
"""λ. On MovieLens 1M, 1 and 5 find rows of the same hit rate for the new items; 5 keeps more of the
old ones'."""
MAX_ITERATIONS = 20
"""Iterations of L-BFGS."""
_OF_DATA = ("data.", "name", "run_dir")
"""Keys, or prefixes of keys, that may differ from those of the run."""
Lines = list[NDArray[np.int64]]
_log = logging.getLogger(__name__)


def extend(trained: TrainedRun, config: Config, *, progress: bool = True) -> None:
    """Write a run with the new items of other data to `config.run_path`; log their number.

    Args:
        trained: the run, which remains as it is.
        config: that of the run, with other data and another folder.
        progress: whether progress bars are shown on stderr.

    Raises:
        UserError: the data has no new item, another key differs, the run is not one on items with
            `output.tree: two_level`, or a file cannot be read or written.
    """
    config = replace(config, data=replace(config.data, prepared_dir=None))
    _check(trained, config)
    old, tree = trained.tokenizer, _softmax(trained.model).tree
    assert isinstance(old, WordTokenizer)
    every = replace(config.tokenizer, min_count=1, vocab_size=None)  # old items may be rare by now
    found = count_words(read_corpus(config.data, "train"), every)
    count_of = dict(zip(found.words, found.counts.tolist(), strict=True))
    items = [word for word in count_of if word not in (EOS, UNK)]
    most = len(items) if config.tokenizer.vocab_size is None else config.tokenizer.vocab_size - 2
    new = [
        word
        for word in items[:most]
        if old.words.id(word) < 0 and count_of[word] >= config.tokenizer.min_count
    ]
    if not new:
        moved = "; those from data.valid_from on are not in it" * (config.data.split == "time")
        raise UserError(f"{trained.folder} has all items of the training split of the data{moved}")
    tokenizer = WordTokenizer(WordIndex.of([*old.words, *new]))
    counts = np.array([count_of.get(word, 0) for word in tokenizer.words])
    counts[tokenizer.eos_id] = 0  # it is not predicted
    if counts.sum() < (before := _num_events(trained)):
        text = "the training split has %d events, that of %s had %d: all so far should be in it"
        _log.warning(text, counts.sum(), trained.folder, before)
    data = _Data(tokenizer, config, progress)
    node = choose_nodes(trained.model, data)
    state, grown = extended_state(trained.model, node, torch.from_numpy(counts))
    find_rows(_model(trained.description, state, grown), data, counts, len(new))
    with new_folder(config.run_path) as folder:
        own = tree.node_of_row[tree.row_of_word]
        word_class = (torch.cat([own.cpu(), node]) - 1).clamp(min=0)[None].int().numpy()
        sections = config.data, config.tokenizer, config.needed_classes
        arrays = tokenizer, counts, word_class
        prepared = prepare_with(*sections, folder / "data", *arrays, progress=progress)
        write_run_metadata(Run.of(replace(config, run_dir=str(folder)), prepared=prepared))
        write_hashed(folder / "config.yaml", [to_yaml(config).encode()])
        sha256 = prepared.tokenizer_sha256
        description = replace(trained.description, valid_perplexity=None, valid_ndcg=None)
        description = replace(description, tokenizer_sha256=sha256)
        save_model(folder, state, description)
    _log.info("%d new items, %d in all", len(new), tokenizer.vocab_size - 2)


def _num_events(trained: TrainedRun) -> int:
    """The number of items of the catalogue in the training split of a run."""
    lines = (trained.folder / MODEL_FILE["words"]).read_text("utf-8").splitlines()
    counts = [int(line.rpartition("\t")[2]) for line in lines]
    return sum(counts) - counts[trained.tokenizer.eos_id] - counts[trained.tokenizer.unk_id]


def _check(trained: TrainedRun, config: Config) -> None:
    """Raises UserError if the run cannot be extended so."""
    name, is_of_words = trained.folder, trained.tokenizer.kind == "words"
    if not trained.is_independent or not is_of_words:
        raise UserError(f"{name}: lm extend requires a run with data.sequences: independent")
    others = [
        f"{key}: {old} → {new}"
        for key, (old, new) in differences(trained.config, config).items()
        if not key.startswith(_OF_DATA)
    ]
    if others:
        raise UserError(f"lm extend changes the data alone, not {', '.join(others)}")
    if config.run_path.resolve() == name.resolve():
        raise UserError("lm extend writes another run: name its folder, --run_dir=FOLDER")
    if config.run_path.exists():  # before the data are read
        raise UserError(f"{config.run_path} already exists: delete it, or choose another name")
    if trained.config.data.predict_eos:
        raise UserError(f"{name}: lm extend requires data.predict_eos: false, as an end is no item")
    if trained.config.output.tree != "two_level":
        raise UserError(f"{name}: lm extend requires output.tree: two_level")
    if _softmax(trained.model).tree.num_nodes == 1:
        raise UserError(f"{name}: lm extend requires a class: classes.shortlist has all items")
    if trained.model.input_tree is not None or trained.model.input_pieces is not None:
        raise UserError(f"{name}: lm extend cannot extend model.input_tree and model.input_pieces")


class _Data(NamedTuple):
    """The sequences of the training split, in which new items have the last ids."""

    tokenizer: WordTokenizer
    config: Config
    progress: bool

    def chunks(self, purpose: str) -> Iterator[Lines]:
        """Yield the ids of some sequences after others."""
        disable = None if self.progress else True
        lines = iter(tqdm(read_corpus(self.config.data, "train"), purpose, disable=disable))
        while chunk := list(islice(lines, LINES)):
            lines_of_ids = map(np.array, self.tokenizer.encode_lines(chunk))
            known = (ids[ids != self.tokenizer.unk_id] for ids in lines_of_ids)
            yield [ids for ids in known if len(ids)]


@torch.no_grad()
def choose_nodes(model: LanguageModel, data: _Data) -> Tensor:
    """The node [M] of the class of each new item, in the tree of the model without them."""
    output, num_old, eos_id = _softmax(model), model.vocab_size, data.tokenizer.eos_id
    row, num_new = output.tree.row_of_node[1:], data.tokenizer.vocab_size - num_old
    children = slice(0, int(output.tree.num_children[0]))
    score = torch.zeros(num_new, len(row), device=model.device)
    for chunk in data.chunks("classes"):
        lines = [line for line in chunk if (line >= num_old).any()]
        if not lines:
            continue
        known = [np.append(line[line < num_old], eos_id) for line in lines]
        read = [(hidden, index) for hidden, _, index, _ in read_lines(model, known, eos_id)]
        order = np.concatenate([index for _, index in read]).argsort(kind="stable")
        first = np.cumsum([0, *map(len, known)])[:-1]  # of each sequence in this order
        is_new = [line >= num_old for line in lines]
        pairs = zip(first, is_new, strict=True)
        place = np.concatenate([begin + np.cumsum(~each)[each] for begin, each in pairs])
        item = torch.from_numpy(np.concatenate(lines)[np.concatenate(is_new)] - num_old)
        hidden = torch.cat([hidden for hidden, _ in read])[torch.from_numpy(order[place])]
        log_prob = _with_bias(output, children, hidden.float()).log_softmax(1)
        score.index_add_(0, item.to(model.device), log_prob[:, row])
    return 1 + score.argmax(dim=1).cpu()


@torch.no_grad()
def extended_state(
    model: LanguageModel, node: Tensor, counts: Tensor
) -> tuple[dict[str, Tensor], ClassTree]:
    """The state of a model with M new items, whose vectors are means of their classes; its tree.

    Args:
        model: without them.
        node: [M] of their classes.
        counts: [N + M] events of all items.
    """
    output, tree = _softmax(model), _softmax(model).tree
    grown, moved = extended_tree(tree, node)
    node, count = node.to(model.device), counts.to(model.device).float() + 1  # none is log 0
    old, new, own = count[: tree.vocab_size], count[tree.vocab_size :], tree.row_of_word
    assert output.bias is not None
    relative = output.bias[own].float() - old.log()
    mass = old.new_zeros(tree.num_nodes).index_add(0, tree.node_of_row[own], old)

    def mean(table: Tensor) -> Tensor:
        """The weighted mean [M, …] of the values [N, …] of old items of each new one's class."""
        weight = old.view(-1, *[1] * (table.dim() - 1))
        total = table.new_zeros(tree.num_nodes, *table.shape[1:], dtype=torch.float32)
        total.index_add_(0, tree.node_of_row[own], weight * table.float())
        found: Tensor = total[node] / mass[node].view(-1, *[1] * (table.dim() - 1))
        return found

    state, row = model.state_dict(), grown.row_of_word[tree.vocab_size :].to(model.device)
    for name, array in grown.state_dict().items():
        state[f"output.tree.{name}"] = array
    for name, table in model.named_parameters():
        if name == "embedding.weight" and not model.path_sum:
            state[name] = torch.cat([table, mean(table).to(table.dtype)])
        elif name in ("output.weight", "output.bias", "embedding.weight"):
            of_new = mean(relative) + new.log() if name == "output.bias" else mean(table[own])
            state[name] = table.new_empty(grown.num_rows, *table.shape[1:])
            state[name][moved], state[name][row] = table, of_new.to(table.dtype)
    growth = (mass.index_add(0, node, new) / mass).log()[1:]
    state["output.bias"][moved[tree.row_of_node[1:].cpu()]] += growth.to(output.bias.dtype)
    return state, grown


def extended_tree(tree: ClassTree, node: Tensor) -> tuple[ClassTree, Tensor]:
    """A tree with M new words as the last children of some nodes, and the new rows [R] of its rows.

    Example:
        >>> tree, moved = extended_tree(ClassTree.two_level([0, 0, 1]), torch.tensor([1, 2, 1]))
        >>> tree.num_children.tolist(), tree.row_of_word.tolist(), moved.tolist()
        ([2, 4, 2], [2, 3, 6, 4, 7, 5], [0, 1, 2, 3, 6])
    """
    arrays = tree.num_children, tree.node_of_row, tree.row_of_node, tree.row_of_word
    num_children, node_of_row, row_of_node, row_of_word = (array.cpu() for array in arrays)
    num_new = torch.bincount(node, minlength=len(num_children))
    moved = torch.arange(tree.num_rows) + (num_new.cumsum(0) - num_new)[node_of_row]
    order = node.argsort(stable=True)
    row = torch.empty_like(node)
    row[order] = num_children.cumsum(0)[node[order]] + torch.arange(len(node))
    of_node = torch.cat([row_of_node[:1], moved[row_of_node[1:]]])
    grown = ClassTree(num_children + num_new, of_node, torch.cat([moved[row_of_word], row]))
    return grown, moved


def find_rows(model: LanguageModel, data: _Data, counts: NDArray[np.int64], num_new: int) -> None:
    """Find the rows and biases of the last M words of a model, which must have their means."""
    output, num_old = _softmax(model), model.vocab_size - num_new
    tree = output.tree
    num_of_node = torch.bincount(tree.node_of_row[tree.row_of_word[num_old:]])
    hidden, target, weight = _events(model, data, counts, num_of_node)
    node = tree.node_of_row[tree.row_of_word[target]]
    for each in num_of_node.nonzero().flatten().tolist():
        end = int(tree.first_row[each] + tree.num_children[each])
        rows = slice(end - int(tree.num_children[each]), end)
        among, num = node == each, int(num_of_node[each])
        child = tree.row_of_word[target[among]] - rows.start
        _fit(output, rows, num, hidden[among].float(), child, weight[among])


@torch.no_grad()
def _events(
    model: LanguageModel, data: _Data, counts: NDArray[np.int64], num_of_node: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors [P, H], items [P] and weights [P] of events of classes with new items."""
    tree, eos_id = _softmax(model).tree, data.tokenizer.eos_id
    node = tree.node_of_row[tree.row_of_word].cpu().numpy()
    has_new = np.pad(num_of_node.cpu().numpy() > 0, (0, tree.num_nodes - len(num_of_node)))[node]
    share = np.where(has_new, MAX_EVENTS / max(1, counts[has_new].sum()), 0)
    is_new = np.arange(len(counts)) >= len(counts) - int(num_of_node.sum())
    share[is_new] = np.maximum(share[is_new], MIN_EVENTS / np.maximum(1, counts[is_new]))
    prob = torch.from_numpy(share).clamp(max=1).float().to(model.device)
    generator = torch.Generator(model.device).manual_seed(0)
    found: list[tuple[Tensor, Tensor]] = []
    for lines in data.chunks("rows"):
        for hidden, target, *_ in read_lines(model, lines, eos_id):
            drawn = torch.rand(len(target), generator=generator, device=model.device)
            kept = drawn < prob[target]
            found.append((hidden[kept], target[kept]))
    hidden, target = (torch.cat(each) for each in zip(*found, strict=True))
    return hidden, target, 1 / prob[target]


def _fit(
    output: HierarchicalSoftmax,
    rows: slice,
    num_new: int,
    hidden: Tensor,
    child: Tensor,
    weight: Tensor,
) -> None:
    """Find the last rows of a node, given P events of its children."""
    assert output.bias is not None
    new = slice(rows.stop - num_new, rows.stop)
    with torch.no_grad():
        old_lse = _with_bias(output, slice(rows.start, new.start), hidden).logsumexp(1)
        prior = output.weight[new, : output.hidden_size].float()
        start = torch.cat([prior, output.bias[new, None].float()], dim=1)
    inputs = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
    number = child - (new.start - rows.start)  # of the new item; negative for an old one
    is_new = number >= 0
    found = start.clone().requires_grad_()
    line_search = "strong_wolfe"
    optimizer = torch.optim.LBFGS([found], max_iter=MAX_ITERATIONS, line_search_fn=line_search)

    def loss() -> Tensor:
        optimizer.zero_grad()
        logit = inputs @ found.T
        nll = torch.logaddexp(old_lse, logit.logsumexp(1))
        own = logit[is_new].gather(1, number[is_new, None]).squeeze(1)
        penalty = PENALTY / 2 * (found[:, :-1] - prior).square().sum()
        total = weight @ nll - weight[is_new] @ own + penalty
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        output.weight[new, : output.hidden_size] = found[:, :-1].to(output.weight.dtype)
        output.bias[new] = found[:, -1].to(output.bias.dtype)


def _with_bias(output: HierarchicalSoftmax, rows: slice, hidden: Tensor) -> Tensor:
    """Logits [P, rows] of hidden vectors [P, H]."""
    assert output.bias is not None
    weight = output.weight[rows, : output.hidden_size].float()
    return hidden @ weight.T + output.bias[rows].float()


def _model(description: Description, state: dict[str, Tensor], tree: ClassTree) -> LanguageModel:
    """The model with a state, whose tensors it shares."""
    output = replace(description.output, backend="auto")
    table = replace(description.word_table, row_wise=False)
    with without_weights():
        model = build_model(description.model, output, table, tree, description.context)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def _softmax(model: LanguageModel) -> HierarchicalSoftmax:
    assert isinstance(model.output, HierarchicalSoftmax)
    return model.output
