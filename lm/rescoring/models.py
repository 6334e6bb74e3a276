"""Models that rescore n-best lists: a run, and an ARPA model.

All models have probabilities of the same V words, `</s>` counted: an unknown word of a model that
knows N of them has

    P(w) = P(`<unk>`) / U,    U = V - N                                                          (1)

By default V = N + max(NUM_UNSEEN, K + 1), with the largest N of the models (that of a run is one
less than its `vocab_size`, for `<unk>` is not one of the V words) and the largest number K of
distinct unknown words of the lists, of those that weights are tuned on too. With U = 1 each unknown
word has all of P(`<unk>`), and hypotheses gain by words that the model does not know. They do so
with U = K + 1 as well: K is small, and smaller for shorter lists, compared to the number of words
that exist. In a mixture a word that only one model knows gains by a larger U of that model alone:
so no model is exempt from the rule.

With an open vocabulary P(w) = P(`<unk>`) P(w | `<unk>`) instead, by the run's speller. For an ARPA
model its spellings are those outside the words of the ARPA file.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.speller import Speller
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.rescoring.nbest import Floats, Ints, NBest, WordErrors
from lm.rescoring.unknown import UnknownWords
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.ngram import NGramModel

WordScores = Callable[[Sequence[str]], list[Floats]]
"""A model: log-probabilities in nats of the words of each text and of its end, [words + 1] each."""

NUM_UNSEEN = 1_000_000
"""U, the number of words that share P(`<unk>`), unless the lists have more; 10⁴ … 10⁷ are alike."""


def common_vocabulary_size(
    runs: Sequence[TrainedRun], ngram: NGramModel | None, texts: Sequence[str]
) -> int | None:
    """The default V of equation (1) for all models of words; None if there is none.

    Args:
        runs: the runs; those of pieces of words have no unknown words.
        ngram: a model without a tokenizer; None if there is none.
        texts: the hypotheses of all lists.
    """
    tokenizers = [run.tokenizer for run in runs]
    words = [each for each in tokenizers if isinstance(each, WordTokenizer)]
    known = [each.vocab_size - 1 for each in words]
    unknown = [len(each.unknown_types(texts)) for each in words]
    if ngram is not None:
        known.append(ngram.num_known)
        unknown.append(len(ngram.unknown_types(texts)))
    return max(known) + max(NUM_UNSEEN, max(unknown) + 1) if known else None


class RunScores:
    """The `WordScores` of a run.

    Args:
        run: an opened run.
        texts: the hypotheses of all lists.
        vocabulary_size: V; None: all of P(`<unk>`) for each unknown word or piece.
        open_vocabulary: whether unknown words are spelled by the run's speller, in place of V.

    Attributes:
        num_unknown_types: number of distinct unknown words; None for a model of pieces.
        vocabulary_size: V.

    Raises:
        UserError: if V is out of range, or given for a model of pieces.
    """

    def __init__(
        self,
        run: TrainedRun,
        texts: Sequence[str],
        vocabulary_size: int | None = None,
        *,
        open_vocabulary: bool = False,
    ) -> None:
        self.run, self.vocabulary_size = run, vocabulary_size
        self.open_vocabulary = open_vocabulary
        self.num_unknown_types = None
        if isinstance(tokenizer := run.tokenizer, WordTokenizer):
            self.num_unknown_types = len(tokenizer.unknown_types(texts))
        self._scorer = Scorer.of(
            run, vocabulary_size=vocabulary_size, open_vocabulary=open_vocabulary
        )

    def unknown_words(self, texts: Iterable[str]) -> UnknownWords:
        """The words of texts that the run does not know."""
        return UnknownWords(self.run.tokenizer, texts)

    def unknown(
        self, nbest: NBest, chosen: Ints, errors: WordErrors | None
    ) -> dict[str, str | int | None]:
        """How many words of a list are unknown, and what they share P(`<unk>`) by.

        Args:
            nbest: the list.
            chosen: [U], the hypothesis of each utterance after rescoring.
            errors: with its references; None if there are none.
        """
        texts = {
            "hypotheses": nbest.texts,
            "first": [nbest.texts[place] for place in nbest.first],
            "chosen": [nbest.texts[place] for place in chosen],
        }
        if errors is not None:
            texts["references"] = errors.references
        counts = {name: self.unknown_words(each).num_unknown for name, each in texts.items()}
        return {
            "run": str(self.run.folder),
            "vocabulary_size": self.vocabulary_size,
            "types": self.num_unknown_types,
            "references": None,
            **counts,
        }

    def __call__(self, texts: Sequence[str]) -> list[Floats]:
        """Log-probabilities in nats of the words of each text and of its end."""
        return [score.log_prob for score in self._scorer.sentences(texts)]

    @property
    def rule(self) -> str:
        """A sentence: the probability of an unknown word."""
        name = str(self.run.folder)
        if self.open_vocabulary:
            return _spelling_rule(name)
        if self.vocabulary_size is None:
            return f"{name}: each unknown piece has P(<unk>)"
        num_types, num_unseen = self.num_unknown_types or 0, self._scorer.num_unseen
        return _sharing_rule(name, num_types, num_unseen, self.vocabulary_size)


def _spelling_rule(name: str) -> str:
    return f"{name}: each unknown word has its spelling's share of P(<unk>)"


def _sharing_rule(name: str, num_unknown_types: int, num_unseen: int, size: int) -> str:
    if not num_unknown_types:
        return f"{name}: no word of the lists is unknown"
    return (
        f"{name}: each of the {num_unknown_types:,} unknown words of the lists has"
        f" 1/{num_unseen:,} of P(<unk>), as by --vocabulary-size={size}"
    )


class NGramStep(NamedTuple):
    """What follows from a word."""

    state: Ints  # [order - 1], the words before the next one


class ArpaScores:
    """The `WordScores` of an ARPA model over its own words, and its states for a search.

    Args:
        ngram: a model without a tokenizer.
        vocabulary_size: V; None: all of P(`<unk>`) for each unknown word.
        speller: spells unknown words in place of V.

    Raises:
        UserError: if V is out of range; when it scores, if the file has no `</s>`.
    """

    def __init__(
        self,
        ngram: NGramModel,
        vocabulary_size: int | None = None,
        speller: Speller | None = None,
    ) -> None:
        self._model, self._vocabulary_size = ngram, vocabulary_size
        self._speller = speller and speller.outside([*ngram.words, UNK])
        self.eos_id, self._num_unseen = ngram.eos_id, 1
        if vocabulary_size is not None:
            self._num_unseen = vocabulary_size - ngram.num_known
            if self._num_unseen < 1:
                raise UserError(
                    f"vocabulary size {vocabulary_size}: expected at least {ngram.num_known + 1},"
                    f" one word more than {ngram.path} has"
                )

    def rule(self, texts: Sequence[str]) -> str:
        """A sentence: the probability of a word that the file lacks, for some texts."""
        name, num_types = str(self._model.path), len(self._model.unknown_types(texts))
        if self._speller is not None:
            return _spelling_rule(name)
        return _sharing_rule(name, num_types, self._num_unseen, self._vocabulary_size or 0)

    def _ids(self, words: Sequence[str]) -> tuple[Ints, Floats]:
        """Ids of words [n], and nats of log P(word | `<unk>`) of those that are `<unk>`, else 0."""
        ids = self._model.word_ids(words)
        is_unknown, of_unknown = ids == self._model.unk_id, np.zeros(len(ids))
        of_unknown[is_unknown] = -math.log(self._num_unseen)
        if self._speller is not None:
            of_unknown[is_unknown] = self._speller.log_prob(list(compress(words, is_unknown)))
        return ids, of_unknown

    def __call__(self, texts: Sequence[str]) -> list[Floats]:
        """Log-probabilities in nats of the words of each text and of its end."""
        each = [self._ids(text.split()) for text in texts]
        ids = [np.append(ids, self.eos_id) for ids, _ in each]
        values = self._model.log_prob(np.concatenate(ids))
        values += np.concatenate([np.append(of_unknown, 0.0) for _, of_unknown in each])
        return np.split(values, np.cumsum([len(each) for each in ids])[:-1])

    def start(self) -> Ints:
        """The state before the first word."""
        return self._model.start()

    def step_many(self, states: Sequence[Ints], words: Sequence[str]) -> list[NGramStep]:
        """The state after each pair of a state and a word."""
        extended = self._model.extended(np.stack(states), self._model.word_ids(words))
        return list(map(NGramStep, extended))

    def candidate_log_probs(self, states: Sequence[Ints], words: Sequence[str | int]) -> Floats:
        """Log-probabilities [S, K] of some next words, or `eos_id`, after each state, in nats."""
        is_end = np.array([isinstance(word, int) for word in words])
        ids, of_unknown = np.full(len(words), self.eos_id), np.zeros(len(words))
        ids[~is_end], of_unknown[~is_end] = self._ids([w for w in words if isinstance(w, str)])
        histories = np.repeat(np.stack(states), len(ids), axis=0)
        values = self._model.log_probs(histories, np.tile(ids, len(states)))
        return values.reshape(len(states), len(ids)) + of_unknown
