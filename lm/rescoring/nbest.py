"""N-best lists, in two layouts.

Only the first has tabs:

- `id TAB hypothesis`, with up to two columns of scores between them: the acoustic
  log-probability, and the log-probability of the language model of the first pass, both natural.
  An id has no spaces.
- `utterance-N hypothesis` for the N-th hypothesis, Kaldi's layout. The scores are in separate files
  of lines `utterance-N cost`, where a cost is a negative natural log-probability.

An utterance's hypotheses are in the order of the file, or of N; the first is that of the first
pass.
"""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError
from lm.rescoring.formats import NUMBER, NonWords
from lm.rescoring.references import first_columns, have_no_spaces, keyed_lines

MAX_SCORES = 2
_COLUMNS = "expected lines id TAB scores TAB words: reorder the columns"
_KEY = "expected a tab, or a key utterance-N (lists and lattices of other formats: convert them)"
_HEADER = re.compile(
    r"(utt\w*|\w*id|key|file\w*)\t([\w ]+\t)*[\w ]*(text|hyp|word|sentence|transcript)\w*", re.I
)
_log = logging.getLogger(__name__)

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
    characters: bool = False  # whether the insertion penalty is for characters: without spaces

    @property
    def num_hypotheses(self) -> Ints:
        """Number of hypotheses of each utterance [U]."""
        return np.diff(self.first, append=len(self.texts))


def read_nbest(
    name: str,
    costs: Sequence[dict[str, float]] = (),
    *,
    lines: Iterable[str] | None = None,
    non_words: NonWords | None = None,
) -> NBest:
    """Read the lines of an n-best list, by default those of the file; empty ones are skipped.

    `costs` are the scores of Kaldi's layout, from `read_costs`: acoustic, first pass. `non_words`
    are left out of hypotheses.

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
    rows: dict[str, list[tuple[int, str, list[float]]]] = {}
    kaldi_keys: set[str] = set()
    _check_layout(name, [line for _, line in numbered], is_kaldi)
    for number, line in numbered:
        place, rank = f"{name}, line {number}", "0"
        if is_kaldi:
            key, _, text = line.partition(" ")
            id, _, rank = key.rpartition("-")
            if not id or not rank.isdecimal():
                raise DataError(f"{place}: {_KEY}, got {key!r}")
            if key in kaldi_keys:
                raise DataError(f"{place}: {key} is in the list already")
            if not all(key in each for each in costs):
                raise DataError(f"{place}: {key} has no cost in the files of costs")
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
        rows.setdefault(id, []).append((int(rank), non_words.without(text), scores))
    flat = [row for group in rows.values() for row in sorted(group, key=itemgetter(0))]
    non_words.log(name)
    nbest = NBest(
        name=name,
        separator=" " if is_kaldi else "\t",
        ids=list(rows),
        first=np.cumsum([0, *map(len, rows.values())])[:-1],
        texts=[text for _, text, _ in flat],
        scores=np.array([scores for *_, scores in flat], dtype=np.float64),
        characters=have_no_spaces([text.split() for _, text, _ in flat]),
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
