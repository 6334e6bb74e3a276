"""Decoding one position: sampling and exact top-k, top-p and min-p, against opening everything.

`sample` draws a word; `draw top-p` draws one from the nucleus, and not the first word, as
`lm generate` leaves out unknown words. The others find sets of words.

The hidden vector is flat (every word is about as probable as any other) or peaked: its logits are
those of a word and of its neighbours, 12 nats above the others; both are of layers that are
not trained. With `--runs`, hidden vectors are those of trained models, at positions of their
validation text, one in each round. Ways take turns in one process, each for a few calls in
succession, as one position follows another in generation; figures are medians over all calls. `all`
evaluates the log-probabilities of all words under the same tree and selects among them; `full` does
the same with a full softmax of as many words.

`same` says whether the words found are those that the definition chooses, in its order, among the
log-probabilities that a search for all words finds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from data_prep.errors import UserError
from lm.commands.arguments import at_least_one
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.backends.base import row_size
from lm.output.decoding import distribution
from lm.output.decoding.distribution import log_prob, sample
from lm.output.decoding.draws import Sampling
from lm.output.decoding.positions import Positions, checked_hidden
from lm.run import TrainedRun
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size

TOP_K, TOP_P, MIN_P = 10, 0.9, 0.1
DRAWS = {"sample": Sampling(), "draw top-p": Sampling(top_p=TOP_P, excluded=(0,))}
WAYS = (*DRAWS, "top-k", "top-p", "min-p")
SHARPNESS = 12.0
"""Nats of the peaked distribution."""
CALLS = 5
"""Calls of a way in succession; the first one finds other data in the caches."""
COLUMNS = {
    "N": "{vocab_size:,}",
    "distribution": "{distribution}",
    "way": "{way}",
    "milliseconds": "{seconds:.2f/1e-3}",
    "÷ all": "{ratio_to_all:.2f}",
    "full ÷ ours": "{full_to_ours:.1f}",
    "same": "{same}",
}
Finder = Callable[[], Tensor]


def chosen(log_probs: Tensor, way: str) -> Tensor:
    """The words of a way among all words [N], in order."""
    if way == "sample":
        return torch.multinomial(log_probs.exp(), 1) if len(log_probs) <= 1 << 24 else log_probs[:0]
    if way == "top-k":
        return log_probs.topk(TOP_K).indices  # in any order if some are equal
    if way == "min-p":
        kept = (log_probs >= log_probs.max() + torch.tensor(MIN_P).log()).nonzero().squeeze(1)
        return kept[log_probs[kept].argsort(descending=True, stable=True)]
    is_draw = way == "draw top-p"
    if is_draw:
        log_probs[0] = -torch.inf
    ordered = log_probs.sort(descending=True, stable=True)
    mass = ordered.values.double().exp().cumsum(0)
    share = TOP_P * mass[-1] if is_draw else TOP_P  # of all words, whose sum is 1
    nucleus = ordered.indices[: int((mass < share).sum()) + 1]
    return nucleus[torch.multinomial(log_probs[nucleus].exp(), 1)] if is_draw else nucleus


class Case(NamedTuple):
    """A layer, and the hidden vectors that it decodes."""

    distribution: str
    hidden: Tensor  # [rounds, H]
    weight: Tensor
    tree: ClassTree
    bias: Tensor | None
    full: Tensor  # [N, H], rows of a full softmax


def ways(case: Case, hidden: Tensor, way: str) -> list[Finder]:
    """Ours for a hidden vector [1, H], that of `all`, and that of `full`."""
    weight, tree, bias = case.weight, case.tree, case.bias

    def ours() -> Tensor:
        if way in DRAWS:
            return sample(hidden, weight, tree, bias, DRAWS[way])
        positions = Positions(checked_hidden(hidden, weight, tree, bias), weight, tree, bias)
        finder = distribution.finder(positions)
        if way == "top-k":
            return finder.topk(positions, TOP_K).word[0]
        sets = (
            finder.nuclei(positions, 1.0, TOP_P)
            if way == "top-p"
            else finder.within_ratio(positions, 1.0, MIN_P)
        )
        ((_, words),) = sets
        return words.word[0]  # of one position: nothing is padded

    return [
        ours,
        lambda: chosen(log_prob(hidden, weight, tree, bias)[0], way),
        lambda: chosen(F.linear(hidden, case.full).log_softmax(dim=1)[0], way),
    ]


def defined(case: Case, hidden: Tensor, way: str) -> Tensor:
    """The words of a way, by the definition."""
    tree = case.tree
    words = distribution.topk(hidden, case.weight, tree, case.bias, k=tree.vocab_size)
    log_probs = torch.empty_like(words.log_prob).scatter_(1, words.word, words.log_prob)[0]
    return words.word[0, :TOP_K] if way == "top-k" else chosen(log_probs, way)


def untrained(problem: tuple[int, int], options: argparse.Namespace) -> Iterator[Case]:
    """A flat and a peaked distribution, of a problem (N, H)."""
    vocab_size, size = problem
    torch.manual_seed(0)
    tree = ClassTree.two_level(num_words=vocab_size)
    device = torch.device(options.device)
    weight = torch.zeros(tree.num_rows, row_size(size), device=device)
    weight[:, :size].normal_(std=0.02)
    full = torch.zeros(vocab_size, size, device=device).normal_(std=0.02)
    path = [row for _, row in tree.path(vocab_size // 3)]
    near = [weight[row : row + 20, :size].mean(dim=0, keepdim=True) for row in path]
    peak = torch.cat(near).sum(dim=0, keepdim=True)
    peak = SHARPNESS * len(path) * peak / (weight[path, :size] @ peak.T).sum()
    for name, hidden in (("flat", torch.randn(1, size, device=device) / 50), ("peaked", peak)):
        yield Case(name, hidden.expand(options.rounds, -1), weight, tree.to(device), None, full)


@torch.no_grad()
def trained(folder: str, options: argparse.Namespace) -> Case:
    """Hidden vectors of a run's model at evenly spaced positions of the validation text."""
    opened = TrainedRun.open(folder, device=options.device)
    layer = opened.model.output
    assert isinstance(layer, HierarchicalSoftmax)
    split = opened.prepared.tokens("valid")[: 100 * options.rounds]
    if len(split) < 100 * options.rounds:
        raise UserError(f"{folder}: the validation text has {len(split):,} tokens, 100 a round")
    tokens = torch.from_numpy(split.astype("int64")).to(options.device)
    hidden = opened.model(tokens[:, None])[0][50::100, 0].float()
    full = hidden.new_zeros(layer.tree.vocab_size, hidden.shape[1]).normal_(std=0.02)
    return Case("trained", hidden, layer.weight, layer.tree, layer.bias, full)


def measure(case: Case, way: str, rounds: int) -> dict[str, Any]:
    """The figures of one way."""
    seconds: list[list[float]] = [[], [], []]
    same, num_words = True, 0
    for turn in range(-1, rounds):  # the first one warms up
        hidden = case.hidden[max(turn, 0), None]
        finders = ways(case, hidden, way)
        found = []
        for each, finder in zip(seconds, finders, strict=True):
            for _ in range(CALLS if turn >= 0 else 1):
                start = time.perf_counter()
                words = finder()
                if words.is_cuda:
                    torch.cuda.synchronize()
                each += [time.perf_counter() - start] * (turn >= 0)
            found.append(words)
        same &= way in DRAWS or torch.equal(found[0], defined(case, hidden, way))
        num_words = max(num_words, len(found[0]))
    ours, all_words, of_full = map(statistics.median, seconds)
    return {
        "vocab_size": case.tree.vocab_size,
        "hidden_size": case.hidden.shape[1],
        "distribution": case.distribution,
        "way": way,
        "seconds": ours,
        "ratio_to_all": ours / all_words,
        "full_to_ours": of_full / ours,
        "num_words": num_words,
        "same": "" if way in DRAWS else same,
    }


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", metavar="N:H")
    add("--runs", nargs="+", metavar="RUN", help="trained models, in place of --rows")
    add("--rounds", type=at_least_one, default=15)
    add("--threads", type=at_least_one, default=1)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(COLUMNS, options.json, options.device)
    sizes = options.rows or [(33_278, 512), (267_735, 512), (1_000_000, 300)]
    cases: Iterable[Case] = chain.from_iterable(untrained(size, options) for size in sizes)
    if options.runs:
        cases = (trained(folder, options) for folder in options.runs)
    with torch.no_grad():
        for case in cases:
            for way in WAYS:
                table.add(measure(case, way, options.rounds))


if __name__ == "__main__":
    run(main)
