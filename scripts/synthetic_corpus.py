#!/usr/bin/env python
"""Writes a corpus with any number of word types: train.txt, valid.txt and test.txt in a folder.

With probability --markov, a word is one of the few successors of the word before it; otherwise, and
at the start of a line, it is drawn afresh with P(rank) ∝ 1/rank. A successor is a hash of the seed,
the word before it and a number below --successors, put through the same quantile function, so that
the text keeps Zipf's law and a model has pairs of words to learn. The splits differ in their draws,
not in the successors. Equal arguments give equal text.

A word is spelt from its rank, shorter where it is more frequent: 6.4 bytes of text for a word of
14 million types, its space included. Memory does not grow with the corpus.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))

from data_prep.errors import UserError  # noqa: E402
from data_prep.storage import write_atomically  # noqa: E402

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LINES_PER_BLOCK = 1 << 14
NUM_TABULATED = 1 << 12
"""Ranks whose cumulative weights are looked up; beyond, a closed form errs by less than 1e-5 of a
word's weight.
"""
SYLLABLES = np.array([0, *(ord(c) | ord(v) << 8 for c, v in product("bdgklmns", "aeiou"))], "<u2")
"""Two letters each; 0 stands before the first syllable of a word shorter than others."""


class Zipf:
    """P(rank) ∝ 1/rank for the ranks 1 to N.

    Args:
        num_types: N.
    """

    def __init__(self, num_types: int) -> None:
        self._head = np.cumsum(1 / np.arange(1, min(num_types, NUM_TABULATED) + 1))
        self.num_types = num_types
        self.total = self._head[-1]
        if num_types > NUM_TABULATED:
            self.total = np.log(num_types) + np.euler_gamma + 0.5 / num_types

    def quantile(self, share: FloatArray) -> IntArray:
        """The rank at which the cumulative probability passes `share`, in [0, 1)."""
        weight = share * self.total
        # The harmonic number of x is close to ln(x + 1/2) + γ, here solved for x.
        rank: IntArray = np.floor(np.exp(weight - np.euler_gamma) - 0.5).astype(np.int64) + 1
        head = weight < self._head[-1]
        rank[head] = np.searchsorted(self._head, weight[head], side="right") + 1
        rank[rank > self.num_types] = self.num_types
        return rank


@dataclass(frozen=True, kw_only=True)
class Law:
    """What the text is drawn from.

    Attributes:
        zipf: of the words drawn afresh, and of the successors.
        markov: probability that a word is a successor of the one before.
        successors: how many a word has, equally likely.
        seed: of the successors and of the draws.
    """

    zipf: Zipf
    markov: float
    successors: int
    seed: int

    def successor(self, words: IntArray, which: IntArray) -> IntArray:
        """Successor number `which`, 0 to `successors` - 1, of each word, by rank."""
        key = (words * self.successors + which).astype(np.uint64)
        uniform = (_hash(key, self.seed) >> np.uint64(11)) * 2.0**-53
        # One successor in each part of the distribution: even a frequent word's leave it as it is.
        return self.zipf.quantile((which + uniform) / self.successors)

    def blocks(self, split: int, num_words: int, line_words: int) -> Iterator[IntArray]:
        """Ranks of a split's words, [lines, line_words] each; 0 where the last line ends early."""
        generator = np.random.default_rng([self.seed, split])
        for start in range(0, num_words, LINES_PER_BLOCK * line_words):
            remaining = num_words - start
            lines = min(LINES_PER_BLOCK, -(-remaining // line_words))
            words = np.empty((line_words, lines), np.int64)
            words[0] = self.zipf.quantile(generator.random(lines))
            for place in range(1, line_words):
                fresh = self.zipf.quantile(generator.random(lines))
                which = generator.integers(self.successors, size=lines)
                follows = generator.random(lines) < self.markov
                words[place] = np.where(follows, self.successor(words[place - 1], which), fresh)
            block = words.T.copy()
            block.reshape(-1)[remaining:] = 0
            yield block


def _hash(keys: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Well-mixed bits of each key (Steele, Lea & Flood 2014, SplitMix64)."""
    bits = (keys + np.uint64(seed % 2**32) * np.uint64(2**32)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def spelt(ranks: IntArray) -> bytes:
    """The text of lines of words, [lines, words]; rank 0 is no word.

    The syllables of a word are the digits 1 to 40 of its rank, so that no two words are alike.
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


def main() -> None:
    """Write the three splits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", type=int, required=True, metavar="N", help="most word types")
    parser.add_argument("--tokens", type=int, required=True, metavar="T", help="words of train.txt")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder, made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--line-words", type=int, default=20, metavar="N", help="words of a line, default 20"
    )
    parser.add_argument(
        "--held-out-tokens",
        type=int,
        default=200_000,
        metavar="T",
        help="words of each other file, default 200,000",
    )
    parser.add_argument("--markov", type=float, default=0.5, metavar="P", help="default 0.5")
    parser.add_argument(
        "--successors", type=int, default=4, metavar="K", help="of a word, default 4"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    options = parser.parse_args()
    _check(options)
    law = Law(
        zipf=Zipf(options.types),
        markov=options.markov,
        successors=options.successors,
        seed=options.seed,
    )
    sizes = {"train": options.tokens, "valid": options.held_out_tokens}
    sizes["test"] = options.held_out_tokens
    _make_folder(options.out)
    with tqdm(
        total=sum(sizes.values()),
        unit=" words",
        unit_scale=True,
        disable=True if options.no_progress else None,
    ) as bar:
        for split, (name, num_words) in enumerate(sizes.items()):

            def write(file: BinaryIO, split: int = split, num_words: int = num_words) -> None:
                for block in law.blocks(split, num_words, options.line_words):
                    file.write(spelt(block))
                    bar.update(int(np.count_nonzero(block)))

            write_atomically(options.out / f"{name}.txt", write)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be made: {error.strerror}") from error


def _check(options: argparse.Namespace) -> None:
    """UserError for an option out of range."""
    for name in ("types", "tokens", "line_words", "held_out_tokens", "successors"):
        if getattr(options, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')}: expected at least 1, got {getattr(options, name)}"
            )
    if not 0 <= options.markov <= 1:
        raise UserError(f"--markov: expected 0 to 1, got {options.markov}")
    if options.seed < 0:
        raise UserError(f"--seed: expected at least 0, got {options.seed}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"make_corpus: {error}")
