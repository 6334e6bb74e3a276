"""A paired comparison of trained models on one text: the difference in nats, and how sure it is.

Both models predict the same tokens, so that the difference varies far less than either loss. The
interval says what other lines of this text would give: lines of one document resemble each other,
so that another document, or another seed of the training, can differ by more. Compare several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.evaluation import as_json, perplexity
from lm.run import Run
from lm.scoring.frequency import FrequencyBin, divided_by_frequency
from lm.scoring.mixture import token_log_probs

BLOCK_LINES, LEAST_BLOCKS, NUM_SAMPLES = 50, 20, 10_000
SAMPLED_NUMBERS = 1 << 22
"""Numbers of blocks that are drawn at a time."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and another one on a text, both evaluated as by `lm evaluate`."""

    other: str  # folder of the other run
    perplexity: float  # of the other run
    difference: float  # in nats per token, ours less the other's
    interval: tuple[float, float] | None  # its 95 % interval, see `bootstrap_interval`
    by_frequency: list[FrequencyBin] | None  # losses of the other run, by the predicted word

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON, see `as_json`."""
        return as_json(self)

    def table(self, ours: list[FrequencyBin] | None = None) -> str:
        """The figures as lines of text; with `ours`, differences by the predicted word too."""
        rows = {
            "perplexity of the other": f"{self.perplexity:.2f}",
            "difference": f"{self.difference:+.4f} nats/token",
            "  95 % within the text": f"not known: fewer than {LEAST_BLOCKS} lines",
        }
        if self.interval is not None:
            low, high = self.interval
            rows["  95 % within the text"] = f"{low:+.4f} … {high:+.4f}"
        for mine, other in zip(ours or (), self.by_frequency or (), strict=True):
            ranks = f"  rank {mine.first_rank:,} … {mine.last_rank:,}"
            rows[ranks] = f"{mine.mean_nats - other.mean_nats:+.4f}"
        width = max(map(len, rows))
        title = f"compared with {self.other} (negative: ours is better)"
        return "\n".join([title, *(f"  {name:<{width}}  {rows[name]}" for name in rows)])


def compare(
    run: Run,
    others: Sequence[Run],
    tokens: NDArray[Any],
    ours: NDArray[np.float64],
    *,
    by_frequency: bool = False,
) -> list[Comparison]:
    """Compare a run with others of the same tokenizer on a text.

    Args:
        run: the run.
        others: others, see `check_comparable`.
        tokens: [n] ids.
        ours: [n], nats of each token by the run.
        by_frequency: whether losses of the others are divided by the rank of the predicted word.
    """
    description = run.description
    sums = [
        sums_of_lines(each, tokens, description.eos_id) for each in (ours, np.ones(len(tokens)))
    ]
    found = []
    for other in others:
        theirs = -token_log_probs(other, tokens)
        lines = sums_of_lines(theirs, tokens, description.eos_id)
        bins = None
        if by_frequency:
            bins = divided_by_frequency(run.prepared, tokens, theirs).target
        found.append(
            Comparison(
                other=str(other.folder),
                perplexity=perplexity(float(theirs.sum()), len(tokens)),
                difference=float((ours - theirs).mean()),
                interval=bootstrap_interval(sums[0], lines, sums[1]),
                by_frequency=bins,
            )
        )
    return found


def check_comparable(run: Run, others: Sequence[Run]) -> None:
    """Raises UserError if a run is not trained, or has another tokenizer, thus other tokens."""
    for other in others:
        if other.description.tokenizer_sha256 != run.description.tokenizer_sha256:
            raise UserError(
                f"{other.folder} has another tokenizer than {run.folder}, so other tokens"
            )


def sums_of_lines(
    values: NDArray[np.floating], tokens: NDArray[Any], eos_id: int
) -> NDArray[np.floating]:
    """The sums [L] of values [n] of tokens [n] over lines, each of which ends in `<eos>`."""
    ends = np.flatnonzero(np.asarray(tokens) == eos_id)
    starts = np.concatenate([[0], ends + 1])
    return np.add.reduceat(values, starts[starts < len(tokens)])


def bootstrap_interval(
    nats: NDArray[np.floating], other: NDArray[np.floating], tokens: NDArray[np.number]
) -> tuple[float, float] | None:
    """The 95 % interval of the difference in nats per token within a text, ours less the other's.

    Blocks of `BLOCK_LINES` lines, or fewer in a short text, are drawn with replacement; both models
    have the same blocks. Means of n drawn blocks vary less than those of n new ones, and n - 1
    degrees of freedom make their spread uncertain: the interval is wider by √(n / (n - 1)), and by
    the ratio of the quantiles of Student's t and of the normal distribution.

    Args:
        nats, other: [L], of each line.
        tokens: [L], of each line.

    Returns:
        Its limits; None of a text that has fewer than `LEAST_BLOCKS` lines.
    """
    from scipy.special import ndtri, stdtrit  # for comparisons alone

    if len(tokens) < LEAST_BLOCKS:
        return None
    starts = np.arange(0, len(tokens), min(BLOCK_LINES, len(tokens) // LEAST_BLOCKS))
    difference, sizes = (np.add.reduceat(each, starts) for each in (nats - other, tokens))
    generator, means = np.random.default_rng(0), np.empty(NUM_SAMPLES)
    step = max(1, SAMPLED_NUMBERS // len(starts))
    for first in range(0, NUM_SAMPLES, step):
        part = means[first : first + step]
        drawn = generator.integers(len(starts), size=(len(part), len(starts)))
        part[:] = difference[drawn].sum(1) / sizes[drawn].sum(1)
    num, mean = len(starts), difference.sum() / sizes.sum()
    wider = math.sqrt(num / (num - 1)) * stdtrit(num - 1, 0.975) / ndtri(0.975)
    low, high = mean + wider * (np.quantile(means, [0.025, 0.975]) - mean) + 0.0  # no -0.0
    return float(low), float(high)
