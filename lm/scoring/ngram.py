"""An n-gram model of an ARPA file, over its own words or over the tokens of another model.

    log P(w | h) = log p(h w)                   if the file has the n-gram h w,
                   log b(h) + log P(w | h')     else, where h' is h without its first word    (1)

and b(h) = 1 if the file has no back-off weight of h. A line begins with `<s>`, and `</s>` is the
token `<eos>`. A word outside the other model's vocabulary is `<unk>` here too: its own n-grams are
not read.

The n-grams are a tree with a node for each suffix of an n-gram, the last word first. Level k has
the suffixes of k + 1 words, sorted by the key (node of the last k words) · base + (word before
them), so that one search in a sorted array finds the next level of many histories at once.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer
from lm.figures import token_unit
from lm.scoring.arpa import NATS_PER_LOG10, Floats, Ints, NGrams, read_arpa

_log = logging.getLogger(__name__)
NO_UNK = -100 * NATS_PER_LOG10
"""Log-probability of a word that a file without `<unk>` lacks, as in KenLM."""


class _Level(NamedTuple):
    """The suffixes of as many words; one without an n-gram of its own has NaN and 0."""

    keys: Ints  # [nodes], sorted; of single words: empty, a node is the word's id
    log_prob: Floats  # [nodes] nats
    backoff: Floats  # [nodes] nats


class NGramModel:
    """The n-grams of an ARPA file, or those whose words are all tokens of a tokenizer.

    Args:
        path: the file; it may be compressed.
        tokenizer: determines ids; None: the words of the file have ids of their own.

    Attributes:
        order: the largest n.
        start: [order - 1] ids, the history at the begin of a line.
        eos_id: id of `</s>`.
        unk_id: id of `<unk>`.

    Raises:
        UserError: if the file cannot be read or is no complete ARPA file.

    Source: Katz 1987; the tree: Heafield 2011, KenLM.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        self.path, self._tokenizer = path, tokenizer
        self._words = {"</s>": 0, UNK: 1, "<UNK>": 1, "<s>": 2}
        if tokenizer is None:
            self.eos_id, self.unk_id, self._begin = 0, 1, 2
            id_of: Callable[[str], int | None] = self._own_id
        else:
            self.eos_id, self.unk_id = tokenizer.eos_id, tokenizer.unk_id
            self._begin, id_of = tokenizer.vocab_size, _id_of(tokenizer)
        ngrams = read_arpa(path, id_of)
        self.order = len(ngrams)
        self._none = len(self._words) if tokenizer is None else tokenizer.vocab_size + 1
        self.start = np.array([self._begin, *[self._none] * self.order][: self.order - 1], np.int64)
        self._levels = self._build(ngrams, self._none + 1)
        if tokenizer is None and np.isnan(self._levels[0].log_prob[self.unk_id]):
            self._levels[0].log_prob[self.unk_id] = NO_UNK

    def _own_id(self, word: str) -> int:
        return self._words.setdefault(word, len(self._words))

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
        """Ids of words, of a model without a tokenizer: `<unk>` for those that it lacks."""
        ids = np.array([self._words.get(word, self.unk_id) for word in words], dtype=np.int64)
        ids[(ids == self._begin) | (ids == self.eos_id)] = self.unk_id
        return ids

    @property
    def words(self) -> list[str]:
        """The words of a model without a tokenizer but `<s>`, `</s>` and `<unk>`."""
        special = self._begin, self.eos_id, self.unk_id
        return [word for word, id in self._words.items() if id not in special]

    @property
    def num_known(self) -> int:
        """The number of `words` and `</s>`."""
        return len(self.words) + 1

    def unknown_types(self, texts: Iterable[str]) -> list[str]:
        """The distinct words of texts that a model without a tokenizer has not."""
        words = list(dict.fromkeys(word for text in texts for word in text.split()))
        return list(compress(words, self.word_ids(words) == self.unk_id))

    def log_prob(self, tokens: Iterable[int]) -> Floats:
        """Equation (1) for each token of a text [n], `<eos>` at the end of each line, in nats.

        Raises:
            UserError: if the file has no unigram of a token.
        """
        ids = np.array(list(tokens), dtype=np.int64)
        place = np.arange(len(ids))
        begins_line = np.concatenate([[True], ids[:-1] == self.eos_id])[: len(ids)]
        first = np.maximum.accumulate(np.where(begins_line, place, 0))[:, None]
        before = place[:, None] - np.arange(1, self.order)
        outside = np.where(before == first - 1, self._begin, self._none)
        values = self.log_probs(np.where(before >= first, ids[np.maximum(before, 0)], outside), ids)
        for token in ids[np.isnan(values)].tolist():
            raise UserError(self._absent(token))
        return values

    def _absent(self, token: int) -> str:
        """Why a token cannot be scored."""
        if token == self.eos_id:
            return f"{self.path} has no </s>"
        assert self._tokenizer is not None
        if token == self.unk_id:
            return f"{self.path} has no {UNK}, and the text has a word outside the vocabulary"
        unit = token_unit(self._tokenizer)
        return (
            f"{self.path} has no unigram {self._tokenizer.token(token)!r}, a {unit} that the model"
            f" has: estimate the n-gram model on the model's own training text, a token for each"
            f" {unit}"
        )


def _id_of(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    """The id of a word of an ARPA file; None if the tokenizer lacks it."""
    unk_id = tokenizer.unk_id
    special = {"<s>": tokenizer.vocab_size, "</s>": tokenizer.eos_id, UNK: unk_id, "<UNK>": unk_id}
    if isinstance(tokenizer, WordTokenizer):
        words = tokenizer.words

        def id_of(word: str) -> int | None:
            found = -1 if word == EOS else special.get(word, words.id(word))
            return None if found < 0 else found

        return id_of
    pieces = {tokenizer.token(id): id for id in range(tokenizer.vocab_size)}
    pieces.pop(EOS, None)
    return (pieces | special).get
