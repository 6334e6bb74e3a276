"""How high a model and counts rank the items that came next, over the whole catalogue.

The catalogue is all items of the training split: no negative items are sampled. With m predictions
of which number i has its target at rank r_i:

    HR@k = |{i: r_i ≤ k}| / m,   NDCG@k = Σ_{r_i ≤ k} 1 / log2(1 + r_i) / m,   MRR = Σ 1 / r_i / m

Items of equal probability are ranked by number. A target is missed, r = ∞, if it is not in the
catalogue, or if it is excluded as the user has had it before; both are counted. Each target is
predicted from all items before it in its sequence, those of the split included.

*Expected* hits are those that the probabilities promise: the mean over the other predictions of the
sum of P over the k first items, where P is conditioned on an item that is not excluded. Intervals
are those between the 2.5 % and 97.5 % quantiles of means over users drawn with replacement.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.sequences import Exclude, Sequences
from lm.evaluation import check_finite
from lm.model.language_model import LanguageModel
from lm.model.reader import Ints, read_lines
from lm.output.decoding.search import TopK
from lm.run import TrainedRun
from lm.scoring.ranking_figures import (
    NUM_SAMPLES,
    Predictions,
    RankingReport,
    popularity_groups,
    ranking_figures,
)

BLOCK_ELEMENTS = 1 << 23
"""Most log-probabilities in memory at once."""
ANNOUNCED_AFTER_SECONDS = 3
"""When the time that is left is estimated."""
_log = logging.getLogger(__name__)


class _Block(NamedTuple):
    """P predictions."""

    hidden: Tensor  # [P, H]
    target: Tensor  # [P]
    excluded: list[Ints]  # the distinct items that each leaves out
    last: list[int]  # the item before each target, -1 before the first


Ranker = Callable[[_Block, Sequence[int]], tuple[NDArray[Any], ...]]
"""A way to rank, by some k in ascending order: rank, probability [P] and expected hits [P, number
of k] of `Predictions`, and the best items [P, largest k], -1 where fewer are left."""


def evaluate_ranking(
    run: TrainedRun,
    split: str,
    ks: Sequence[int],
    exclude: Exclude | None = None,
    *,
    users: int | None = None,
    progress: bool = True,
    keep: Callable[[Predictions, Sequences], None] | None = None,
) -> RankingReport:
    """Rank the items to predict of a split by the model of a run, and by counts of its training.

    Args:
        run: of independent sequences.
        split: of the run.
        ks: numbers of first items.
        exclude: what is left out; None: as the repeats in training propose.
        users: this many users, drawn at random, the same each time; None: all.
        progress: whether to show a progress bar.
        keep: called with the model's predictions, and the sequences that they are of.

    Raises:
        UserError: if the run has no independent sequences, the split has no item to predict, a k
            is more than the catalogue, or a score is not finite; or as `evaluate_split`.
    """
    if not run.prepared.is_independent:
        raise UserError(f"{run.folder}: --ranking requires data.sequences: independent")
    exclude = exclude or run.prepared.proposed_exclusion
    special = [run.prepared.eos_id, run.prepared.unk_id]
    counts = run.prepared.counts()
    ways = [
        rank_by_model(run.model, special, str(run.folder)),
        rank_by_counts(counts, special),
        rank_by_counts(counts, special, run.prepared.sequences("train", items_alone=True).lines()),
    ]
    everyone = run.prepared.sequences(split, items_alone=True)
    sequences = everyone if users is None else _drawn(everyone, users)
    num_items = run.prepared.vocab_size - len(special)
    if max(ks) > num_items:
        raise UserError(f"--k {max(ks)}: the catalogue has {num_items} items")
    if not sequences.num_targets.any():
        raise UserError(f"{split}: there is no item to predict")
    ks = sorted(set(ks))
    found = predict(
        run.model,
        sequences,
        ways,
        eos_id=special[0],
        ks=ks,
        exclude=exclude,
        name=f"ranking {split}",
        progress=progress,
    )
    group = popularity_groups(counts, special)
    model, by_count, by_last = (ranking_figures(each, sequences, ks, group) for each in found)
    if keep is not None:
        keep(found[0], sequences)
    return RankingReport(
        users=int((sequences.num_targets > 0).sum()),
        all_users=int((everyone.num_targets > 0).sum()),
        predictions=int(sequences.num_targets.sum()),
        items=num_items,
        excluded=exclude,
        repeated_share=run.prepared.repeated_share,
        ties=run.config.data.ties if run.config.data.time_field else None,
        unknown_targets=int(sequences.num_left_out.sum()),
        excluded_targets=int(np.isinf(found[0].rank).sum()),
        model=model,
        popularity=by_count,
        last_item=by_last,
        method=_method(run),
    )


def _method(run: TrainedRun) -> str:
    """How a run was split and its model chosen, and what the intervals are, in words."""
    model = f"{run.checkpoint or 'of the last step'}"
    if run.checkpoint is None and run.description.valid_perplexity is not None:
        model = f"best validation {run.config.criterion.replace('ndcg', 'NDCG@10')}"
    intervals = f"{NUM_SAMPLES:,} bootstrap draws of users, 2.5 % to 97.5 %"
    rule = f"data.split: {run.config.data.split}; seed: {run.config.seed}"
    return f"{rule}; model: {model}; intervals: {intervals}"


def _drawn(sequences: Sequences, num_users: int) -> Sequences:
    """The sequences with items to predict of users drawn at random; those of others are empty."""
    users = np.flatnonzero(sequences.num_targets)
    is_drawn = np.zeros(len(sequences.begin), bool)
    is_drawn[np.random.default_rng(0).permutation(users)[:num_users]] = True
    return sequences._replace(
        end=np.where(is_drawn, sequences.end, sequences.begin),
        num_known=sequences.num_known * is_drawn,
        num_left_out=sequences.num_left_out * is_drawn,
    )


@torch.no_grad()
def predict(
    model: LanguageModel,
    sequences: Sequences,
    ways: Sequence[Ranker],
    *,
    eos_id: int,
    ks: Sequence[int],
    exclude: Exclude,
    name: str = "ranking",
    progress: bool = False,
) -> list[Predictions]:
    """Rank every target in several ways; the log has the time that is left after some seconds."""
    total, began = int(sequences.num_predicted.sum()), time.monotonic()
    # Arrays of all predictions: small ones of each block would divide the memory that it frees.
    found = [Predictions.empty(total, len(ks), model.vocab_size) for _ in ways]
    done = first = 0
    is_announced, disable = False, None if progress else True
    with tqdm(total=total, desc=name, unit="item", disable=disable) as bar:
        for block, sequence, place in _blocks(model, sequences, eos_id, exclude):
            target = block.target.cpu().numpy()
            part = slice(done, done + len(target))
            for predictions, ranked in zip(found, ways, strict=True):
                *ranks, best = ranked(block, ks)
                values = sequence, place, target, *ranks
                for number, k in enumerate(ks):
                    items = best[:, :k]
                    predictions.is_recommended[number, items[items >= 0]] = True
                for whole, new in zip(predictions, values, strict=False):
                    whole[part] = new
            bar.update(len(target))
            done, seconds = part.stop, time.monotonic() - began
            if not first:  # takes longer
                first, began = done, time.monotonic()
            elif not is_announced and seconds > ANNOUNCED_AFTER_SECONDS and done < total:
                is_announced, pace = True, seconds / (done - first)
                bar.clear()
                left = timedelta(seconds=round(pace * (total - done)))
                _log.info("%s: about %s left, %.2g s an item", name, left, pace)
    return found


def _blocks(
    model: LanguageModel, sequences: Sequences, eos_id: int, exclude: Exclude
) -> Iterator[tuple[_Block, Ints, Ints]]:
    """All predictions, with the sequence and place of each."""
    lines, step = sequences.lines(), max(1, BLOCK_ELEMENTS // model.vocab_size)
    for hidden, target, sequence, place in read_lines(model, lines, eos_id, sequences.num_known):
        # The distinct items of a sequence in the order of their first places, and these places.
        items, first = dict[int, Ints](), dict[int, Ints]()
        for each in set(sequence.tolist()) if exclude == "seen" else ():
            distinct, places = np.unique(lines[each], return_index=True)
            order = places.argsort()
            items[each], first[each] = distinct[order].astype(np.int64), places[order]
        for begin in range(0, len(sequence), step):
            part = slice(begin, begin + step)
            pairs = [*zip(sequence[part].tolist(), place[part].tolist(), strict=True)]
            had = [items[each][: first[each].searchsorted(end)] for each, end in pairs if items]
            excluded = had or [np.zeros(0, np.int64)] * len(pairs)
            last = [int(lines[each][end - 1]) if end else -1 for each, end in pairs]
            yield _Block(hidden[part], target[part], excluded, last), sequence[part], place[part]


def rank_by_model(model: LanguageModel, special: Sequence[int], name: str = "") -> Ranker:
    """Rank all items but special ones by a model; NotFiniteError begins with its name."""

    def ranked(block: _Block, ks: Sequence[int]) -> tuple[NDArray[Any], ...]:
        log_prob, target = model.output.log_prob(block.hidden), block.target[:, None]
        check_finite(log_prob, name)
        own = log_prob.gather(1, target)
        row = np.repeat(np.arange(len(target)), list(map(len, block.excluded)))
        log_prob[:, special] = -torch.inf
        log_prob[row, np.concatenate(block.excluded)] = -torch.inf
        sign = torch.empty(log_prob.shape, dtype=torch.float32, device=log_prob.device)
        # Sums of floats, exact up to 2^24 items, take less time than those of bools.
        rank = 1 + torch.gt(log_prob, own, out=sign).sum(1).double()
        for row in (torch.eq(log_prob, own, out=sign).sum(1) > 1).nonzero().flatten().tolist():
            rank[row] += sign[row, : int(target[row])].sum()
        own = log_prob.gather(1, target).squeeze(1)
        rank[own == -torch.inf] = torch.inf
        (value, item), lse = log_prob.topk(ks[-1] + 1, dim=1), log_prob.logsumexp(1)
        ends, end = torch.tensor(ks, device=value.device), ks[-1]
        for row in (value[:, ends - 1] == value[:, ends]).any(1).nonzero().flatten().tolist():
            item[row] = log_prob[row].sort(descending=True, stable=True).indices[: end + 1]
        value, item = value[:, :end], item[:, :end]
        mass = (value - lse[:, None]).double().exp().cumsum(1)[:, ends - 1]
        items = item.masked_fill(value == -torch.inf, -1)
        found = rank, (own - lse).double().exp(), mass, items
        return tuple(each.cpu().numpy() for each in found)

    return ranked


@torch.no_grad()
def best_items(
    model: LanguageModel,
    hidden: Tensor,
    k: int,
    *,
    special: Sequence[int],
    seen: Sequence[Sequence[int] | NDArray[Any]] | None = None,
) -> TopK:
    """The k most probable items of positions [P, H], [P, k], by search.

    A position that has fewer than k has these, then -1 with the log-probability -∞.

    Args:
        model: in evaluation mode.
        hidden: its vectors.
        k: number of items of each, at most those that are not `special`.
        special: token ids that are no items.
        seen: token ids that are left out of each position too.

    Raises:
        ValueError: if k is out of range, or a log-probability is not finite.
    """
    if seen is None or k > model.vocab_size - len(set(special)):
        return model.output.topk(hidden, k, excluded=special)
    rows = [torch.from_numpy(np.unique([*special, *each])) for each in seen]
    left_out = pad_sequence(rows, batch_first=True, padding_value=-1).to(hidden.device)
    sizes = np.array([min(k, model.vocab_size - len(row)) for row in rows])
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    log_prob = hidden.new_full((len(sizes), k), -torch.inf, dtype=dtype)
    best = TopK(log_prob, torch.full_like(log_prob, -1, dtype=torch.int64))
    for size in set(sizes.tolist()) - {0}:
        users = np.flatnonzero(sizes == size)
        found = model.output.topk(hidden[users], size, excluded=left_out[users])
        best.log_prob[users, :size], best.word[users, :size] = found.log_prob, found.word
    return best


def rank_by_counts(
    counts: Ints, special: Sequence[int], lines: Sequence[NDArray[Any]] = ()
) -> Ranker:
    """Rank all items but special ones by how often they followed the last one in `lines`.

    Items that followed it equally often, or never, and those without a last one are ranked by their
    numbers of events. P(i | last) ∝ c(last, i) + c(i) / Σ c, of the items that are not excluded.
    """
    order = np.argsort(-counts, kind="stable")
    order = order[~np.isin(order, special)]
    place, events = np.zeros((2, len(counts)))
    place[order], events[order] = np.arange(len(order)), counts[order]
    all_events, following = events.sum(), _Following(lines, place)

    def ranked(block: _Block, ks: Sequence[int]) -> tuple[NDArray[Any], ...]:
        targets, k = block.target.cpu().numpy(), ks[-1]
        rank, own, total = np.zeros((3, len(targets)))
        best, mass = np.full((len(targets), k), -1), np.zeros((len(targets), k))
        for row, (target, had) in enumerate(zip(targets, block.excluded, strict=True)):
            items, times = following.of(block.last[row], had)
            known = np.concatenate((had, items))
            first = order[: k + len(known)]
            first = np.concatenate((items[:k], first[~np.isin(first, known)]))[:k]
            best[row, : len(first)] = first
            mass[row, : len(first)] = events[first]
            mass[row, : len(items)] += all_events * times[:k]
            total[row] = all_events * (1 + times.sum()) - events[had].sum()
            own[row] = events[target] + all_events * times[items == target].sum()
            rank[row] = 1 + len(items) + place[target] - (place[known] < place[target]).sum()
            if target in items:
                rank[row] = 1 + np.flatnonzero(items == target)[0]
            elif target in had:
                rank[row] = np.inf
        total = np.maximum(total, 1)  # 0 if nothing is left
        mass = (mass / total[:, None]).cumsum(1)
        probability = np.where(np.isinf(rank), 0, own / total)
        return rank, probability, mass[:, [k - 1 for k in ks]], best

    return ranked


class _Following:
    """The items that followed each one in some sequences, most frequent first."""

    def __init__(self, lines: Sequence[NDArray[Any]], place: NDArray[Any]) -> None:
        size = len(place)
        pairs = [line[:-1].astype(np.int64) * size + line[1:] for line in lines if len(line) > 1]
        pair, times = np.unique(
            np.concatenate(pairs or [np.zeros(0, np.int64)]), return_counts=True
        )
        last, item = pair // size, pair % size
        order = np.lexsort((place[item], -times, last))
        self.items, self.times = item[order], times[order]
        self.start = np.searchsorted(last, np.arange(size + 1))

    def of(self, last: int, excluded: Ints) -> tuple[Ints, Ints]:
        """The items that followed one, and how often each did, but some; none after item -1."""
        part = slice(*self.start[last : last + 2]) if last >= 0 else slice(0)
        is_left = ~np.isin(self.items[part], excluded)
        return self.items[part][is_left], self.times[part][is_left]
