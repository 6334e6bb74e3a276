"""A paired comparison of trained models on one text: the difference in nats, and how sure it is.

Both models predict the same tokens, so that the difference varies far less than either loss. The
interval says what other texts of the kind would give. It says nothing about other seeds of the
training: for that, train and compare several.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.evaluation import perplexity
from lm.run import Run
from lm.scoring.frequency import FrequencyBin, divided_by_frequency
from lm.scoring.mixture import token_log_probs

BLOCK_LINES, NUM_SAMPLES = 50, 10_000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and another one on a text, both evaluated as by `lm evaluate`."""

    other: str  # folder of the other run
    perplexity: float  # of the other run
    difference: float  # in nats per token, ours less the other's
    low: float  # limits of its 95 % interval over texts
    high: float
    by_frequency: list[FrequencyBin] | None  # losses of the other run, by the predicted word

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)

    def table(self, ours: list[FrequencyBin] | None = None) -> str:
        """The figures as lines of text; with `ours`, differences by the predicted word too."""
        rows = {
            "perplexity of the other": f"{self.perplexity:.2f}",
            "difference": f"{self.difference:+.4f} nats/token",
            "  95 % over texts": f"{self.low:+.4f} … {self.high:+.4f}",
        }
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
        low, high = bootstrap_interval(sums[0], lines, sums[1])
        bins = None
        if by_frequency:
            bins = divided_by_frequency(run.prepared, tokens, theirs).target
        found.append(
            Comparison(
                other=str(other.folder),
                perplexity=perplexity(float(theirs.sum()), len(tokens)),
                difference=float((ours - theirs).mean()),
                low=low,
                high=high,
                by_frequency=bins,
            )
        )
    return found


def check_comparable(run: Run, others: Sequence[Run]) -> None:
    """Raises UserError if a run is not trained, or has another tokenizer, thus other tokens."""
    for other in others:
        if other.description.tokenizer_sha256 != run.description.tokenizer_sha256:
            raise UserError(f"{other.folder} has another tokenizer than {run.folder}")


def sums_of_lines(
    values: NDArray[np.floating], tokens: NDArray[Any], eos_id: int
) -> NDArray[np.floating]:
    """The sums [L] of values [n] of tokens [n] over lines, each of which ends in `<eos>`."""
    ends = np.flatnonzero(np.asarray(tokens) == eos_id)
    starts = np.concatenate([[0], ends + 1])
    return np.add.reduceat(values, starts[starts < len(tokens)])


def bootstrap_interval(
    nats: NDArray[np.floating], other: NDArray[np.floating], tokens: NDArray[np.number]
) -> tuple[float, float]:
    """The 95 % interval over texts of the difference in nats per token, ours less the other's.

    Blocks of `BLOCK_LINES` lines are drawn with replacement; both models have the same blocks.

    Args:
        nats, other: [L], of each line.
        tokens: [L], of each line.
    """
    starts = np.arange(0, len(tokens), BLOCK_LINES)
    difference, sizes = (np.add.reduceat(each, starts) for each in (nats - other, tokens))
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(starts), size=(NUM_SAMPLES, len(starts)))
    means = difference[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
