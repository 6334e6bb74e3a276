"""Made n-best lists of a text, with noisy acoustic scores, for `lm rescore`.

The rule, for each sentence of 5 to 30 words and each of its K hypotheses: every word is, with
probability SUBSTITUTE, replaced by a word drawn from the 2 · NEAR words whose frequency ranks are
nearest to its own; with probability DELETE left out; with probability INSERT followed by a word
drawn by frequency. The sentence itself is a hypothesis only if it is drawn. Repeated hypotheses are
left out. The acoustic log-probability of a hypothesis is -GAP · (word errors) + N(0, NOISE²), and a
list is in decreasing order of it. Utterances alternate between `dev` and `test`, each with
NAME.nbest and NAME.ref.

It replaces errors by frequency, not by sound: words that a recogniser confuses are more alike, and
harder for a language model to tell apart.
"""

import argparse
import bisect
import random
from collections import Counter
from itertools import accumulate
from pathlib import Path

from lm.rescoring.nbest import word_errors
from scripts import run

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


def main() -> None:
    """Write the four files and print their sizes."""
    parser = argparse.ArgumentParser(description="n-best lists of a text, made by a stated rule")
    add = parser.add_argument
    add("train", type=Path, help="text of which the word frequencies are taken")
    add("text", type=Path, help="text whose sentences are the references")
    add("folder", type=Path, help="folder of the four files, which is made")
    add("--utterances", type=int, default=1000, help="their number in both lists together")
    add("--hypotheses", type=int, default=20, help="most hypotheses of an utterance")
    add("--noise", type=float, default=16.0, help="NOISE")
    add("--seed", type=int, default=1)
    options = parser.parse_args()
    train = options.train.read_text(encoding="utf-8").splitlines()
    source = ErrorSource(train, options.noise, options.seed)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    sentences = [words for words in map(str.split, lines) if 5 <= len(words) <= 30]
    sentences = sentences[: options.utterances]
    options.folder.mkdir(parents=True, exist_ok=True)
    for half, name in enumerate(("dev", "test")):
        nbest, references = [], []
        for number, sentence in list(enumerate(sentences))[half::2]:
            references.append(f"utt{number:05d}\t{' '.join(sentence)}")
            for score, words in source.hypotheses(sentence, options.hypotheses):
                nbest.append(f"utt{number:05d}\t{score:.3f}\t{' '.join(words)}")
        for ending, rows in (("nbest", nbest), ("ref", references)):
            path = options.folder / f"{name}.{ending}"
            path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{name}: {len(references):,} utterances, {len(nbest):,} hypotheses")


if __name__ == "__main__":
    run(main)
