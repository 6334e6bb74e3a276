"""ARPA files: the n-grams of each order as arrays, and the model that they are.

A line has log10 P, the n words, and perhaps a log10 back-off weight, with spaces or tabs between.

Source: Stolcke 2002, SRILM, ngram-format(5).
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.figures import token_unit
from lm.scoring.ngram_tree import NATS_PER_LOG10, Arrays, Floats, Ints, NGramTree, link

NO_UNK = -100 * NATS_PER_LOG10
"""Log-probability of a word that a file without `<unk>` lacks, as in KenLM."""
TOLERANCE = 0.1
"""Largest error of a sum of probabilities."""
_log = logging.getLogger(__name__)
BLOCK = 1 << 16
"""Lines that are converted at once."""
_HEADING = re.compile(
    r"ngram[ \t]+(\d+)[ \t]*=[ \t]*(\d+)|\\(\d{1,2})-grams:|\\end\\", re.IGNORECASE
)
_CONVERT = "convert it by compile-lm --text=yes {} FILE.arpa"
_QUANTIZED = "a quantized file of IRSTLM: give the ARPA file that it was made from"
_OTHERS = {
    "iARPA": f"a file in IRSTLM's own format: {_CONVERT}",
    "blmt": f"a binary file of IRSTLM: {_CONVERT}",
    **dict.fromkeys(("qARPA", "Qblmt"), _QUANTIZED),
}
"""Beginnings of files that are no ARPA files, and what they are."""
_NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|-inf"


class NGrams(NamedTuple):
    """The n-grams of one order."""

    ids: Ints  # [M, n]
    log_prob: Floats  # [M] nats
    backoff: Floats  # [M] nats, 0 where there is none
    line: Ints  # [M] numbers of the lines


def read_arpa(path: Path, id_of: dict[str, int]) -> list[NGrams]:
    """The n-grams of each order of a file, which may be compressed.

    Its unigrams are added to `id_of`, the ids of words. N-grams of other words are left out.

    Raises:
        DataError: if the file cannot be read or is no complete ARPA file.
    """
    parts: dict[int, list[NGrams]] = {}
    unigrams = dict[str, int]()
    for order, first, lines in _blocks(path):
        log_prob, backoff, columns = _columns(lines, order, f"{path}, line", first)
        if order == 1:
            for word in columns[0].to_pylist():
                unigrams[word] = id_of.setdefault(word, len(id_of))
        rows: Any = np.column_stack([_ids(each, unigrams) for each in columns])
        known = (rows >= 0).all(1)
        each = rows, log_prob, backoff, np.arange(first, first + len(rows))
        parts.setdefault(order, []).append(NGrams(*(values[known] for values in each)))
    by_order = (parts.pop(order) for order in sorted(parts))
    ngrams = [NGrams(*map(np.concatenate, zip(*each, strict=True))) for each in by_order]
    _check_sums(path, ngrams, id_of)
    return ngrams


def _ids(words: Any, id_of: dict[str, int]) -> Ints:
    """The ids of a pyarrow array of words, -1 of those without one."""
    distinct = words.dictionary_encode()
    ids = np.array([id_of.get(word, -1) for word in distinct.dictionary.to_pylist()], np.int64)
    found: Ints = ids[distinct.indices]
    return found


def _check_sums(path: Path, ngrams: Sequence[NGrams], id_of: dict[str, int]) -> None:
    """Warn if the probabilities of words do not add up to 1, or to more than 1 after others."""
    for order, (ids, log_prob, *_) in enumerate(ngrams, 1):
        hashes = np.zeros(len(ids), dtype=np.uint64)  # of the words before the last one
        for column in ids[:, :-1].T:
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64)
        _, first, context = np.unique(hashes, return_index=True, return_inverse=True)
        p = np.exp(log_prob) * (ids[:, -1] != id_of.get("<s>", -1))
        totals = np.bincount(context, p, minlength=1)
        k = int(totals.argmax())
        if totals[k] > 1 + TOLERANCE or (order == 1 and totals[k] < 1 - TOLERANCE):
            word_of = {id: word for word, id in id_of.items()}
            words = " ".join(word_of[id] for id in ids[first[k : k + 1], :-1].ravel().tolist())
            what = f"its {order}-grams" + (f" after {words!r}" if words else "")
            sums = f"the probabilities of {what} add up to {totals[k]:.3g}, not to 1"
            _log.warning("%s: %s: estimate the model again, with logarithms of base 10", path, sums)


def _blocks(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Order, number of the first line, and some lines with n-grams of this order."""
    expected: dict[int, int] = {}
    found: dict[int, int] = {}
    order, block, has_begun, is_complete = 0, list[str](), False, False
    for number, line in enumerate(read_text(str(path)), 1):
        line = line.strip(" \t\r")
        is_ngram = has_begun and bool(line)
        is_ngram &= line[:1] not in "\\nN" or line[:3].lower() == "nan"
        if is_ngram:
            block.append(line)
        if block and not (is_ngram and len(block) < BLOCK):
            found[order] = found.get(order, 0) + len(block)
            yield order, number - len(block) + is_ngram, block
            block = []
        if not has_begun:
            for begin, what in _OTHERS.items():
                if line.startswith(begin):
                    raise DataError(f"{path} is {what.format(path)}")
            has_begun = line.lower() == "\\data\\"
        elif not is_ngram and (match := _HEADING.fullmatch(line)):
            if match[1]:
                expected[int(match[1])] = int(match[2])
            order = int(match[3] or 0)
            is_complete = line.lower() == "\\end\\"
    if not has_begun:
        raise DataError(f"{path} is not an ARPA file: it has no line \\data\\")
    if not is_complete:
        raise DataError(f"{path} is not complete: it has no line \\end\\")
    for n in range(1, max(found, default=1) + 1):
        if n not in found:
            raise DataError(f"{path} is damaged: it has no {n}-grams")
    for n in sorted(expected | found):
        if expected.get(n, 0) != found.get(n, 0):
            raise DataError(
                f"{path} is damaged: its head states {expected.get(n, 0):,} {n}-grams, and"
                f" {found.get(n, 0):,} follow"
            )


def _columns(
    lines: list[str], order: int, place: str, first: int
) -> tuple[Floats, Floats, Sequence[Any]]:
    """Log-probabilities and back-off weights in nats, and the n columns of words, of lines."""
    import pyarrow
    from pyarrow import compute

    words = "".join(rf"[ \t]+(?P<word{k}>[^ \t]+)" for k in range(order))
    pattern = rf"^(?P<log_prob>{_NUMBER}){words}(?:[ \t]+(?P<backoff>{_NUMBER}))?$"
    fields = compute.extract_regex(pyarrow.array(lines), pattern=pattern)
    if not order or fields.null_count:
        number = first + (fields.is_null().index(True).as_py() if order else 0)
        expected = f"expected log10 P, {order} words and perhaps a back-off weight"
        raise DataError(f"{place} {number}: {expected}")
    log_prob, *columns, backoff = fields.flatten()
    backoff = compute.if_else(compute.equal(backoff, ""), "0", backoff)
    values = [compute.cast(each, "float64").to_numpy() for each in (log_prob, backoff)]
    if (values[0] > 0).any():
        number = int((values[0] > 0).argmax())
        problem = f"log10 P is {values[0][number]:g}, above 0: no probability"
        raise DataError(f"{place} {first + number}: {problem}; estimate the model again")
    return values[0] * NATS_PER_LOG10, values[1] * NATS_PER_LOG10, columns


class ArpaModel(NGramTree):
    """The n-grams of an ARPA file, which may be compressed, in fp64.

    A line begins with `<s>` and ends with `</s>`.

    Attributes:
        has_unk: whether the file has `<unk>`.

    Raises:
        DataError: if the file cannot be read, is no complete ARPA file, or has an n-gram twice.
    """

    eos_id, unk_id, _begin = 0, 1, 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self._words = {"</s>": self.eos_id, UNK: self.unk_id, "<UNK>": self.unk_id}
        self._words["<s>"] = self._begin
        ngrams = read_arpa(path, self._words)
        keys, places = self._nodes(ngrams, len(self._words))
        sizes = list(map(len, keys))
        arrays = Arrays.empty(1 + sum(sizes), 1 + sum(sizes[:-1]), np.float64)
        arrays.log_prob[1:] = np.nan
        begin, parents = 1, slice(0, 1)
        for n, (each, key, place) in enumerate(zip(ngrams, keys, places, strict=True), 1):
            first = np.arange(parents.stop - parents.start) * len(self._words)
            arrays.first[parents] = begin + np.searchsorted(key, first)
            parents = slice(begin, begin + len(key))
            arrays.word[parents] = key % len(self._words)
            arrays.log_prob[begin + place] = each.log_prob
            if n < len(sizes):
                arrays.backoff[begin + place] = each.backoff
            begin += len(key)
        arrays.first[-1] = begin
        self.has_unk = not np.isnan(arrays.log_prob[1 + self.unk_id])
        if not self.has_unk:
            arrays.log_prob[1 + self.unk_id] = NO_UNK
        link(arrays)
        super().__init__(arrays, sizes, self.eos_id, self._begin)

    def _nodes(self, ngrams: list[NGrams], base: int) -> tuple[list[Ints], list[Ints]]:
        """Keys of the nodes of each length, and the place of each n-gram among them.

        A key is (place of the node without its last word) · base + that word, of all beginnings of
        n-grams, whose ids are less than `base`.
        """
        keys, places = [np.arange(base)], [each.ids[:, 0] for each in ngrams]
        for k in range(1, len(ngrams)):
            longer = [places[n] * base + ngrams[n].ids[:, k] for n in range(k, len(ngrams))]
            key, place = np.unique(np.concatenate(longer), return_inverse=True)
            places[k:] = np.split(place, np.cumsum([len(each) for each in longer])[:-1])
            keys.append(key)
        for n, (each, place) in enumerate(zip(ngrams, places, strict=True), 1):
            if len(place) > np.count_nonzero(np.bincount(place)):
                order = np.argsort(place, kind="stable")
                twice = np.flatnonzero(np.diff(place[order]) == 0)[0]
                first, second = each.line[order[twice : twice + 2]]
                problem = f"lines {first} and {second} have the same {n}-gram: delete one"
                raise DataError(f"{self.path}, {problem}")
        return keys, places

    def read(self, tokens: NDArray[Any]) -> tuple[Floats, Ints]:
        """`NGramTree.read`; DataError if the file has no `</s>`."""
        values, contexts = super().read(tokens)
        if np.isnan(values).any():
            raise DataError(f"{self.path} has no </s>")
        return values, contexts

    def word_ids(self, words: Iterable[str]) -> Ints:
        """Ids of words: `<unk>` for those that it lacks, and for `<s>` and `</s>`."""
        ids = np.array([self._words.get(word, self.unk_id) for word in words], dtype=np.int64)
        ids[(ids == self._begin) | (ids == self.eos_id)] = self.unk_id
        return ids

    def token_ids(self, tokenizer: Tokenizer, tokens: NDArray[Any]) -> Ints:
        """Ids of the words of a text of tokens [n]; DataError if the file lacks one of them."""
        eos_id, unk_id = tokenizer.eos_id, tokenizer.unk_id
        distinct, first, place = np.unique(tokens, return_index=True, return_inverse=True)
        if unk_id in distinct and not self.has_unk:
            problem = f"has no {UNK}, and the text has a word outside the vocabulary"
            raise DataError(f"{self.path} {problem}")
        ids = self.word_ids(map(tokenizer.token, distinct.tolist()))
        is_absent = (ids == self.unk_id) & (distinct != unk_id) & (distinct != eos_id)
        if is_absent.any():
            token = tokenizer.token(int(tokens[first[is_absent].min()]))
            unit = token_unit(tokenizer)
            raise DataError(
                f"{self.path} has no unigram {token!r}, a {unit} that the model has: estimate the"
                f" n-gram model on the model's own training text, a token for each {unit}"
            )
        ids[distinct == eos_id] = self.eos_id
        found: Ints = ids[place]
        return found

    @property
    def words(self) -> list[str]:
        """The words but `<s>`, `</s>` and `<unk>`."""
        special = self._begin, self.eos_id, self.unk_id
        return [word for word, id in self._words.items() if id not in special]

    def unknown_types(self, texts: Iterable[str]) -> list[str]:
        """The distinct words of texts that it lacks."""
        words = list(dict.fromkeys(word for text in texts for word in text.split()))
        return list(compress(words, self.word_ids(words) == self.unk_id))
