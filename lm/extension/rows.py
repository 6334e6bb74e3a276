"""The rows and biases of new words, fitted in each class: a convex problem."""

import logging
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.extension.contexts import Contexts
from lm.model.language_model import LanguageModel
from lm.output import HierarchicalSoftmax

MAX_NUMBERS = 1 << 27
"""Numbers in the hidden vectors of the events that rows are found from; of more events, a sample in
which each one stands for several."""
MAX_LOGITS = 1 << 31
"""Logits of the children of a node, of all events; likewise."""
MAX_NEW_LOGITS = 1 << 27
"""Logits of the new children of a node, of the events of these. If there are more, as in a full
softmax with thousands of new words, the rows of these remain the means."""
NUM_OLD_LOGITS = 1 << 23
"""Logits of the new children of a node, of a sample of the other events: as many events as new
children have, or as many as have this number of logits, if that is more."""
PART = 1 << 20
"""Logits of the new children of a node that are computed at once."""
MIN_EVENTS = 100
"""Events of each new word that are in the sample, if it has as many."""
PENALTY = 5.0
"""λ. On MovieLens 1M, 1 and 5 find rows of the same hit rate for the new items; 5 keeps more of the
old ones'."""
PRIOR = 0.03
"""Events that each word of a text has in addition, so that a few sentences with new words do not
take most of the share of their classes. With 30 names in 50 sentences, 0.03 makes them more
probable in others than 0 and 0.1, and the perplexity of the old text rises by 2 %."""
MAX_ITERATIONS = 20
"""Iterations of L-BFGS."""
_log = logging.getLogger(__name__)


def fit_rows(model: LanguageModel, contexts: Contexts, counts: NDArray[np.int64]) -> None:
    """Fit the rows and biases of the new words of a model, from the means that they have."""
    output, num_unsolved = model.tree_softmax, 0
    tree = output.tree
    new_row = tree.row_of_word[contexts.num_old :]
    is_new_row = torch.zeros_like(tree.node_of_row, dtype=torch.bool).index_fill(0, new_row, True)
    num_of_node = torch.bincount(tree.node_of_row[new_row], minlength=tree.num_nodes)
    hidden, target, weight = _events(model, contexts, counts, num_of_node)
    path = tree.rows_on_path(target)
    node = tree.node_of_row[path.clamp(min=0)].masked_fill(path < 0, -1).flatten()
    by_node = node.argsort(stable=True)
    begin = torch.searchsorted(node[by_node], torch.arange(tree.num_nodes + 1, device=node.device))
    num_old = tree.sum_below((~is_new_row[tree.row_of_word]).long())
    generator = torch.Generator(model.device).manual_seed(1)
    uniform = torch.rand(len(target), generator=generator, device=model.device)
    for each in num_of_node.nonzero().flatten().tolist():
        first, visit = int(tree.first_row[each]), by_node[begin[each] : begin[each + 1]]
        event, level = visit // path.shape[1], visit % path.shape[1]
        rows = torch.arange(first, first + int(tree.num_children[each]), device=new_row.device)
        row, is_new = path[event, level], is_new_row[rows]
        is_own = is_new_row[row]
        num_own, num_new = int(is_own.sum()), int(is_new.sum())
        if num_own * num_new > MAX_NEW_LOGITS:
            num_unsolved += num_new
            continue
        share = max(num_own, NUM_OLD_LOGITS // num_new) / max(1, len(event) - num_own)
        is_drawn = is_own | (uniform[event] < share)
        event, row = event[is_drawn], row[is_drawn]
        weight_of_event = weight[event] / torch.where(is_own[is_drawn], 1.0, min(1.0, share))
        num_prior = 0 if contexts.are_items else PRIOR * int(num_old[each])
        of_node = hidden[event].float(), row, weight_of_event
        _fit(output, rows[~is_new], rows[is_new], num_prior, *of_node)
    if num_unsolved:
        _log.warning(
            "%d new words have the mean row of their class: too many share it", num_unsolved
        )


@torch.no_grad()
def _events(
    model: LanguageModel, contexts: Contexts, counts: NDArray[np.int64], num_of_node: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors [P, H], words [P] and weights [P] of events below nodes with new words."""
    tree, count = model.tree_softmax.tree, torch.from_numpy(counts).to(model.device)
    rows = tree.rows_on_path(torch.arange(tree.vocab_size, device=model.device))
    node = tree.node_of_row[rows.clamp(min=0)]  # the root where there is none
    has_new = (num_of_node > 0)[node].any(1)
    largest = MAX_LOGITS / (tree.sum_below(count) * tree.num_children).clamp(min=1).double()
    share = largest.masked_fill(num_of_node == 0, math.inf)[node].amin(1)
    num_events = max(1, int(count[has_new].sum()))
    share = share.clamp(max=MAX_NUMBERS / model.tree_softmax.hidden_size / num_events)
    share *= has_new
    new = slice(contexts.num_old, None)
    share[new] = share[new].maximum(MIN_EVENTS / count[new].clamp(min=1))
    prob = share.clamp(max=1).float()
    generator = torch.Generator(model.device).manual_seed(0)
    found: list[tuple[Tensor, Tensor]] = []
    for hidden, target in contexts.events(model):
        drawn = torch.rand(len(target), generator=generator, device=model.device)
        kept = drawn < prob[target]
        found.append((hidden[kept], target[kept]))
    hidden, target = (torch.cat(each) for each in zip(*found, strict=True))
    return hidden, target, 1 / prob[target]


def _fit(
    output: HierarchicalSoftmax,
    old: Tensor,
    new: Tensor,
    num_prior: float,
    hidden: Tensor,
    row: Tensor,
    weight: Tensor,
) -> None:
    """Find the new rows of a node, given its old ones and P events of its children.

    `num_prior` further events, spread over the same hidden vectors, have old children.
    """
    assert output.bias is not None
    with torch.no_grad():
        parts = torch.split(hidden, max(1, (1 << 24) // max(1, len(old))))
        old_lse = torch.cat([logits(output, old, part).logsumexp(1) for part in parts])
        prior = output.weight[new, : output.hidden_size].float()
        start = torch.cat([prior, output.bias[new, None].float()], dim=1)
    inputs = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
    number = torch.searchsorted(new, row).clamp(max=len(new) - 1)[:, None]
    weight_of_own = weight * torch.isin(row, new)
    weight_of_all = weight * (1 + num_prior / weight.sum())
    events = inputs, old_lse, weight_of_all, weight_of_own, number
    split = (torch.split(each, max(1, PART // len(new))) for each in events)
    batches = list(zip(*split, strict=True))
    found = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([found], max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe")

    @torch.no_grad()
    def loss() -> Tensor:
        difference = found[:, :-1] - prior
        total = PENALTY / 2 * difference.square().sum()
        found.grad = torch.nn.functional.pad(PENALTY * difference, (0, 1))
        for x, lse, of_all, of_own, own in batches:
            logit = x @ found.T
            nll = torch.logaddexp(lse, logit.logsumexp(1))
            total += of_all @ nll - of_own @ logit.gather(1, own).squeeze(1)
            error = (logit - nll[:, None]).exp_().mul_(of_all[:, None])
            error.scatter_add_(1, own, -of_own[:, None])
            found.grad.addmm_(error.T, x)
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        output.weight[new, : output.hidden_size] = found[:, :-1].to(output.weight.dtype)
        output.bias[new] = found[:, -1].to(output.bias.dtype)


def logits(output: HierarchicalSoftmax, rows: Tensor | slice, hidden: Tensor) -> Tensor:
    """Logits [P, rows] of hidden vectors [P, H]."""
    assert output.bias is not None
    weight = output.weight[rows, : output.hidden_size].float()
    return hidden @ weight.T + output.bias[rows].float()
