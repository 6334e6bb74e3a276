"""Word errors of hypotheses by their references: counts, rates and their intervals."""

import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled
from lm.rescoring.nbest import Ints, NBest
from lm.rescoring.references import have_no_spaces, letters_per_word
from lm.scoring.bootstrap import resampled_rates

_log = logging.getLogger(__name__)
NUM_SAMPLES = 1000
"""Samples of utterances for the interval of a word error rate."""


class ErrorCounts(NamedTuple):
    """Word errors of a hypothesis."""

    substitutions: int
    insertions: int  # words of the hypothesis alone
    deletions: int  # words of the reference alone


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    """The fewest word errors between two lists of words; of several ways, the most equal words.

    With row i for the first i words of the reference, K > the number of its words, and
    D_i0 = i (K + 1), D_0j = j K:

        D_ij = min(D_i-1,j-1 + (K + 1) [r_i ≠ h_j], D_i-1,j + K + 1, D_i,j-1 + K)

    D / K is the number of errors, and the remainder that of substitutions and deletions. The fewer
    there are, the more words are equal.

    Source: Wagner & Fischer 1974.

    Example:
        >>> word_errors("a b c d".split(), "a x c d e".split())
        ErrorCounts(substitutions=1, insertions=1, deletions=0)
    """
    number = {word: k for k, word in enumerate(dict.fromkeys([*reference, *hypothesis]))}
    ids = (
        np.array([number[word] for word in words], np.int64) for words in (reference, hypothesis)
    )
    total, missed = divmod(int(_distance(*ids)), len(reference) + 1)
    insertions = total - missed
    deletions = insertions + len(reference) - len(hypothesis)
    return ErrorCounts(missed - deletions, insertions, deletions)


@compiled
def _distance(reference: NDArray[np.int64], hypothesis: NDArray[np.int64]) -> int:
    error = len(reference) + 1  # K
    distance = np.arange(len(hypothesis) + 1) * error
    for i in range(len(reference)):
        word, above_left, left = reference[i], distance[0], distance[0] + error + 1
        distance[0] = left
        for j in range(len(hypothesis)):
            above = distance[j + 1]
            substituted = above_left if word == hypothesis[j] else above_left + error + 1
            left = min(substituted, above + error + 1, left + error)
            distance[j + 1] = left
            above_left = above
    return int(distance[-1])


@dataclass(frozen=True, kw_only=True)
class WordErrors:
    """Word errors of the hypotheses of a list, and its references."""

    counts: Ints  # [M, 3], substitutions, insertions and deletions
    references: list[str]  # [U]
    characters: bool = False  # whether characters are counted

    @cached_property
    def errors(self) -> Ints:
        """Number of errors [M]."""
        errors: Ints = self.counts.sum(1)
        return errors

    @property
    def num_words(self) -> int:
        """Number of words or characters of the references."""
        return int(self._lengths.sum())

    @property
    def _lengths(self) -> Ints:
        texts = (each.split() for each in self.references)
        return np.array([len("".join(each) if self.characters else each) for each in texts])

    @classmethod
    def of(
        cls, references: Sequence[Sequence[str]], nbest: NBest, characters: bool | None = None
    ) -> "WordErrors":
        """Compare each hypothesis with the words of its utterance, of which [U] are given.

        By default, characters are compared if the references have no spaces, or, with a warning,
        others than the hypotheses have. Both are compared in NFC, a form of Unicode.
        """
        composed = partial(unicodedata.normalize, "NFC")
        references = [composed(" ".join(words)).split() for words in references]
        if characters is None and not (characters := have_no_spaces(references)):
            hypotheses = [text.split() for text in nbest.texts]
            shorter, longer = sorted(letters_per_word(x) for x in (references, hypotheses))
            if characters := 0 < 1.25 * shorter < longer:
                cut = "has other spaces than its references: characters are compared"
                _log.warning("%s %s", nbest.name, cut)
        utterance = np.repeat(np.arange(len(references)), nbest.num_hypotheses).tolist()
        counts = []
        for place, text in zip(utterance, nbest.texts, strict=True):
            pair = references[place], composed(text).split()
            counts.append(word_errors(*(map("".join, pair) if characters else pair)))
        return cls(
            counts=np.array(counts),
            references=list(map(" ".join, references)),
            characters=bool(characters),
        )

    def report(self, nbest: NBest, chosen: Ints) -> dict[str, float | int | None]:
        """Word error rates in percent, of a list of which hypotheses [U] are chosen.

        `substitutions`, `insertions` and `deletions` are numbers of errors of the chosen
        hypotheses. `wer_before` is the rate of the first hypotheses, `wer_after` that of the
        chosen ones, `wer_oracle` that of the best ones, and `recovered` the share of the errors
        between before and oracle that rescoring avoids, None if there are none. `_low` and `_high`
        are the ends of 95 % intervals, of `wer_after` and of its difference from `wer_before`:
        percentiles over `NUM_SAMPLES` samples of utterances with replacement, None of a single one.
        Of characters, `characters` and `cer` are in place of `words` and `wer`.

        Source: intervals: Bisani & Ney 2004.
        """
        before = int(self.errors[nbest.first].sum())
        after = int(self.errors[chosen].sum())
        oracle = int(np.minimum.reduceat(self.errors, nbest.first).sum())
        rate = 100 / self.num_words
        errors = np.stack([self.errors[chosen], self.errors[chosen] - self.errors[nbest.first]])
        rates = resampled_rates(errors, self._lengths, NUM_SAMPLES, seed=1)
        interval = (100 * np.nanpercentile(rates, [2.5, 97.5], axis=0)).tolist()
        is_known = np.count_nonzero(self._lengths) > 1
        (low, low_change), (high, high_change) = interval if is_known else [[None] * 2] * 2
        kinds = dict(zip(ErrorCounts._fields, self.counts[chosen].sum(0).tolist(), strict=True))
        figures = {
            "utterances": len(nbest.ids),
            "hypotheses": len(nbest.texts),
            "words": self.num_words,
            **kinds,
            "wer_before": before * rate,
            "wer_after": after * rate,
            "wer_after_low": low,
            "wer_after_high": high,
            "wer_change_low": low_change,
            "wer_change_high": high_change,
            "wer_oracle": oracle * rate,
            "recovered": (before - after) / (before - oracle) if before > oracle else None,
        }
        if not self.characters:
            return figures
        named = {"words": "characters"}
        return {named.get(name, name.replace("wer", "cer")): figures[name] for name in figures}
