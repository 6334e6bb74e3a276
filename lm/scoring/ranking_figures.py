"""The figures of a ranking, see `lm.scoring.ranking`, from the rank of each target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.sequences import Exclude, Ints, Sequences
from lm.scoring.bootstrap import resampled_rates

Interval = tuple[float, float]
NUM_SAMPLES = 1_000
"""Draws of users for an interval."""
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
    coverage: float  # share of the catalogue among the k first of any prediction of an item in it
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
    """The figures of a model and of two counts of training: events, and pairs of items."""

    users: int  # with a target, and drawn
    all_users: int  # with a target
    predictions: int
    items: int  # of the catalogue
    excluded: Exclude  # what is never recommended to a user
    repeated_share: float  # of a user's events of training, on average: items had before
    ties: str | None  # data.ties: what orders events of equal time; None without times
    unknown_targets: int  # not in the catalogue: missed
    excluded_targets: int  # missed
    model: Ranked
    popularity: Ranked
    last_item: Ranked  # by how often items followed the last one
    method: str  # split, seed, choice of the model and intervals, in words

    def table(self, title: str) -> str:
        """The figures as lines of text below a title."""
        drawn = f" drawn from {self.all_users:,}" * (self.users < self.all_users)
        missed = f"{self.unknown_targets:,} not in the catalogue"
        missed += f", {self.excluded_targets:,} left out" if self.excluded == "seen" else ""
        lines = [
            f"{title}: {self.predictions:,} items to predict of {self.users:,} users{drawn}, among"
            f" all {self.items:,} items of the training split",
            exclusion_rule(self.excluded, self.repeated_share),
            *([f"data.ties: {self.ties} orders a user's events of equal time"] * bool(self.ties)),
            f"missed from the outset: {missed}",
            f"{'':12}{'model':>8}  {'95 % interval':<17}{'popularity':>10}{'last item':>11}",
        ]

        def add(name: str, interval: Interval | None, value: float, *others: float) -> None:
            limits = ""
            if interval is not None and not math.isnan(interval[0]):
                limits = f"{interval[0]:.4f} … {interval[1]:.4f}"
            lines.append(
                f"{name:12}{value:8.4f}  {limits:<17}" + "{:10.4f} {:10.4f}".format(*others)
            )

        ways = self.model, self.popularity, self.last_item
        for each in zip(*(way.at for way in ways), strict=True):
            mine, k = each[0], each[0].k
            add(f"HR@{k}", mine.hit_rate_interval, *(one.hit_rate for one in each))
            add("  expected", None, *(one.expected_hit_rate for one in each))
            add("  observed", None, *(one.observed_hit_rate for one in each))
            add(f"NDCG@{k}", mine.ndcg_interval, *(one.ndcg for one in each))
            add("  coverage", None, *(one.coverage for one in each))
        add("MRR", self.model.mrr_interval, *(way.mrr for way in ways))
        last = self.model.at[-1]
        for groups in zip(*(way.by_popularity for way in ways), strict=True):
            add(f"HR@{last.k} {groups[0].group}", None, *(one.hit_rate for one in groups))
            lines[-1] += f"  {groups[0].predictions:,} targets, {groups[0].items:,} items"
        expected, observed = (
            " ".join(f"{getattr(each, name):.3f}" for each in last.calibration)
            for name in ("expected", "observed")
        )
        lines += [f"HR@{last.k} by tenths, expected  {expected}", f"{'observed':>28}  {observed}"]
        counts = {"popularity": self.popularity, "last item": self.last_item}
        if above := [name for name, way in counts.items() if way.at[-1].ndcg > last.ndcg]:
            text = f"the model is below {' and '.join(above)} in NDCG@{last.k}"
            lines.append(f"{text}: it may need more training (train, optim)")
        lines.append(self.method)
        return "\n".join(lines)


def exclusion_rule(excluded: Exclude, repeated_share: float) -> str:
    """What a ranking leaves out, and the share of training by which it is chosen, in words."""
    others = {
        "seen": ("are left out", "nothing ranks them too"),
        "nothing": ("may come again", "seen leaves them out"),
    }
    what, other = others[excluded]
    share = f"{100 * repeated_share:.2f} % of a user's training events repeat one"
    return f"items that a user has had {what} ({share}; --exclude {other})"


class Predictions(NamedTuple):
    """Predictions of M targets of the catalogue by one way to rank."""

    sequence: Ints  # [M]
    place: Ints  # [M], number of items of the catalogue before it in its sequence
    target: Ints  # [M]
    rank: NDArray[np.float64]  # [M], ∞ if the target is excluded
    probability: NDArray[np.float64]  # [M], of the target, given that no excluded item comes
    expected: NDArray[np.float64]  # [M, number of k]
    is_recommended: NDArray[np.bool_]  # [number of k, N]

    @classmethod
    def empty(cls, num_targets: int, num_ks: int, vocab_size: int) -> "Predictions":
        """Predictions that are to be written, of which none recommends an item yet."""
        sequence, place, target = np.empty((3, num_targets), np.int64)
        rank, probability = np.empty((2, num_targets))
        expected = np.empty((num_targets, num_ks))
        recommended = np.zeros((num_ks, vocab_size), bool)
        return cls(sequence, place, target, rank, probability, expected, recommended)


def popularity_groups(counts: Ints, special: Sequence[int]) -> Ints:
    """The number in `GROUPS` of each item [N]; -1 of `special` ones."""
    counts = counts.copy()
    counts[special] = 0
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    group = np.empty(len(counts), np.int64)
    group[order] = np.minimum(len(GROUPS) * before // max(1, counts.sum()), len(GROUPS) - 1)
    group[special] = -1
    return group


def ranking_figures(
    found: Predictions, sequences: Sequences, ks: Sequence[int], group: Ints
) -> Ranked:
    """The figures of predictions, and of the targets outside the catalogue, which are missed."""
    per_user = sequences.num_targets
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
                coverage=float(found.is_recommended[number].sum() / (group >= 0).sum()),
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
    """The 95 % interval of Σ sums / Σ sizes over users [U] drawn with replacement; NaN of one."""
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    if len(sums) < 2:
        return math.nan, math.nan
    low, high = np.quantile(resampled_rates(sums, sizes, NUM_SAMPLES), [0.025, 0.975])
    return float(low), float(high)
