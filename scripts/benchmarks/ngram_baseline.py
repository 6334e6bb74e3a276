#!/usr/bin/env python
"""Perplexity of a unigram and an interpolated bigram model on a run's own token files, beside which
to read a model's.

The bigram model is Jelinek and Mercer's: λ(v) · count(v, w) / count(v) + (1 - λ(v)) · P(w), with a
λ for each range of count(v), set by expectation maximisation on the validation split. P(w) is the
unigram model, counts plus one. Every token is predicted once, the first from <eos>, exactly as `lm
evaluate` counts.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.prepared import open_prepared

Ids = NDArray[np.int64]


class Bigram:
    """Counts of a training text, and the two models made of them.

    Args:
        tokens: [n] of the training split.
        vocab_size: N.
        eos_id: what the first token is predicted from.
    """

    def __init__(self, tokens: Ids, vocab_size: int, eos_id: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, eos_id
        counts = np.bincount(tokens, minlength=vocab_size)
        self.unigram = (counts + 1) / (counts.sum() + vocab_size)
        before = np.concatenate([[eos_id], tokens[:-1]])
        self.history_counts = np.bincount(before, minlength=vocab_size)
        self.pairs, self.pair_counts = np.unique(before * vocab_size + tokens, return_counts=True)
        self.bucket = np.log2(self.history_counts + 1).astype(int)
        self.weight = np.full(self.bucket.max() + 1, 0.5)

    def parts(self, tokens: Ids) -> tuple[NDArray[np.float64], NDArray[np.float64], Ids]:
        """Of each token: frequency after the one before, unigram probability, index of λ."""
        before = np.concatenate([[self.eos_id], tokens[:-1]])
        key = before * self.vocab_size + tokens
        place = np.minimum(np.searchsorted(self.pairs, key), len(self.pairs) - 1)
        count = np.where(self.pairs[place] == key, self.pair_counts[place], 0)
        frequency = count / np.maximum(self.history_counts[before], 1)
        return frequency, self.unigram[tokens], self.bucket[before]

    def tune(self, tokens: Ids, passes: int = 30) -> None:
        """Set every λ by expectation maximisation."""
        frequency, unigram, bucket = self.parts(tokens)
        size = np.bincount(bucket, minlength=len(self.weight))
        for _ in range(passes):
            share = self.weight[bucket] * frequency
            share = share / (share + (1 - self.weight[bucket]) * unigram)
            total = np.bincount(bucket, share, minlength=len(self.weight))
            best = total / np.maximum(size, 1)
            self.weight = np.where(size > 0, np.minimum(best, 0.999), self.weight)

    def perplexities(self, tokens: Ids) -> tuple[float, float]:
        """Of the unigram and of the interpolated bigram model."""
        frequency, unigram, bucket = self.parts(tokens)
        mixed = self.weight[bucket] * frequency + (1 - self.weight[bucket]) * unigram
        return float(np.exp(-np.log(unigram).mean())), float(np.exp(-np.log(mixed).mean()))


def main() -> None:
    """Print both perplexities."""
    parser = argparse.ArgumentParser(description="unigram and bigram perplexity of prepared data")
    parser.add_argument("folder", type=Path, help="prepared data, for instance runs/demo/data")
    parser.add_argument("--split", default="test")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepared = open_prepared(options.folder)
    train, valid, test = (
        prepared.tokens(split).astype(np.int64) for split in ("train", "valid", options.split)
    )
    model = Bigram(train, prepared.vocab_size, prepared.eos_id)
    model.tune(valid)
    unigram, bigram = model.perplexities(test)
    result = {"tokens": len(test), "unigram_perplexity": unigram, "bigram_perplexity": bigram}
    if options.json:
        print(json.dumps(result))
    else:
        print(f"unigram {unigram:.1f}, interpolated bigram {bigram:.1f} ({len(test):,} tokens)")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"ngram_baseline: {error}")
