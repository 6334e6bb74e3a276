"""N-best lists: their layouts, references, word errors, and the choice of one hypothesis each.

There are two layouts; only the first has tabs:

- `id TAB hypothesis`, with up to two columns of scores between them: the acoustic
  log-probability, and the log-probability of the language model of the first pass, both natural.
  An id has no spaces.
- `utterance-N hypothesis` for the N-th hypothesis, Kaldi's layout. The scores are in separate files
  of lines `utterance-N cost`, where a cost is a negative natural log-probability.

An utterance's hypotheses are in the order of the file; the first is that of the first pass.
"""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError
from lm.rescoring.edit_distance import edit_distance
from lm.rescoring.formats import NUMBER, NonWords
from lm.rescoring.references import References, first_columns, keyed_lines

MAX_SCORES = 2
_COLUMNS = "expected lines id TAB scores TAB words: reorder the columns"
_HEADER = re.compile(
    r"(utt\w*|\w*id|key|file\w*)\t([\w ]+\t)*[\w ]*(text|hyp|word|sentence|transcript)\w*", re.I
)
_log = logging.getLogger(__name__)
NUM_SAMPLES = 1000
"""Samples of utterances for the interval of a word error rate."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class NBest:
    """The hypotheses of U utterances, one utterance after another."""

    name: str  # of the file
    separator: str  # a tab, or the space of Kaldi's layout
    ids: list[str]  # [U], names of the utterances
    first: Ints  # [U], index of each utterance's first hypothesis
    texts: list[str]  # [M], the hypotheses
    scores: Floats  # [M, S] natural log-probabilities: acoustic, language model of the first pass

    @property
    def num_hypotheses(self) -> Ints:
        """Number of hypotheses of each utterance [U]."""
        return np.diff(self.first, append=len(self.texts))


def read_nbest(
    name: str,
    costs: Sequence[dict[str, float]] = (),
    *,
    lines: Iterable[str] | None = None,
    hint: str = "",
    non_words: NonWords | None = None,
) -> NBest:
    """Read an n-best list; empty lines are skipped.

    Args:
        name: name of the file; `-` is stdin.
        lines: its lines, if they are read already.
        costs: scores of Kaldi's layout, from `read_costs`: acoustic, first pass.
        hint: what to add to the message that a cost is missing.
        non_words: labels that are left out of hypotheses.

    Raises:
        UserError: if a line does not have the layout of the first one, a score is missing, or
            a key of Kaldi's layout is repeated.
    """
    lines = read_text(name) if lines is None else lines
    non_words = NonWords() if non_words is None else non_words
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{name}: the n-best list is empty")
    is_kaldi = "\t" not in numbered[0][1]
    if costs and not is_kaldi:
        raise DataError(f"{name}: files of costs belong to Kaldi's layout; this one has tabs")
    num_scores = numbered[0][1].count("\t") - 1
    rows: dict[str, list[tuple[str, list[float]]]] = {}
    kaldi_keys: set[str] = set()
    _check_layout(name, [line for _, line in numbered], is_kaldi)
    for number, line in numbered:
        place = f"{name}, line {number}"
        if is_kaldi:
            key, _, text = line.partition(" ")
            id, _, rank = key.rpartition("-")
            if not id or not rank.isdecimal():
                raise DataError(f"{place}: expected a tab, or a key utterance-N, got {key!r}")
            if key in kaldi_keys:
                raise DataError(f"{place}: {key} is in the list already")
            if not all(key in each for each in costs):
                raise DataError(f"{place}: {key} has no cost in the files of costs{hint}")
            kaldi_keys.add(key)
            scores = [-each[key] for each in costs]
        else:
            id, *columns = line.split("\t")
            text = columns.pop() if columns else ""
            if not len(columns) == num_scores <= MAX_SCORES:
                expected = f"an id, {min(max(num_scores, 0), MAX_SCORES)} scores and a hypothesis"
                raise DataError(f"{place}: expected {expected}, got {len(columns)} scores")
            scores = [finite_number(column, place) for column in columns]
        if id.split() != [id] and id:
            raise DataError(
                f"{place}: expected a tab after an id without spaces, got {id!r}; {_COLUMNS}"
            )
        if "\t" in text or not id:
            missing = "no tab" if is_kaldi else "an id before the first tab"
            raise DataError(f"{place}: expected {missing}")
        rows.setdefault(id, []).append((non_words.without(text), scores))
    flat = [row for group in rows.values() for row in group]
    non_words.log(name)
    nbest = NBest(
        name=name,
        separator=" " if is_kaldi else "\t",
        ids=list(rows),
        first=np.cumsum([0, *map(len, rows.values())])[:-1],
        texts=[text for text, _ in flat],
        scores=np.array([scores for _, scores in flat], dtype=np.float64),
    )
    _check_signs(nbest)
    return nbest


def _check_layout(name: str, lines: Sequence[str], is_kaldi: bool) -> None:
    """Refuse scores where hypotheses should be, and names of columns."""
    if _HEADER.fullmatch(lines[0]):
        raise DataError(f"{name}: the first line has names of columns, {lines[0]!r}: remove it")
    if is_kaldi and all(re.match(r"\S+\s+-?\d+\.\d+(e[+-]?\d+)?(\s|$)", line) for line in lines):
        raise DataError(
            f"{name}: a number comes before the words of each line: scores of Kaldi's layout are in"
            " files of costs (--acoustic-costs, --lm-costs)"
        )
    is_score = re.compile(rf".*\t\s*(?=.*[-+.e]){NUMBER}\s*").fullmatch
    if all(map(is_score, lines)):
        raise DataError(f"{name}: the last column has numbers alone, {_COLUMNS}")


def _check_signs(nbest: NBest) -> None:
    """Warn of scores that are rather costs: the higher, the later in their lists."""
    if not nbest.scores.shape[1]:
        return
    totals = nbest.scores.sum(1)
    lowest, highest = (each.reduceat(totals, nbest.first) for each in (np.minimum, np.maximum))
    is_list = lowest < highest
    num_lists, num_lowest = is_list.sum(), (is_list & (totals[nbest.first] == lowest)).sum()
    if 2 * num_lowest > num_lists:
        _log.warning(
            "%s: the first hypothesis has the lowest score of %s of %s lists: scores are"
            " log-probabilities, the higher the better; change the signs of costs",
            nbest.name,
            num_lowest,
            num_lists,
        )
    elif nbest.scores.shape[1] > 1 and (nbest.scores[:, 1] > 0).any():
        _log.warning(
            "%s: scores of the first pass's language model are above 0, which no log-probability"
            " is; change the signs of costs",
            nbest.name,
        )


def finite_number(text: str, place: str) -> float:
    """The number that a text is; UserError with its place in the file if it is not a finite one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{place}: expected a finite score, got {text!r}")
    return value


def read_costs(name: str) -> dict[str, float]:
    """Read lines `utterance-N cost`, with a tab or spaces between; empty lines are skipped.

    Raises:
        UserError: if a line does not have this form or repeats a key.
    """
    costs: dict[str, float] = {}
    for place, key, words in keyed_lines(first_columns(name), "cost"):
        if len(words) != 1:
            line = " ".join([key, *words])
            raise DataError(f"{place}: expected utterance-N and a cost, got {line!r}")
        costs[key] = finite_number(words[0], place)
    return costs


class ErrorCounts(NamedTuple):
    """Word errors of a hypothesis."""

    substitutions: int
    insertions: int  # words of the hypothesis alone
    deletions: int  # words of the reference alone


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> ErrorCounts:
    """The fewest word errors between two lists of words; of several ways, the most equal words.

    The number of errors and that of substitutions and deletions, `edit_distance`, and the lengths
    determine the counts.

    Example:
        >>> word_errors("a b c d".split(), "a x c d e".split())
        ErrorCounts(substitutions=1, insertions=1, deletions=0)
    """
    number = {word: k for k, word in enumerate(dict.fromkeys([*reference, *hypothesis]))}
    ids = (
        np.array([number[word] for word in words], np.int64) for words in (reference, hypothesis)
    )
    total, missed = edit_distance(*ids)
    insertions = total - missed
    deletions = insertions + len(reference) - len(hypothesis)
    return ErrorCounts(missed - deletions, insertions, deletions)


@dataclass(frozen=True, kw_only=True)
class WordErrors:
    """Word errors of the hypotheses of a list, and its references."""

    counts: Ints  # [M, 3], substitutions, insertions and deletions
    references: list[str]  # [U]
    characters: bool = False  # whether characters are counted, of references without spaces

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
    def compare(cls, references: "References", nbest: NBest) -> "WordErrors":
        """Compare each hypothesis with its reference, by characters if these have no spaces.

        Raises:
            UserError: if an utterance has no reference, or all references are empty.
        """
        words, name = references.words, references.name
        if missing := [id for id in nbest.ids if id not in words]:
            raise DataError(f"{name}: no reference for utterance {missing[0]} of {nbest.name}")
        if not any(words[id] for id in nbest.ids):
            raise DataError(f"{name}: the references have no words")
        characters = references.has_no_spaces(nbest.ids)
        ids = np.repeat(nbest.ids, nbest.num_hypotheses).tolist()
        counts = []
        for id, text in zip(ids, nbest.texts, strict=True):
            pair = words[id], text.split()
            counts.append(word_errors(*(map("".join, pair) if characters else pair)))
        return cls(
            counts=np.array(counts),
            references=[" ".join(words[id]) for id in nbest.ids],
            characters=characters,
        )

    def report(self, nbest: NBest, chosen: Ints) -> dict[str, float | int | None]:
        """Word error rates in percent.

        Args:
            nbest: the list.
            chosen: [U], the hypothesis of each utterance after rescoring.

        Returns:
            `substitutions`, `insertions` and `deletions` are numbers of errors of the chosen
            hypotheses. `wer_before` is the rate of the first hypotheses, `wer_after` that of the
            chosen ones, `wer_oracle` that of the best ones, and `recovered` the share of the errors
            between before and oracle that rescoring avoids, None if there are none. `_low` and
            `_high` are the ends of 95 % intervals, of `wer_after` and of its difference from
            `wer_before`: percentiles over `NUM_SAMPLES` samples of utterances with replacement.
            Of characters, `characters` and `cer` are in place of `words` and `wer`.

        Source: intervals: Bisani & Ney 2004.
        """
        before = int(self.errors[nbest.first].sum())
        after = int(self.errors[chosen].sum())
        oracle = int(np.minimum.reduceat(self.errors, nbest.first).sum())
        rate = 100 / self.num_words
        errors = np.stack([self.errors[chosen], self.errors[chosen] - self.errors[nbest.first]])
        (low, low_change), (high, high_change) = _interval(errors, self._lengths)
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


def _interval(errors: Ints, num_words: Ints) -> Floats:
    """95 % intervals [2, R] in percent of R error rates, from errors [R, U] and words [U]."""
    rng, size = np.random.default_rng(1), len(num_words)
    rates = []
    for _ in range(NUM_SAMPLES):
        sample = rng.integers(size, size=size)
        if total := num_words[sample].sum():
            rates.append(100 * errors[:, sample].sum(1) / total)
    interval: Floats = np.percentile(rates, [2.5, 97.5], axis=0)
    return interval
