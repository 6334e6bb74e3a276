"""Rescoring of n-best lists: a weighted sum of acoustic and language-model scores.

    total = acoustic + α · ((1 - r) · LM + r · first pass) - p · words                       (1)
    LM = Σ over the words and `<eos>` of log(λ · P₁ + (1 - λ) · P₂)                          (2)

P₁ is the run's probability of a word, P₂ that of a second model: another run, or an ARPA model.
Without a second model λ = 1, without scores of a first pass r = 0. `words` are characters if the
n-best list has no spaces. The weights are given or tuned: those with the fewest word errors on a
development list, which must not be the list that is rescored, and decides for both lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from data_prep.errors import UserError
from lm.rescoring.nbest import Floats, Ints, NBest
from lm.rescoring.word_errors import WordErrors
from lm.scoring.mixture import mixed


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of equations (1) and (2); `UserError` if one is out of range."""

    lm_weight: float  # α, at least 0
    insertion_penalty: float = 0.0  # p, subtracted for each word
    first_pass_share: float = 0.0  # r in [0, 1]
    mixture: float = 1.0  # λ in [0, 1]

    def unused(self, *, run: str, second: str | None, has_first_pass: bool) -> list[str]:
        """The language models that have no weight; `second` is None without a second one."""
        share = self.lm_weight * (1 - self.first_pass_share)
        weight = {run: share * self.mixture}
        if second is not None:
            weight[second] = share * (1 - self.mixture)
        if has_first_pass:
            weight["the first pass"] = self.lm_weight * self.first_pass_share
        return [name for name, value in weight.items() if not value]

    def __post_init__(self) -> None:
        if not (0 <= self.lm_weight < np.inf and np.isfinite(self.insertion_penalty)):
            raise UserError("--lm-weight must be at least 0, and --insertion-penalty finite")
        if not (0 <= self.first_pass_share <= 1 and 0 <= self.mixture <= 1):
            raise UserError("--first-pass-share and --mixture must be within 0 … 1")


class ScoredList:
    """An n-best list, and the log-probabilities of its words by one or two models.

    Each model has those [words + 1] in nats of the words of each hypothesis and of its end.
    """

    def __init__(self, nbest: NBest, by_model: Sequence[Sequence[Floats]]) -> None:
        self.nbest = nbest
        lengths = np.array([len(log_prob) for log_prob in by_model[0]])
        self.num_words = lengths - 1
        if nbest.characters:
            self.num_words = np.array([len("".join(text.split())) for text in nbest.texts])
        self._first_word = np.cumsum(lengths) - lengths
        self.num_models = len(by_model)
        self._log_prob = [np.concatenate(log_probs) for log_probs in by_model]

    def lm_scores(self, mixture: float) -> Floats:
        """Equation (2), [M] nats."""
        return np.add.reduceat(combined(self._log_prob, mixture), self._first_word)

    def totals(self, weights: Weights, lm_scores: Floats | None = None) -> Floats:
        """Equation (1), [M]; `lm_scores` are those of the mixture, if they are known."""
        lm = self.lm_scores(weights.mixture) if lm_scores is None else lm_scores
        scores, r = self.nbest.scores, weights.first_pass_share
        if scores.shape[1] > 1:
            lm = (1 - r) * lm + r * scores[:, 1]
        acoustic = scores[:, 0] if scores.shape[1] else 0.0
        try:
            with np.errstate(over="raise"):
                totals: Floats = (
                    acoustic + weights.lm_weight * lm - weights.insertion_penalty * self.num_words
                )
        except FloatingPointError as error:
            raise UserError("a weighted sum of scores overflows: choose smaller weights") from error
        return totals

    def choose(self, totals: Floats) -> Ints:
        """The hypothesis with the highest total of each utterance [U]; ties go to the first."""
        first = self.nbest.first
        highest = np.repeat(np.maximum.reduceat(totals, first), self.nbest.num_hypotheses)
        places = np.flatnonzero(totals == highest)
        return places[np.searchsorted(places, first)]

    def best_lines(self, chosen: Ints) -> list[str]:
        """Lines with the `chosen` hypotheses [U], in the layout of the list."""
        nbest = self.nbest
        pairs = zip(nbest.ids, chosen, strict=True)
        return [f"{id}{nbest.separator}{nbest.texts[place]}" for id, place in pairs]

    def all_lines(self, weights: Weights) -> list[str]:
        """Lines with all hypotheses, best first, each with its acoustic and language-model score.

        They are an n-best list in the layout with tabs, with ten digits of each score.
        """
        nbest, lm_scores = self.nbest, self.lm_scores(weights.mixture)
        utterance = np.repeat(np.arange(len(nbest.ids)), nbest.num_hypotheses)
        acoustic = nbest.scores[:, 0] if nbest.scores.shape[1] else np.zeros(len(nbest.texts))
        return [
            f"{nbest.ids[utterance[k]]}\t{acoustic[k]:.10g}\t{lm_scores[k]:.10g}\t{nbest.texts[k]}"
            for k in np.lexsort((-self.totals(weights), utterance))
        ]


def combined(log_prob: Sequence[Floats], mixture: float) -> Floats:
    """Log-probabilities of one model, or of two by equation (2), word by word."""
    return mixed(log_prob[0], log_prob[1], mixture) if len(log_prob) > 1 else log_prob[0]


def tune(scored: ScoredList, errors: WordErrors) -> Weights:
    """The weights with the fewest word errors on a development list.

    A grid over all weights, then a finer one around its best point. Of several points with the
    fewest errors, the one nearest to their mean is taken. With two models, each is also tuned
    alone, by λ = 1 and λ = 0: the mixture is taken if neither has fewer errors.
    """
    shares = [[1.0]]
    if scored.num_models > 1:
        shares = [[k / 10 for k in range(11)], [1.0], [0.0]]
    return min((_refined(scored, errors, each) for each in shares), key=lambda each: each[0])[1]


def _refined(
    scored: ScoredList, errors: WordErrors, mixtures: Sequence[float]
) -> tuple[int, Weights]:
    """The fewest errors with one of some λ, or near them if they are several."""
    num_scores = scored.nbest.scores.shape[1]
    grids: list[Sequence[float]] = [
        [0.0, *(2.0 ** (k / 2) for k in range(-12, 15))] if num_scores else [1.0],  # α
        [k / 2 for k in range(-8, 9)],  # p / α, nats per word
        [k / 4 for k in range(5)] if num_scores > 1 else [0.0],  # r
        mixtures,  # λ
    ]
    (alpha, penalty, share, mixture), *_ = _best(scored, errors, grids)
    finer: list[Sequence[float]] = [
        [alpha * 2.0 ** (k / 8) for k in range(-3, 4)] if alpha else [alpha],
        [penalty + k / 8 for k in range(-3, 4)],
        sorted({min(1.0, max(0.0, share + k / 16)) for k in range(-3, 4)}),
        sorted({min(1.0, max(0.0, mixture + k / 40)) for k in range(-3, 4)}),
    ]
    finer = [grid if len(grids[axis]) > 1 else grids[axis] for axis, grid in enumerate(finer)]
    _, num_errors, weights = _best(scored, errors, finer)
    return num_errors, weights


def _best(
    scored: ScoredList, errors: WordErrors, grids: Sequence[Sequence[float]]
) -> tuple[tuple[float, ...], int, Weights]:
    """The point of a grid with the fewest errors, their number, its weights.

    Its axes are α, p / α, r and λ.
    """
    lm_scores = {mixture: scored.lm_scores(mixture) for mixture in grids[3]}
    points = list(product(*grids))
    weights = [
        Weights(lm_weight=a, insertion_penalty=a * penalty, first_pass_share=r, mixture=mixture)
        for a, penalty, r, mixture in points
    ]
    totals = (scored.totals(each, lm_scores[each.mixture]) for each in weights)
    num_errors = np.array([errors.errors[scored.choose(each)].sum() for each in totals])
    tied = np.flatnonzero(num_errors == num_errors.min())
    place = np.stack(np.unravel_index(tied, [len(grid) for grid in grids]))
    distance = np.square(place - place.mean(1, keepdims=True)).sum(0)
    best = int(tied[distance.argmin()])
    return points[best], int(num_errors[best]), weights[best]


def check_separate(tuned: NBest, reported: NBest) -> None:
    """UserError unless weights that are tuned on one list can be applied to another.

    They have as many scores, and no utterance with the same hypotheses.
    """
    if tuned.scores.shape[1] != reported.scores.shape[1]:
        raise UserError(
            f"{tuned.name} has {tuned.scores.shape[1]} scores per hypothesis and {reported.name}"
            f" has {reported.scores.shape[1]}"
        )
    texts = [
        {
            id: sorted(nbest.texts[first : first + size])
            for id, first, size in zip(nbest.ids, nbest.first, nbest.num_hypotheses, strict=True)
        }
        for nbest in (tuned, reported)
    ]
    for id, hypotheses in texts[0].items():
        if texts[1].get(id) == hypotheses:
            raise UserError(
                f"utterance {id} is in {tuned.name} and in {reported.name}:"
                " weights must be tuned on other utterances than those that they are applied to"
            )
