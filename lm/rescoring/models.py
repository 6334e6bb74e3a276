"""Models that rescore n-best lists: a run, and an ARPA model.

All models have probabilities of the same V words, `</s>` counted: an unknown word of a model that
knows N of them has

    P(w) = P(`<unk>`) / U,    U = V - N                                                          (1)

By default V = N + max(NUM_UNSEEN, K + 1), with the largest N of the models (that of a run is one
less than its `vocab_size`, for `<unk>` is not one of the V words) and the largest number K of
distinct unknown words of the lists, of those that weights are tuned on too. With U = 1 or K + 1,
hypotheses would gain by words that a model does not know. In a mixture, a word that only one model
knows gains by a larger U of that model alone: so no model is exempt from the rule.

With an open vocabulary P(w) = P(`<unk>`) P(w | `<unk>`) instead, by the run's speller. For an ARPA
model its spellings are those outside the words of the ARPA file.
"""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.speller import Speller
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer
from lm.rescoring.nbest import Floats, Ints, NBest
from lm.rescoring.word_errors import WordErrors
from lm.scoring.arpa import NO_UNK, ArpaModel
from lm.scoring.unknown import UnknownRule, UnknownWords

LOWEST = 10 * NO_UNK
"""Log-probability of a word of probability 0: finite, as 0 · -∞ is a NaN."""
NUM_UNSEEN = 1_000_000
"""U, the number of words that share P(`<unk>`), unless the lists have more; 10⁴ … 10⁷ are alike."""


def num_unknown_types(tokenizer: Tokenizer, texts: Sequence[str]) -> int | None:
    """How many distinct words of texts are unknown; None of pieces, which have no such words."""
    if not isinstance(tokenizer, WordTokenizer):
        return None
    return len(set(tokenizer.unknown_occurrences(texts)))


def common_vocabulary_size(
    unknown: Sequence[tuple[Tokenizer, int | None]], ngram: ArpaModel | None, texts: Sequence[str]
) -> int | None:
    """The default V of equation (1) for all models of words; None if there is none.

    The texts are the hypotheses of all lists; `unknown` has `num_unknown_types` of each run's.
    """
    sizes = [(run.vocab_size - 1, types) for run, types in unknown if types is not None]
    if ngram is not None:
        sizes.append((len(ngram.words) + 1, len(ngram.unknown_types(texts))))
    if not sizes:
        return None
    return max(known for known, _ in sizes) + max(NUM_UNSEEN, *(types + 1 for _, types in sizes))


def unknown_counts(
    tokenizer: Tokenizer, nbest: NBest, chosen: Ints, errors: WordErrors | None
) -> dict[str, int | None]:
    """How many words of a list are unknown, with the `chosen` hypotheses [U]."""
    texts = {
        "hypotheses": nbest.texts,
        "first": [nbest.texts[place] for place in nbest.first],
        "chosen": [nbest.texts[place] for place in chosen],
    }
    if errors is not None:
        texts["references"] = errors.references
    counts = {name: UnknownWords(tokenizer, each).num_unknown for name, each in texts.items()}
    return {"references": None, **counts}


class NGramStep(NamedTuple):
    """What follows from a word."""

    state: int  # the context of the next word


class ArpaScores:
    """The scores of words by an ARPA model without a tokenizer, and its states for a search.

    A speller spells unknown words in place of V; without either each has all of P(`<unk>`).

    Raises:
        UserError: if V is out of range; when it scores, if the file has no `</s>`.
    """

    def __init__(
        self, ngram: ArpaModel, vocabulary_size: int | None = None, speller: Speller | None = None
    ) -> None:
        self._model, self.eos_id = ngram, ngram.eos_id
        words, owner = ngram.words, str(ngram.path)
        speller = speller and speller.outside([*words, UNK])
        self.unknown = UnknownRule(len(words) + 1, vocabulary_size, speller, owner=owner)

    def rule(self, texts: Sequence[str]) -> str:
        """The rule for unknown words and their number in some texts, as a sentence."""
        return self.unknown.sentence(self._model.path, len(self._model.unknown_types(texts)))

    def _ids(self, words: Sequence[str]) -> tuple[Ints, Floats]:
        """Ids of words [n], and nats of log P(word | `<unk>`) of those that are `<unk>`, else 0."""
        ids = self._model.word_ids(words)
        is_unknown, of_unknown = ids == self._model.unk_id, np.zeros(len(ids))
        of_unknown[is_unknown] = self.unknown.log_prob(
            int(is_unknown.sum()), lambda: list(compress(words, is_unknown))
        )
        return ids, of_unknown

    def __call__(self, texts: Sequence[str]) -> list[Floats]:
        """Log-probabilities [words + 1] in nats of the words of each text and of its end."""
        each = [self._ids(text.split()) for text in texts]
        ids = [np.append(ids, self.eos_id) for ids, _ in each]
        values = np.maximum(self._model.read(np.concatenate(ids))[0], LOWEST)
        values += np.concatenate([np.append(of_unknown, 0.0) for _, of_unknown in each])
        return np.split(values, np.cumsum([len(each) for each in ids])[:-1])

    def start(self) -> int:
        """The state before the first word."""
        return self._model.start

    def step_many(self, states: Sequence[int], words: Sequence[str]) -> list[NGramStep]:
        """The state after each pair of a state and a word."""
        after = self._model.extend(np.array(states), self._model.word_ids(words))[1]
        return list(map(NGramStep, after.tolist()))

    def candidate_log_probs(self, states: Sequence[int], words: Sequence[str | int]) -> Floats:
        """Log-probabilities [S, K] of some next words, or `eos_id`, after each state, in nats."""
        is_end = np.array([isinstance(word, int) for word in words])
        ids, of_unknown = np.full(len(words), self.eos_id), np.zeros(len(words))
        ids[~is_end], of_unknown[~is_end] = self._ids([w for w in words if isinstance(w, str)])
        values = np.maximum(self._model.extend_each(np.array(states), ids), LOWEST)
        return values + of_unknown
