"""The n-gram model of an ARPA file, over the words of the file."""

from collections.abc import Iterable
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, UserError
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.figures import token_unit
from lm.scoring.arpa import NATS_PER_LOG10, Floats, Ints, NGrams, read_arpa
from lm.scoring.ngram_tree import Arrays, NGramTree, link

NO_UNK = -100 * NATS_PER_LOG10
"""Log-probability of a word that a file without `<unk>` lacks, as in KenLM."""


class ArpaModel(NGramTree):
    """The n-grams of an ARPA file, which may be compressed, in fp64.

    A line begins with `<s>` and ends with `</s>`.

    Attributes:
        has_unk: whether the file has `<unk>`.

    Raises:
        UserError: if the file cannot be read, is no complete ARPA file, or has an n-gram twice.
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
        """`NGramTree.read`; UserError if the file has no `</s>`."""
        values, contexts = super().read(tokens)
        if np.isnan(values).any():
            raise UserError(f"{self.path} has no </s>")
        return values, contexts

    def word_ids(self, words: Iterable[str]) -> Ints:
        """Ids of words: `<unk>` for those that it lacks, and for `<s>` and `</s>`."""
        ids = np.array([self._words.get(word, self.unk_id) for word in words], dtype=np.int64)
        ids[(ids == self._begin) | (ids == self.eos_id)] = self.unk_id
        return ids

    def token_ids(self, tokenizer: Tokenizer, tokens: NDArray[Any]) -> Ints:
        """Ids of the words of a text of tokens [n]; UserError if the file lacks one of them."""
        eos_id, unk_id = tokenizer.eos_id, tokenizer.unk_id
        distinct, first, place = np.unique(tokens, return_index=True, return_inverse=True)
        if unk_id in distinct and not self.has_unk:
            problem = f"has no {UNK}, and the text has a word outside the vocabulary"
            raise UserError(f"{self.path} {problem}")
        ids = self.word_ids(map(tokenizer.token, distinct.tolist()))
        is_absent = (ids == self.unk_id) & (distinct != unk_id) & (distinct != eos_id)
        if is_absent.any():
            token = tokenizer.token(int(tokens[first[is_absent].min()]))
            unit = token_unit(tokenizer)
            raise UserError(
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

    @property
    def num_known(self) -> int:
        """The number of `words` and `</s>`."""
        return len(self.words) + 1

    def unknown_types(self, texts: Iterable[str]) -> list[str]:
        """The distinct words of texts that it lacks."""
        words = list(dict.fromkeys(word for text in texts for word in text.split()))
        return list(compress(words, self.word_ids(words) == self.unk_id))
