"""Ideas for better classes and input vectors, by validation alone: what each gives and costs.

  python -m scripts.reproduction.class_ideas IDEA --data-dir DIR

trains one seed and appends a row to `class_ideas.jsonl`. Penn Treebank has six epochs of its
recipe, WikiText-2 0.8M tokens, Hungarian novels 2.5M tokens with 60,000 words. Of the ideas, the
pieces of words are a part of the product: `model.input_pieces`.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor, nn
from torch.nn import functional as F

from data_prep.classes.bigrams import count_bigrams
from data_prep.classes.exchange import exchange
from data_prep.errors import UserError
from lm.model import build
from lm.output import ClassTree, HierarchicalSoftmax
from lm.run import Run
from lm.training.loop import train
from scripts import run
from scripts.benchmarks.reporting import Table
from scripts.reproduction.runs import RESULTS, TOP, validations

COLUMNS = {
    "corpus": "{corpus}",
    "idea": "{meaning}",
    "validation perplexity": "{valid_perplexity:.2f}",
    "CPU minutes": "{cpu_seconds:.1f/60}",
}
NUM_CLASSES, SHORTLIST = 100, 300  # of Penn Treebank
SHARED = ["train.threads=1", "train.precision=bf16-mixed", "train.matmul_precision=medium"]
SHARED += ["log.every_steps=200", "optim.schedule=cosine", "optim.min_lr_factor=0.02"]
SHARED += ["optim.lr=20", "optim.clip=0.25"]
CORPORA = {
    "Penn Treebank": (
        "configs/ptb_lstm_small.yaml",
        [
            *("train.max_epochs=6", "model.dropout=0.25", "optim.weight_decay=1e-6"),
            f"classes.shortlist={SHORTLIST}",
        ],
    ),
    "WikiText-2": (
        "configs/wikitext2_lstm.yaml",
        ["train.max_epochs=null", "train.max_steps=1200"],
    ),
    "Hungarian novels": (
        "configs/eltec_hun_lstm.yaml",
        ["train.max_epochs=null", "train.max_steps=600", "tokenizer.vocab_size=60000"],
    ),
}
"""Recipe and overrides of each corpus."""


class OtherRoot(HierarchicalSoftmax):
    """A layer whose root's loss is computed apart from that of the nodes below it."""

    def root_logits(self, hidden: Tensor) -> Tensor:
        """Those of the root's children [..., K] in fp32."""
        rows = slice(0, int(self.tree.num_children[0]))
        bias = None if self.bias is None else self.bias[rows].float()
        return F.linear(hidden.float(), self.weight[rows, : self.hidden_size].float(), bias)

    def root_nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of the root [...]."""
        log_q = self.root_logits(hidden).log_softmax(-1)
        return -log_q.gather(-1, self.child(target)[..., None]).squeeze(-1)

    def child(self, target: Tensor) -> Tensor:
        """The child of the root above each word: the first row of its path."""
        return self.tree.rows_on_path(target).where(self._is_of_root(target), 0).sum(-1)

    def _is_of_root(self, target: Tensor) -> Tensor:
        rows = self.tree.rows_on_path(target)
        return (rows >= 0) & (rows < int(self.tree.num_children[0]))

    def other_root_nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """What takes the place of the root's loss."""
        return self.root_nll(hidden, target)

    def below(self, hidden: Tensor) -> Tensor:
        """The hidden vectors of the nodes below the root."""
        return hidden

    def loss(self, hidden: Tensor, target: Tensor, reduction: Any = "mean") -> Tensor:
        """As that of `HierarchicalSoftmax`."""
        below = self.below(hidden)
        nll = super().loss(below, target, "none") - self.root_nll(below, target)
        nll = nll + self.other_root_nll(hidden, target)
        return nll if reduction == "none" else nll.mean()

    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """As that of `HierarchicalSoftmax`."""
        levels = super().nll_by_level(hidden, target)
        levels[0] = self.other_root_nll(hidden, target)
        return levels


class DropoutBelowRoot(OtherRoot):
    """Dropout on the hidden vectors of all nodes but the root."""

    def below(self, hidden: Tensor) -> Tensor:
        """As that of `OtherRoot`."""
        return F.dropout(hidden, 0.2, self.training)


class RootMixture(OtherRoot):
    """A mixture of softmaxes at the root (Yang et al. 2018, equation 2)."""

    num_softmaxes = 4

    def __init__(self, hidden_size: int, tree: ClassTree, **options: Any) -> None:
        super().__init__(hidden_size, tree, **options)
        self.latent = nn.Linear(hidden_size, self.num_softmaxes * hidden_size)
        self.prior = nn.Linear(hidden_size, self.num_softmaxes, bias=False)

    def other_root_nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        """As that of `OtherRoot`."""
        latent = self.latent(hidden.float()).tanh()
        latent = latent.view(*hidden.shape[:-1], self.num_softmaxes, self.hidden_size)
        log_q = self.root_logits(latent).log_softmax(-1)
        child = self.child(target)[..., None, None].expand(*log_q.shape[:-1], 1)
        log_prior = self.prior(hidden.float()).log_softmax(-1)
        return -torch.logsumexp(log_prior + log_q.gather(-1, child).squeeze(-1), -1)


class TwoTrees(HierarchicalSoftmax):
    """The mean of the probabilities of two trees."""

    other_tree: ClassVar[ClassTree]

    def __init__(self, hidden_size: int, tree: ClassTree, **options: Any) -> None:
        super().__init__(hidden_size, tree, **options)
        self.second = HierarchicalSoftmax(hidden_size, self.other_tree, **options)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Any = "mean") -> Tensor:
        """As that of `HierarchicalSoftmax`."""
        both = super().loss(hidden, target, "none"), self.second.loss(hidden, target, "none")
        nll = math.log(2) - torch.logaddexp(-both[0], -both[1])
        return nll if reduction == "none" else nll.mean()

    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """All of it as that of the first level."""
        levels = torch.zeros(self.tree.depth, *target.shape)
        levels[0] = self.loss(hidden, target, "none")
        return levels


def classes_of(opened: Run, bigrams: sparse.csr_array, start: NDArray[np.int64]) -> ClassTree:
    """The tree of the classes that exchange finds from a start, for counts of pairs of words."""
    counts = np.array(opened.prepared.counts()).astype(np.int64)
    alone = np.argsort(-counts, kind="stable")[:SHORTLIST]
    mass = np.asarray((bigrams.sum(0) + bigrams.sum(1)) // 2).ravel().astype(np.int64)
    found = exchange(
        bigrams, np.maximum(mass, counts > 0), start, NUM_CLASSES, len(counts), separate=alone
    )
    word_class = torch.from_numpy(np.unique(found, return_inverse=True)[1].astype("int64"))
    return ClassTree.two_level(word_class, SHORTLIST, torch.from_numpy(counts))


@torch.no_grad()
def expected_bigrams(trained: Run) -> NDArray[np.float64]:
    """Σ P(w | h) over the training text, for the word before w and w [N, N]."""
    prepared, model = trained.prepared, trained.model.eval()
    tokens = np.concatenate([[prepared.eos_id], prepared.tokens("train")[:-1]]).astype(np.int64)
    num_streams = 20
    length = len(tokens) // num_streams
    streams = torch.from_numpy(tokens[: num_streams * length].reshape(num_streams, length).T.copy())
    found, state = torch.zeros(prepared.vocab_size, prepared.vocab_size), None
    assert isinstance(model.output, HierarchicalSoftmax)
    for part in torch.split(streams, 100):
        hidden, state = model(part, state)
        found.index_add_(
            0, part.flatten(), model.output.log_prob(hidden.float().flatten(0, 1)).exp()
        )
    return found.double().numpy()


@contextmanager
def two_clusterings(opened: Run, _: Path) -> Iterator[None]:
    """The second one begins with random classes."""
    prepared = opened.prepared
    bigrams = count_bigrams(prepared.tokens("train"), prepared.vocab_size)
    start = np.random.default_rng(1).permutation(prepared.vocab_size) % NUM_CLASSES
    TwoTrees.other_tree = classes_of(opened, bigrams, start)
    with patch.object(build, "HierarchicalSoftmax", TwoTrees):
        yield


@contextmanager
def expected_counts(opened: Run, base: Path) -> Iterator[None]:
    """Exchange on the actual counts plus those that the trained model expects."""
    if not (base / "model.json").exists():
        raise UserError(f"{base} has no model: train `base` first")
    prepared, scale = opened.prepared, 20
    expected = sparse.csr_array(np.rint(scale * expected_bigrams(Run.open(base))).astype(np.int64))
    actual = count_bigrams(prepared.tokens("train"), prepared.vocab_size)
    start = prepared.word_class().astype(np.int64)
    start = np.where(start < NUM_CLASSES, start, 0)
    tree = classes_of(opened, (expected + scale * actual.astype(np.int64)).tocsr(), start)
    with patch.object(build, "build_input_tree", lambda _: tree):
        yield


def layer(kind: type[HierarchicalSoftmax]) -> Callable[..., AbstractContextManager[Any]]:
    """Trains with another layer."""
    return lambda *_: patch.object(build, "HierarchicalSoftmax", kind)


class Idea(NamedTuple):
    """What is trained: the corpus, words for the table, and what replaces a part of the product."""

    corpus: str
    meaning: str
    applied: Callable[[Run, Path], AbstractContextManager[Any]] = lambda *_: nullcontext()
    overrides: tuple[str, ...] = ()


def with_pieces(corpus: str, number: int) -> Idea:
    """Input vectors with those of the pieces of words in addition."""
    meaning = f"the same with {number:,} pieces of the words"
    return Idea(corpus, meaning, overrides=(f"model.input_pieces={number}",))


IDEAS = {
    "base": Idea("Penn Treebank", "exchange classes"),
    "below": Idea("Penn Treebank", "dropout 0.2 below the root only", layer(DropoutBelowRoot)),
    "two": Idea("Penn Treebank", "mean of two clusterings", two_clusterings),
    "mixture": Idea("Penn Treebank", "mixture of four softmaxes at the root", layer(RootMixture)),
    "counts": Idea("Penn Treebank", "exchange on the model's expected counts", expected_counts),
    "hungarian": Idea("Hungarian novels", "exchange classes, path sums"),
    "pieces": with_pieces("Hungarian novels", 4000),
    "pieces_8000": with_pieces("Hungarian novels", 8000),
    "ptb_pieces": with_pieces("Penn Treebank", 4000),
    "wikitext2": Idea("WikiText-2", "exchange classes, path sums"),
    "wikitext2_pieces": with_pieces("WikiText-2", 4000),
}


def main() -> None:
    """Train an idea and log it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("idea", choices=IDEAS)
    parser.add_argument("--data-dir", required=True, help="folder of the corpus")
    parser.add_argument("--runs", type=Path, default=Path("runs/class_ideas"))
    parser.add_argument("--json", type=Path, default=RESULTS / "class_ideas.jsonl")
    options = parser.parse_args()
    idea, folder = IDEAS[options.idea], options.runs / options.idea
    if folder.exists():
        raise UserError(f"{folder} already exists")
    config, own = CORPORA[idea.corpus]
    overrides = [
        *SHARED,
        *own,
        *idea.overrides,
        f"data.dir={options.data_dir}",
        f"run_dir={folder}",
    ]
    opened = Run.read(TOP / config, [f"--{each}" for each in overrides])
    opened.prepare(progress=False)
    with idea.applied(opened, options.runs / "base"):
        start = time.process_time()
        train(opened, progress=False)
        seconds = time.process_time() - start
    lowest = min(row.valid_perplexity or math.inf for row in validations(folder / "metrics.csv"))
    row = {"name": options.idea, "corpus": idea.corpus, "meaning": idea.meaning}
    table = Table(COLUMNS, options.json)
    table.add(row | {"valid_perplexity": lowest, "cpu_seconds": seconds})


if __name__ == "__main__":
    run(main)
