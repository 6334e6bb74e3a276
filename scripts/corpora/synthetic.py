"""Write a synthetic corpus with any number of word types: train.txt, valid.txt and test.txt.

Lines have 20 words. Every other word, at random, is one of the four successors of the previous
word. The others, and the first of a line, are drawn with P(rank) ∝ 1/rank. A successor is the
quantile of a hash of the seed, the previous word and the successor's number, so the text keeps
Zipf's law while word pairs can be learned. The splits share the successors and differ in their
draws. Equal arguments give equal text.

A word is spelled from its rank, shorter if it is more frequent: 6.4 bytes of text per word with 14
million types, including the space. Memory does not grow with the corpus.

`scripts/make_corpus code` writes one of source code instead.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.storage import make_folder, write_atomically
from scripts import run

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LINES_PER_BLOCK = 1 << 14
NUM_TABULATED = 1 << 12
"""Ranks with tabulated cumulative weights; others use a closed form, to 1e-5 of a word's weight."""
SYLLABLES = np.array([0, *(ord(c) | ord(v) << 8 for c, v in product("bdgklmns", "aeiou"))], "<u2")
"""Two letters each; 0 pads words with fewer syllables than others on the left."""


class Zipf:
    """The distribution P(rank) ∝ 1/rank over the ranks 1 to N; `total` is the sum of 1/rank."""

    def __init__(self, num_types: int) -> None:
        self._tabulated = np.cumsum(1 / np.arange(1, min(num_types, NUM_TABULATED) + 1))
        self.num_types = num_types
        self.total = self._tabulated[-1]
        if num_types > NUM_TABULATED:
            self.total = np.log(num_types) + np.euler_gamma + 0.5 / num_types

    def quantile(self, share: FloatArray) -> IntArray:
        """The first rank at which the cumulative probability exceeds `share`, in [0, 1)."""
        weight = share * self.total
        # Inverse of the approximation ln(x + 1/2) + γ of the harmonic numbers.
        rank: IntArray = np.floor(np.exp(weight - np.euler_gamma) - 0.5).astype(np.int64) + 1
        small = weight < self._tabulated[-1]
        rank[small] = np.searchsorted(self._tabulated, weight[small], side="right") + 1
        rank[rank > self.num_types] = self.num_types
        return rank


@dataclass(frozen=True)
class WordModel:
    """The distribution of the text."""

    zipf: Zipf  # distribution of independent words and of successors
    seed: int  # determines successors and draws
    markov: float = 0.5  # probability that a word is a successor of the previous one
    num_successors: int = 4  # each word has as many, equally likely
    line_words: int = 20

    def successor(self, words: IntArray, which: IntArray) -> IntArray:
        """Successor number `which` of each word, from 0 to `num_successors` - 1; all are ranks."""
        key = (words * self.num_successors + which).astype(np.uint64)
        uniform = (_hash(key, self.seed) >> np.uint64(11)) * 2.0**-53
        # One successor in each part of the distribution, which therefore stays Zipf's.
        return self.zipf.quantile((which + uniform) / self.num_successors)

    def blocks(self, split: int, num_words: int) -> Iterator[IntArray]:
        """Yield the ranks of a split, [lines, line_words]; 0 after the end of the last line."""
        generator, line_words = np.random.default_rng([self.seed, split]), self.line_words
        for start in range(0, num_words, LINES_PER_BLOCK * line_words):
            remaining = num_words - start
            lines = min(LINES_PER_BLOCK, -(-remaining // line_words))
            words = np.empty((line_words, lines), np.int64)
            words[0] = self.zipf.quantile(generator.random(lines))
            for place in range(1, line_words):
                independent = self.zipf.quantile(generator.random(lines))
                which = generator.integers(self.num_successors, size=lines)
                is_successor = generator.random(lines) < self.markov
                words[place] = np.where(
                    is_successor, self.successor(words[place - 1], which), independent
                )
            block = words.T.copy()
            block.reshape(-1)[remaining:] = 0
            yield block


def _hash(keys: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """64 mixed bits of each key (SplitMix64; Steele, Lea & Flood 2014)."""
    bits = (keys + np.uint64(seed % 2**32) * np.uint64(2**32)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def spell(ranks: IntArray) -> bytes:
    r"""The text of lines of words, given their ranks [lines, words]; rank 0 is not a word.

    The syllables of a word are the digits 1 to 40 of its rank, so every rank has its own spelling.

    Example:
        >>> spell(np.array([[1, 2, 41], [3, 0, 0]]))
        b'ba be baba\nbi\n'
    """
    base = len(SYLLABLES) - 1
    rest, digits = ranks, []
    while rest.any():
        higher = np.maximum(rest - 1, 0) // base
        digits.append(rest - base * higher)
        rest = higher
    letters = np.zeros((*ranks.shape, 2 * len(digits) + 1), np.uint8)
    for place, digit in enumerate(reversed(digits)):
        letters[..., 2 * place : 2 * place + 2] = SYLLABLES[digit][..., None].view(np.uint8)
    letters[..., -1] = np.where(ranks > 0, ord(" "), 0)
    last = (ranks > 0).sum(axis=1) - 1
    letters[np.arange(len(ranks)), last, -1] = ord("\n")
    return letters[letters > 0].tobytes()


def write_corpus(options: argparse.Namespace) -> None:
    """Write the three splits."""
    model = WordModel(Zipf(options.types), options.seed)
    sizes = {"train": options.tokens} | dict.fromkeys(("valid", "test"), options.held_out_tokens)
    hidden = options.no_progress or None  # None: unless stderr is a terminal
    bar = tqdm(total=sum(sizes.values()), unit=" words", unit_scale=True, disable=hidden)

    def write(file: BinaryIO, split: int, num_words: int) -> None:
        for block in model.blocks(split, num_words):
            file.write(spell(block))
            bar.update(int(np.count_nonzero(block)))

    with bar:
        for split, (name, num_words) in enumerate(sizes.items()):
            writer = partial(write, split=split, num_words=num_words)
            write_atomically(options.out / f"{name}.txt", writer)


def main() -> None:
    """Run the command; raises UserError if an option is wrong or the folder cannot be created."""
    parser = argparse.ArgumentParser(
        prog="scripts/make_corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--types", type=int, required=True, metavar="N", help="maximum number of word types")
    add("--tokens", type=int, required=True, metavar="T", help="words in train.txt")
    add("--out", type=Path, required=True, metavar="DIR", help="folder, created if missing")
    add("--seed", type=int, default=1)
    held_out = "words in valid.txt and in test.txt, default 200,000"
    add("--held-out-tokens", type=int, default=200_000, metavar="T", help=held_out)
    add("--no-progress", action="store_true", help="no progress bar")
    options = parser.parse_args()
    for name, least in {"seed": 0, "types": 1, "tokens": 1, "held_out_tokens": 1}.items():
        if (got := getattr(options, name)) < least:
            raise UserError(f"--{name.replace('_', '-')}: expected at least {least}, got {got}")
    make_folder(options.out)
    write_corpus(options)


if __name__ == "__main__":
    run(main, "make_corpus")
