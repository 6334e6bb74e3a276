"""Loss by the frequency rank of the predicted word, and by that of the word before it.

Ranks are those of the counts in the training split, 1 for the most frequent word; ties go by id.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.prepared import Prepared
from lm.figures import perplexity

LAST_RANKS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Last ranks of bins; a further bin has the rest."""


@dataclass(frozen=True, kw_only=True)
class FrequencyBin:
    """The tokens of a text whose word, or whose previous word, has a rank within limits."""

    first_rank: int
    last_rank: int
    tokens: int
    nll_nats: float  # sum over these tokens

    @property
    def mean_nats(self) -> float:
        """Nats per token; NaN if there is none."""
        return self.nll_nats / self.tokens if self.tokens else math.nan


@dataclass(frozen=True, kw_only=True)
class FrequencyReport:
    """The negative log-likelihood of a text, divided into bins in two ways."""

    target: list[FrequencyBin]  # by the predicted word
    previous: list[FrequencyBin]  # by the word before it, `<eos>` at the start
    num_spelled: int = 0  # unknown words that are spelled
    spelling_nats: float | None = None  # of their spellings, in no bin; None: they are `<unk>`

    def table(self) -> str:
        """Both divisions as lines of text."""
        lines = []
        for title, bins in (("predicted", self.target), ("previous", self.previous)):
            total = sum(each.nll_nats for each in bins) + (self.spelling_nats or 0)
            tokens = sum(each.tokens for each in bins)
            head = f"rank of the {title} word"
            lines.append(
                f"{head:<30} {'tokens %':>9} {'nats/token':>11} {'perplexity':>11} {'nats %':>7}"
            )
            for each in bins:
                ranks = f"{each.first_rank:,} … {each.last_rank:,}"
                shares = 100 * each.tokens / tokens, 100 * each.nll_nats / total
                figures = f"{each.mean_nats:11.4f} {perplexity(each.nll_nats, each.tokens):11.2f}"
                lines.append(f"  {ranks:<28} {shares[0]:9.2f} {figures} {shares[1]:7.2f}")
            if self.spelling_nats is not None and self.num_spelled:
                share, nats = 100 * self.num_spelled / tokens, self.spelling_nats
                mean = nats / self.num_spelled
                figures = f"{share:9.2f} {mean:11.4f} {'':11} {100 * nats / total:7.2f}"
                lines.append(f"  {'spelling of unknown words':<28} {figures}")
        return "\n".join(lines)


def frequency_report(
    prepared: Prepared,
    tokens: NDArray[Any],
    nll: NDArray[np.float64],
    spelling: NDArray[np.float64] | None = None,
) -> FrequencyReport:
    """The report on a text of tokens [n] that any model has predicted with `nll` [n] nats.

    `spelling` are the nats of the spelling of each unknown word; None: they are not spelled.
    """
    previous = np.concatenate([[prepared.eos_id], tokens[:-1]])
    counts = prepared.counts()
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    return FrequencyReport(
        target=_bins(rank[tokens], nll, len(rank)),
        previous=_bins(rank[previous], nll, len(rank)),
        num_spelled=0 if spelling is None else len(spelling),
        spelling_nats=None if spelling is None else float(spelling.sum()),
    )


def _bins(rank: NDArray[Any], nll: NDArray[Any], vocab_size: int) -> list[FrequencyBin]:
    """Bins of tokens [n] with a rank and nats each."""
    last = [each for each in LAST_RANKS if each < vocab_size] + [vocab_size]
    number = np.searchsorted(last, rank)
    tokens = np.bincount(number, minlength=len(last))
    sums = np.bincount(number, nll, len(last))
    return [
        FrequencyBin(first_rank=first, last_rank=stop, tokens=int(num), nll_nats=float(total))
        for first, stop, num, total in zip(
            [1, *(each + 1 for each in last)], last, tokens, sums, strict=False
        )
    ]
