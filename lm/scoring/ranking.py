"""How high a model ranks the items that came next, over the whole catalogue, and popularity too.

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.sequences import Sequences
from lm.model.language_model import LanguageModel
from lm.model.reader import Ints, read_lines
from lm.run import TrainedRun
from lm.scoring.bootstrap import resampled_rates

Exclude = Literal["nothing", "seen"]
Interval = tuple[float, float]
Scores = Callable[[Tensor, Sequence[Ints]], Tensor]
"""Log-probabilities [P, N], or what ranks as these, by the hidden vectors [P, H] of P predictions
and the items that each is made from."""
NUM_SAMPLES = 1_000
"""Draws of users for an interval."""
BLOCK_ELEMENTS = 1 << 23
"""Most log-probabilities in memory at once."""
NUM_BINS = 10
"""Bins of predictions by their expected hits."""
GROUPS = ("head", "middle", "tail")
"""Items by popularity, most popular first, each with a third of the events of training."""


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """A tenth of the predictions, by their expected hits."""

    predictions: int
    expected: float  # hit rate
    observed: float  # hit rate


@dataclass(frozen=True, kw_only=True)
class AtK:
    """The figures of the k first items."""

    k: int
    hit_rate: float
    hit_rate_interval: Interval
    ndcg: float
    ndcg_interval: Interval
    coverage: float  # share of the catalogue that is among the k first items of any prediction
    expected_hit_rate: float  # of targets in the catalogue that are not excluded
    observed_hit_rate: float  # likewise
    calibration: list[CalibrationBin]


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The figures of the targets of some popularity, at the largest k."""

    group: str
    items: int
    predictions: int
    hit_rate: float
    ndcg: float


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The figures of one way to rank."""

    mrr: float
    mrr_interval: Interval
    at: list[AtK]
    by_popularity: list[GroupFigures]


@dataclass(frozen=True, kw_only=True)
class RankingReport:
    """The figures of a model and of popularity, the number of events of training."""

    users: int  # with a target
    predictions: int
    items: int  # of the catalogue
    excluded: Exclude  # what is never recommended to a user
    unknown_targets: int  # not in the catalogue: missed
    excluded_targets: int  # missed
    model: Ranked
    popularity: Ranked

    def table(self, title: str) -> str:
        """The figures as lines of text below a title."""
        seen = "are left out" if self.excluded == "seen" else "may come again (--exclude seen)"
        missed = f"{self.unknown_targets:,} not in the catalogue"
        missed += f", {self.excluded_targets:,} left out" if self.excluded == "seen" else ""
        lines = [
            f"{title}: {self.predictions:,} items to predict of {self.users:,} users, among all"
            f" {self.items:,} items; items that a user has had {seen}",
            f"missed from the outset: {missed}",
            f"{'':12}{'model':>8}  {'95 % interval':<17}{'popularity':>10}",
        ]

        def add(name: str, value: float, interval: Interval | None, other: float) -> None:
            limits = "" if interval is None else f"{interval[0]:.4f} … {interval[1]:.4f}"
            lines.append(f"{name:12}{value:8.4f}  {limits:<17}{other:10.4f}")

        for mine, theirs in zip(self.model.at, self.popularity.at, strict=True):
            add(f"HR@{mine.k}", mine.hit_rate, mine.hit_rate_interval, theirs.hit_rate)
            add("  expected", mine.expected_hit_rate, None, theirs.expected_hit_rate)
            add("  observed", mine.observed_hit_rate, None, theirs.observed_hit_rate)
            add(f"NDCG@{mine.k}", mine.ndcg, mine.ndcg_interval, theirs.ndcg)
            add("  coverage", mine.coverage, None, theirs.coverage)
        add("MRR", self.model.mrr, self.model.mrr_interval, self.popularity.mrr)
        last = self.model.at[-1]
        groups = zip(self.model.by_popularity, self.popularity.by_popularity, strict=True)
        for group, other in groups:
            add(f"HR@{last.k} {group.group}", group.hit_rate, None, other.hit_rate)
            lines[-1] += f"  {group.predictions:,} targets, {group.items:,} items"
        expected, observed = (
            " ".join(f"{getattr(each, name):.3f}" for each in last.calibration)
            for name in ("expected", "observed")
        )
        lines += [f"HR@{last.k} by tenths, expected  {expected}", f"{'observed':>28}  {observed}"]
        return "\n".join(lines)


class _Predictions(NamedTuple):
    """Predictions of M targets of the catalogue by one way to rank."""

    sequence: Ints  # [M]
    target: Ints  # [M]
    rank: NDArray[np.float64]  # [M], ∞ if the target is excluded
    expected: NDArray[np.float64]  # [M, number of k]
    is_recommended: NDArray[np.bool_]  # [number of k, N]


def evaluate_ranking(
    run: TrainedRun, split: str, ks: Sequence[int], exclude: Exclude, *, progress: bool = True
) -> RankingReport:
    """Rank the items to predict of a split by the model of a run, and by popularity.

    Raises:
        UserError: if the run has no independent sequences, the split has no item to predict, or a k
            is more than the catalogue; or as `evaluate_split`.
    """
    ways = [lambda hidden, _: run.model.output.log_prob(hidden), popularity(run)]
    (model, by_count), excluded_targets = rank_by(run, split, ways, ks, exclude, progress=progress)
    sequences = _sequences(run, split)
    per_user = sequences.num_predicted + sequences.num_left_out
    return RankingReport(
        users=int((per_user > 0).sum()),
        predictions=int(per_user.sum()),
        items=run.prepared.vocab_size - len(_special(run)),
        excluded=exclude,
        unknown_targets=int(sequences.num_left_out.sum()),
        excluded_targets=excluded_targets,
        model=model,
        popularity=by_count,
    )


def popularity(run: TrainedRun) -> Scores:
    """The log of the share of each item of the events of training."""
    counts = torch.from_numpy(run.prepared.counts().copy()).double()
    log_prob = (counts / counts.sum()).log().to(run.model.device)
    return lambda hidden, _: log_prob.repeat(len(hidden), 1)


def rank_by(
    run: TrainedRun,
    split: str,
    ways: Sequence[Scores],
    ks: Sequence[int],
    exclude: Exclude,
    *,
    progress: bool = True,
) -> tuple[list[Ranked], int]:
    """Rank the items to predict of a split in several ways.

    Returns:
        The figures of each way, and the number of targets that are excluded.

    Raises:
        UserError: as `evaluate_ranking`.
    """
    prepared, special = run.prepared, _special(run)
    if not prepared.is_independent:
        raise UserError(f"{run.folder}: --ranking requires data.sequences: independent")
    sequences, ks = _sequences(run, split), sorted(set(ks))
    num_items = prepared.vocab_size - len(special)
    if ks[-1] > num_items:
        raise UserError(f"--k {ks[-1]}: the catalogue has {num_items} items")
    if not sequences.num_predicted.any():
        raise UserError(f"{split}: there is no item of the catalogue to predict")
    found = _predict(
        run.model,
        sequences,
        ways,
        special=special,
        ks=ks,
        exclude=exclude,
        progress=f"ranking {split}" if progress else None,
    )
    group = _popularity_groups(prepared.counts(), special)
    figures = [_figures(each, sequences, ks, group, num_items) for each in found]
    return figures, int(np.isinf(found[0].rank).sum())


def _sequences(run: TrainedRun, split: str) -> Sequences:
    """The sequences of a split, without their ends, which are no items."""
    found = run.prepared.sequences(split)
    return found._replace(end=found.end - run.config.data.predict_eos)


def _special(run: TrainedRun) -> list[int]:
    """The token ids that are no items."""
    return [run.prepared.eos_id, run.prepared.unk_id]


@torch.no_grad()
def _predict(
    model: LanguageModel,
    sequences: Sequences,
    ways: Sequence[Scores],
    *,
    special: Sequence[int],
    ks: Sequence[int],
    exclude: Exclude,
    progress: str | None = None,
) -> list[_Predictions]:
    """Rank every target in several ways."""
    lines = sequences.lines()
    read = read_lines(model, lines, special[0], sequences.num_known)
    is_recommended = np.zeros((len(ways), len(ks), model.vocab_size), bool)
    found: list[list[tuple[NDArray[Any], ...]]] = [[] for _ in ways]
    total, disable = int(sequences.num_predicted.sum()), True if progress is None else None
    step = max(1, BLOCK_ELEMENTS // model.vocab_size)
    with tqdm(total=total, desc=progress, unit="item", disable=disable) as bar:
        for all_hidden, all_targets, index, place in read:
            for first in range(0, len(index), step):
                block = slice(first, first + step)
                hidden, target, sequence = all_hidden[block], all_targets[block], index[block]
                pairs = zip(sequence, place[block], strict=True)
                seen = [lines[each][:end].astype(np.int64) for each, end in pairs]
                row = np.repeat(np.arange(len(seen)), list(map(len, seen)))
                for way, scores in enumerate(ways):
                    log_prob = scores(hidden, seen)
                    own = log_prob.gather(1, target[:, None])
                    log_prob[:, special] = -torch.inf
                    if exclude == "seen":
                        log_prob[row, np.concatenate(seen)] = -torch.inf
                    rank, expected, best = _rank(log_prob, own, target, ks)
                    for number, k in enumerate(ks):
                        items = best[:, :k]
                        is_recommended[way, number, items[items >= 0]] = True
                    found[way].append((sequence, target.cpu().numpy(), rank, expected))
                bar.update(len(target))
    return [
        _Predictions(*map(np.concatenate, zip(*each, strict=True)), some)  # type: ignore[call-arg]
        for each, some in zip(found, is_recommended, strict=True)
    ]


def _rank(
    log_prob: Tensor, own: Tensor, target: Tensor, ks: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The rank [P] of each target, expected hits [P, number of k], and the best items [P, k].

    Args:
        log_prob: [P, N], -∞ of items that are not ranked.
        own: [P, 1], of the targets, even if they are not ranked.
        target: [P].
        ks: numbers of first items, in ascending order.
    """
    number = torch.arange(log_prob.shape[1], device=log_prob.device)
    is_before = (log_prob > own) | ((log_prob == own) & (number < target[:, None]))
    rank = (1 + is_before.sum(1)).double()
    rank[log_prob.gather(1, target[:, None]).squeeze(1) == -torch.inf] = torch.inf
    best = log_prob.topk(ks[-1], dim=1)
    mass = (best.values - log_prob.logsumexp(1, keepdim=True)).double().exp().cumsum(1)
    items = best.indices.masked_fill(best.values == -torch.inf, -1)
    expected = mass[:, [k - 1 for k in ks]]
    return rank.cpu().numpy(), expected.cpu().numpy(), items.cpu().numpy()


def _popularity_groups(counts: Ints, special: Sequence[int]) -> Ints:
    """The number in `GROUPS` of each item [N]; -1 of `special` ones."""
    counts = counts.copy()
    counts[special] = 0
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    group = np.empty(len(counts), np.int64)
    group[order] = np.minimum(len(GROUPS) * before // max(1, counts.sum()), len(GROUPS) - 1)
    group[special] = -1
    return group


def _figures(
    found: _Predictions, sequences: Sequences, ks: Sequence[int], group: Ints, num_items: int
) -> Ranked:
    """The figures of predictions, and of the targets outside the catalogue, which are missed."""
    per_user = sequences.num_predicted + sequences.num_left_out
    discount = 1 / np.log2(1 + found.rank)  # 0 of a missed target

    def mean(name: str, values: NDArray[Any]) -> dict[str, Any]:
        sums = np.bincount(found.sequence, values, len(per_user))
        value = float(sums.sum() / per_user.sum())
        return {name: value, f"{name}_interval": _interval(sums, per_user)}

    at = []
    is_ranked = np.isfinite(found.rank)
    for number, k in enumerate(ks):
        hit = found.rank <= k
        expected, observed = found.expected[is_ranked, number], hit[is_ranked]
        bins = np.array_split(np.argsort(expected, kind="stable"), NUM_BINS)
        at.append(
            AtK(
                k=k,
                **mean("hit_rate", hit),
                **mean("ndcg", discount * hit),
                coverage=float(found.is_recommended[number].sum() / num_items),
                expected_hit_rate=_mean(expected),
                observed_hit_rate=_mean(observed),
                calibration=[
                    CalibrationBin(
                        predictions=len(each),
                        expected=_mean(expected[each]),
                        observed=_mean(observed[each]),
                    )
                    for each in bins
                    if len(each)
                ],
            )
        )
    by_popularity = []
    for number, name in enumerate(GROUPS):
        among = group[found.target] == number
        hit = found.rank[among] <= ks[-1]
        by_popularity.append(
            GroupFigures(
                group=name,
                items=int((group == number).sum()),
                predictions=int(among.sum()),
                hit_rate=_mean(hit),
                ndcg=_mean(discount[among] * hit),
            )
        )
    return Ranked(**mean("mrr", 1 / found.rank), at=at, by_popularity=by_popularity)


def _mean(values: NDArray[Any]) -> float:
    """The mean; NaN of nothing."""
    return float(values.mean()) if len(values) else math.nan


def _interval(sums: NDArray[Any], sizes: Ints) -> Interval:
    """The 95 % interval of Σ sums / Σ sizes over users [U] drawn with replacement."""
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    low, high = np.quantile(resampled_rates(sums, sizes, NUM_SAMPLES), [0.025, 0.975])
    return float(low), float(high)
