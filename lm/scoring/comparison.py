"""A paired comparison of trained models on one text: the difference of losses, and how sure it is.

Both models predict the same tokens, or with an open vocabulary the same bytes. The interval says
what other lines of this text would give; another document, or another seed of the training, can
differ by more.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.evaluation import TextLosses, encode_text
from lm.figures import perplexity, table_of
from lm.run import TrainedRun
from lm.scoring.bootstrap import resampled_rates
from lm.scoring.frequency import FrequencyBin, frequency_report

_log = logging.getLogger(__name__)
BLOCK_LINES, LEAST_BLOCKS, NUM_SAMPLES = 50, 20, 10_000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model and another one on a text, both evaluated as by `lm evaluate`."""

    other: str  # folder of the other run
    perplexity: float  # of the other run, per token of its own
    bits_per_byte: float | None  # of the other run; None if one of both does not spell every byte
    unit: Literal["nats/token", "bits/byte"]  # of the difference: bits if both spell every byte
    difference: float  # ours less the other's
    interval: tuple[float, float] | None  # its 95 % interval, see `bootstrap_interval`
    by_frequency: list[FrequencyBin] | None  # losses of the other run, by the predicted word

    def table(self, ours: list[FrequencyBin] | None = None) -> str:
        """The figures as lines of text; with `ours`, differences by the predicted word too."""
        rows = {
            "perplexity of the other": f"{self.perplexity:.2f}",
            "difference": f"{_signed(self.difference)} {self.unit}",
            "  95 % within the text": f"not known: fewer than {LEAST_BLOCKS} lines",
        }
        if self.bits_per_byte is not None:
            del rows["perplexity of the other"]  # its tokens may be others
            rows = {"bits per byte of the other": f"{self.bits_per_byte:.4f}"} | rows
        if self.interval is not None:
            low, high = self.interval
            rows["  95 % within the text"] = f"{_signed(low)} … {_signed(high)}"
        if ours is not None and self.by_frequency is None:
            rows["  by rank"] = "not known: the other has other tokens"
        for mine, other in zip(ours or (), self.by_frequency or (), strict=False):
            ranks = f"  rank {mine.first_rank:,} … {mine.last_rank:,}"
            rows[ranks] = f"{_signed(mine.mean_nats - other.mean_nats)} nats/token"
        return table_of(f"compared with {self.other} (negative: ours is better)", rows)


def compare(ours: TextLosses, other: TrainedRun, *, by_frequency: bool = False) -> Comparison:
    """Compare a run with another one, see `check_comparable`, on a text.

    The difference is in bits per byte if the vocabulary is open and both spell every byte, else in
    nats per token, of which both have as many in each line. With `by_frequency`, losses of the
    other are divided by the rank of the predicted word, which requires the same tokens.

    Raises:
        UserError: if the other run has other tokens or lines, and does not spell the same bytes.
    """
    same_tokens = not _other_tokenizer(ours.run, other)
    tokens = ours.tokens
    if not same_tokens and ours.lines is not None:
        tokens, _ = encode_text(other, ours.lines)
    theirs = TextLosses.of(other, tokens, ours.lines)
    has_bytes, scale = ours.has_bytes and theirs.has_bytes, 1.0
    if ours.lines is not None and has_bytes:
        sizes = np.array([len(line.encode()) + 1.0 for line in ours.lines])
        scale = 1 / math.log(2)
    elif same_tokens or (ours.lines is not None and _same_words(ours.run, other)):
        eos_id = ours.run.description.eos_id
        sizes = sums_of_lines(np.ones(len(ours.tokens)), ours.tokens, eos_id)
    else:
        lossy = other if ours.has_bytes else ours.run
        raise UserError(
            f"{lossy.folder} does not spell case or spaces of this text, and {other.folder} has"
            f" other tokens than {ours.run.folder}: they cannot be compared (models of words with"
            " one tokenizer.lowercase and split_punctuation can)"
        )
    sums = nats_of_lines(ours) * scale, nats_of_lines(theirs) * scale
    nats, bins = float(sums[1].sum()) / scale, None
    if by_frequency and same_tokens:  # by our ranks: the other may have other training text
        bins = frequency_report(ours.run.prepared, tokens, theirs.nats).target
    return Comparison(
        other=str(other.folder),
        perplexity=perplexity(nats, len(tokens)),
        bits_per_byte=nats * scale / float(sizes.sum()) if has_bytes else None,
        unit="bits/byte" if has_bytes else "nats/token",
        difference=float((sums[0] - sums[1]).sum() / sizes.sum()),
        interval=bootstrap_interval(*sums, sizes),
        by_frequency=bins,
    )


def _signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # no -0.0000


def check_comparable(
    run: TrainedRun,
    others: Sequence[TrainedRun],
    split: str,
    *,
    open_vocabulary: bool = False,
    lines: Sequence[str] | None = None,
) -> None:
    """Raises UserError if a run is not trained, or would not evaluate the same text alone.

    With an open vocabulary, tokens may be others. `lines` are the text, empty ones included;
    None: a split, whose text may have some. Warns of a run that was prepared with another.
    """
    for other in others:
        if _other_tokenizer(run, other) and not open_vocabulary:
            raise UserError(
                f"{other.folder} has another tokenizer than {run.folder}, so other tokens: add"
                " --open-vocabulary"
            )
        same_rule = other.keeps_empty_lines == run.keeps_empty_lines
        if not same_rule and not all(map(str.strip, lines or [""])):
            dropping, keeping = (run, other) if other.keeps_empty_lines else (other, run)
            raise UserError(
                f"{dropping.folder} leaves out empty lines, {keeping.folder} does not"
                " (data.keep_empty_lines): compare them with --text on a text without any"
            )
        with suppress(UserError):  # without its data, it is not known
            splits = [each.prepared.splits.get(split) for each in (run, other)]
            if lines is None and len({each and each.utf8_bytes for each in splits}) > 1:
                text = "%s was prepared with another %s split: it may have been trained on this one"
                _log.warning(text, other.folder, split)


def _same_words(run: TrainedRun, other: TrainedRun) -> bool:
    """Whether both divide any text into the same words, of which they may know others."""
    one, two = run.tokenizer, other.tokenizer
    names = ("kind", "lowercase", "split_punctuation")
    return one.kind == "words" and all(getattr(one, n) == getattr(two, n) for n in names)


def _other_tokenizer(run: TrainedRun, other: TrainedRun) -> bool:
    return other.description.tokenizer_sha256 != run.description.tokenizer_sha256


def nats_of_lines(losses: TextLosses) -> NDArray[np.floating]:
    """Nats [L] of lines, spellings included."""
    nats = losses.nats.copy()
    if losses.spelling is not None and len(losses.spelling):
        nats[losses.tokens == losses.run.description.unk_id] += losses.spelling
    return sums_of_lines(nats, losses.tokens, losses.run.description.eos_id)


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
    the ratio of the quantiles of Student's t and of the normal distribution. Arguments are [L], of
    each line; the result is None for fewer than `LEAST_BLOCKS` lines.
    """
    from scipy.special import ndtri, stdtrit  # for comparisons alone

    if len(tokens) < LEAST_BLOCKS:
        return None
    starts = np.arange(0, len(tokens), min(BLOCK_LINES, len(tokens) // LEAST_BLOCKS))
    difference, sizes = (np.add.reduceat(each, starts) for each in (nats - other, tokens))
    means = resampled_rates(difference, sizes, NUM_SAMPLES)
    num, mean = len(starts), difference.sum() / sizes.sum()
    wider = math.sqrt(num / (num - 1)) * stdtrit(num - 1, 0.975) / ndtri(0.975)
    low, high = mean + wider * (np.quantile(means, [0.025, 0.975]) - mean) + 0.0  # no -0.0
    return float(low), float(high)
