"""An n-gram model of an ARPA file.

    log P(w | h) = log p(h w)                   if the file has the n-gram h w,
                   log b(h) + log P(w | h')     else, where h' is h without its first word    (1)

and b(h) = 1 if the file has no back-off weight of h. A line begins with `<s>` and ends with `</s>`.

The n-grams are a tree with a node for each suffix of an n-gram, the last word first. Level k has
the suffixes of k + 1 words, sorted by the key (node of the last k words) · base + (word before
them), so that one search in a sorted array finds the next level of many histories at once.
"""

from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import DataError, UserError
from data_prep.tokenizer.punctuation import UNK
from lm.scoring.arpa import NATS_PER_LOG10, Floats, Ints, NGrams, read_arpa

NO_UNK = -100 * NATS_PER_LOG10
"""Log-probability of a word that a file without `<unk>` lacks, as in KenLM."""


class _Level(NamedTuple):
    """The suffixes of as many words; one without an n-gram of its own has NaN and 0."""

    keys: Ints  # [nodes], sorted; of single words: empty, a node is the word's id
    log_prob: Floats  # [nodes] nats
    backoff: Floats  # [nodes] nats


class NGramModel:
    """The n-grams of an ARPA file, which may be compressed.

    Attributes:
        order: the largest n.
        start: [order - 1] ids, the history at the begin of a line.
        eos_id: id of `</s>`.
        unk_id: id of `<unk>`.
        has_unk: whether the file has `<unk>`.

    Raises:
        UserError: if the file cannot be read, is no complete ARPA file, or has an n-gram twice.

    Source: Katz 1987; the tree: Heafield 2011, KenLM.
    """

    eos_id, unk_id, _begin = 0, 1, 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self._words = {"</s>": self.eos_id, UNK: self.unk_id, "<UNK>": self.unk_id}
        self._words["<s>"] = self._begin
        ngrams = read_arpa(path, self._words)
        self.order, self._none = len(ngrams), len(self._words)
        self.start = np.array([self._begin, *[self._none] * self.order][: self.order - 1], np.int64)
        self._levels = self._build(ngrams, self._none + 1)
        self.has_unk = not np.isnan(self._levels[0].log_prob[self.unk_id])
        if not self.has_unk:
            self._levels[0].log_prob[self.unk_id] = NO_UNK

    def _build(self, ngrams: list[NGrams], base: int) -> list[_Level]:
        """The levels of the tree, whose ids are less than `base`."""
        nodes = [each.ids[:, -1] for each in ngrams]
        keys, levels = np.zeros(0, dtype=np.int64), []
        for k, each in enumerate(ngrams):
            if k:
                longer = [nodes[n] * base + ngrams[n].ids[:, -1 - k] for n in range(k, len(ngrams))]
                keys, place = np.unique(np.concatenate(longer), return_inverse=True)
                nodes[k:] = np.split(place, np.cumsum([len(key) for key in longer])[:-1])
            size = len(keys) if k else base
            if len(each.line) > np.count_nonzero(np.bincount(nodes[k])):
                order = np.argsort(nodes[k], kind="stable")
                place = np.flatnonzero(np.diff(nodes[k][order]) == 0)[0]
                first, second = each.line[order[place : place + 2]]
                problem = f"lines {first} and {second} have the same {k + 1}-gram: delete one"
                raise DataError(f"{self.path}, {problem}")
            level = _Level(keys, np.full(size, np.nan), np.zeros(size))
            level.log_prob[nodes[k]], level.backoff[nodes[k]] = each.log_prob, each.backoff
            levels.append(level)
        return levels

    def _suffixes(self, words: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """For each level k, the rows of words [P, n], last word first, that it has, their nodes."""
        rows, node = np.arange(len(words)), words[:, :1].ravel()
        for k in range(words.shape[1]):
            if k:
                keys, wanted = self._levels[k].keys, node * (self._none + 1) + words[rows, k]
                node = np.searchsorted(keys, wanted)
                is_found = np.append(keys, -1)[node] == wanted
                rows, node = rows[is_found], node[is_found]
            yield k, rows, node

    def log_probs(self, histories: Ints, words: Ints) -> Floats:
        """Equation (1) for each of P words [P] after its history, in nats; NaN: no unigram.

        Histories are [P, order - 1] ids before the word, the last one first, as in `start`.
        """
        values, used = np.full(len(words), np.nan), np.zeros(len(words), dtype=np.int64)
        for k, rows, node in self._suffixes(np.column_stack([words, histories])):
            log_prob = self._levels[k].log_prob[node]
            rows = rows[(is_given := ~np.isnan(log_prob))]
            values[rows], used[rows] = log_prob[is_given], k
        for k, rows, node in self._suffixes(histories):
            values[rows] += np.where(k >= used[rows], self._levels[k].backoff[node], 0.0)
        return values

    def word_ids(self, words: Iterable[str]) -> Ints:
        """Ids of words: `<unk>` for those that it lacks, and for `<s>` and `</s>`."""
        ids = np.array([self._words.get(word, self.unk_id) for word in words], dtype=np.int64)
        ids[(ids == self._begin) | (ids == self.eos_id)] = self.unk_id
        return ids

    @property
    def words(self) -> list[str]:
        """The words but `<s>`, `</s>` and `<unk>`."""
        special = self._begin, self.eos_id, self.unk_id
        return [word for word, id in self._words.items() if id not in special]

    @property
    def num_known(self) -> int:
        """The number of `words` and `</s>`."""
        return len(self.words) + 1

    def unknown_types(self, texts: Iterable[str]) -> list[str]:
        """The distinct words of texts that it lacks."""
        words = list(dict.fromkeys(word for text in texts for word in text.split()))
        return list(compress(words, self.word_ids(words) == self.unk_id))

    def log_prob(self, ids: Ints) -> Floats:
        """Equation (1) for each word of a text [n], `</s>` at the end of each line, in nats.

        Raises:
            UserError: if the file has no `</s>`.
        """
        place = np.arange(len(ids))
        begins_line = np.concatenate([[True], ids[:-1] == self.eos_id])[: len(ids)]
        first = np.maximum.accumulate(np.where(begins_line, place, 0))[:, None]
        before = place[:, None] - np.arange(1, self.order)
        outside = np.where(before == first - 1, self._begin, self._none)
        values = self.log_probs(np.where(before >= first, ids[np.maximum(before, 0)], outside), ids)
        if np.isnan(values).any():
            raise UserError(f"{self.path} has no </s>")
        return values
