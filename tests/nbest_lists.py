"""Made n-best lists of a text, with noisy acoustic scores.

The rule, for each of the K hypotheses of a sentence: every word is, with
probability SUBSTITUTE, replaced by a word drawn from the 2 · NEAR words whose frequency ranks are
nearest to its own; with probability DELETE left out; with probability INSERT followed by a word
drawn by frequency. The sentence itself is a hypothesis only if it is drawn. Repeated hypotheses are
left out. The acoustic log-probability of a hypothesis is -GAP · (word errors) + N(0, NOISE²), and a
list is in decreasing order of it.
"""

import bisect
import random
from collections import Counter
from itertools import accumulate

from lm.rescoring.word_errors import word_errors

SUBSTITUTE, DELETE, INSERT = 0.12, 0.03, 0.03
NEAR = 50
GAP = 4.0


class ErrorSource:
    """Draws erroneous copies of sentences, with words as frequent as in the lines `text`."""

    def __init__(self, text: list[str], noise: float, seed: int) -> None:
        self.noise = noise
        counts = Counter(word for line in text for word in line.split())
        self.words = sorted(counts, key=lambda word: (-counts[word], word))
        self.rank = {word: rank for rank, word in enumerate(self.words)}
        self.cumulated = list(accumulate(counts[word] for word in self.words))
        self.random = random.Random(seed)

    def corrupt(self, sentence: list[str]) -> list[str]:
        """A copy of a sentence with errors."""
        copy = []
        for word in sentence:
            drawn = self.random.random()
            if drawn < SUBSTITUTE:
                copy.append(self._near(word))
            elif drawn >= SUBSTITUTE + DELETE:
                copy.append(word)
            if self.random.random() < INSERT:
                copy.append(self._frequent())
        return copy

    def hypotheses(self, sentence: list[str], number: int) -> list[tuple[float, list[str]]]:
        """Acoustic scores and hypotheses, highest score first."""
        drawn = dict.fromkeys(tuple(self.corrupt(sentence)) for _ in range(number))
        scored = [
            (
                -GAP * sum(word_errors(sentence, words)) + self.random.gauss(0, self.noise),
                list(words),
            )
            for words in drawn
        ]
        return sorted(scored, reverse=True)

    def _near(self, word: str) -> str:
        rank = self.rank.get(word, len(self.words) - 1)
        first = min(max(0, rank - NEAR), max(0, len(self.words) - 2 * NEAR - 1))
        near = self.words[first : first + 2 * NEAR + 1]
        return self.random.choice([other for other in near if other != word])

    def _frequent(self) -> str:
        return self.words[bisect.bisect(self.cumulated, self.random.randrange(self.cumulated[-1]))]
