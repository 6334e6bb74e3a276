"""Models that rescore n-best lists: a run, and an ARPA model.

A word that a run does not know has a share of P(`<unk>`), by default

    P(w) = P(<unk>) / U,    U = max(NUM_UNSEEN, K + 1)                                       (1)

where K is the number of distinct unknown words of the lists, of those that weights are tuned on
too. This is the distribution over V = N - 1 + U words, `<eos>` included, of `--vocabulary-size`.
With V = N, U = 1: each unknown word has all of P(`<unk>`), and hypotheses gain by words that the
run does not know. They do so with U = K + 1 as well: K is small, and smaller for shorter lists,
compared to the number of words that exist.

With an open vocabulary P(w) = P(`<unk>`) P(w | `<unk>`) instead, by the run's speller.

An ARPA model has its own probability of `<unk>`, whatever the words that a run knows.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.rescoring.nbest import Floats, Ints, NBest, WordErrors
from lm.rescoring.unknown import UnknownWords
from lm.run import Run
from lm.scoring import Scorer
from lm.scoring.ngram import NGramModel

WordScores = Callable[[Sequence[str]], list[Floats]]
"""A model: log-probabilities in nats of the words of each text and of its end, [words + 1] each."""

NUM_UNSEEN = 1_000_000
"""U, the number of words that share P(`<unk>`), unless the lists have more; 10⁴ … 10⁷ are alike."""


class RunScores:
    """The `WordScores` of a run.

    Args:
        run: an opened run.
        texts: the hypotheses of all lists.
        vocabulary_size: V; None: equation (1), or for a model of pieces of words, all of P(`<unk>`)
            for each unknown piece.
        open_vocabulary: whether unknown words are spelled by the run's speller, in place of V.

    Attributes:
        num_unknown_types: K; None for a model of pieces.
        vocabulary_size: V, given or by equation (1); None for a model of pieces and with a speller.

    Raises:
        UserError: if V is out of range, or given for a model of pieces.
    """

    def __init__(
        self,
        run: Run,
        texts: Sequence[str],
        vocabulary_size: int | None = None,
        *,
        open_vocabulary: bool = False,
    ) -> None:
        self.run, self._is_given = run, vocabulary_size is not None
        self._open_vocabulary = open_vocabulary
        self.num_unknown_types = None
        if isinstance(tokenizer := run.tokenizer, WordTokenizer):
            self.num_unknown_types = len(tokenizer.unknown_types(texts))
            if vocabulary_size is None and not open_vocabulary:
                num_unseen = max(NUM_UNSEEN, self.num_unknown_types + 1)
                vocabulary_size = tokenizer.vocab_size - 1 + num_unseen
        self.vocabulary_size = vocabulary_size
        self._scorer = Scorer(
            run.model,
            run.tokenizer,
            context=run.description.context,
            vocabulary_size=vocabulary_size,
            speller=run.speller if open_vocabulary else None,
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
        if self._open_vocabulary:
            return f"{self.run.folder}: each unknown word has its spelling's share of P(<unk>)"
        if self.vocabulary_size is None:
            return f"{self.run.folder}: each unknown piece has P(<unk>)"
        if not self.num_unknown_types:
            return f"{self.run.folder}: no word of the lists is unknown"
        share = f"1/{self._scorer.num_unseen:,} of P(<unk>)"
        if self._is_given:
            return f"{self.run.folder}: each unknown word has {share}, by --vocabulary-size"
        return (
            f"{self.run.folder}: each of the {self.num_unknown_types:,} unknown words of the lists"
            f" has {share}, as by --vocabulary-size={self.vocabulary_size}"
        )


class NGramStep(NamedTuple):
    """What follows from a word."""

    state: Ints  # [order - 1], the words before the next one


class ArpaScores:
    """The `WordScores` of an ARPA file over its own words, and its states for a search.

    Raises:
        UserError: if the file cannot be read or is incomplete; when it scores, if it has no `</s>`.
    """

    def __init__(self, path: Path) -> None:
        self._model = NGramModel(path)
        self.eos_id = self._model.eos_id

    def __call__(self, texts: Sequence[str]) -> list[Floats]:
        """Log-probabilities in nats of the words of each text and of its end."""
        ids = [np.append(self._model.word_ids(text.split()), self.eos_id) for text in texts]
        values = self._model.log_prob(np.concatenate(ids))
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
        ids = np.array([w if isinstance(w, int) else self._model.word_ids([w])[0] for w in words])
        histories = np.repeat(np.stack(states), len(ids), axis=0)
        values = self._model.log_probs(histories, np.tile(ids, len(states)))
        return values.reshape(len(states), len(ids))
