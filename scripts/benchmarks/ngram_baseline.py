"""Perplexity of a unigram and an interpolated bigram model on prepared data.

The bigram model is λ(v) · count(v, w) / count(v) + (1 - λ(v)) · P(w), with a λ for each range of
count(v), set by expectation maximisation on the validation split; P(w) is the unigram model, counts
plus one. Every token is predicted once, the first from <eos>, exactly as `lm evaluate` counts.

Source: Jelinek and Mercer, 1980, "Interpolated estimation of Markov source parameters".
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.prepared import open_prepared
from scripts import run

Ids = NDArray[np.int64]


class Bigram:
    """Unigram and interpolated bigram model of training tokens [n], the first after `eos_id`."""

    def __init__(self, tokens: Ids, vocab_size: int, eos_id: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, eos_id
        counts = np.bincount(tokens, minlength=vocab_size)
        self.unigram = (counts + 1) / (counts.sum() + vocab_size)
        before = np.concatenate([[eos_id], tokens[:-1]])
        self.history_counts = np.bincount(before, minlength=vocab_size)
        self.pairs, self.pair_counts = np.unique(before * vocab_size + tokens, return_counts=True)
        self.bucket = np.log2(self.history_counts + 1).astype(int)
        self.weight = np.full(self.bucket.max() + 1, 0.5)

    def terms(self, tokens: Ids) -> tuple[NDArray[np.float64], NDArray[np.float64], Ids]:
        """For each token: frequency after its predecessor, unigram probability, index of λ."""
        before = np.concatenate([[self.eos_id], tokens[:-1]])
        key = before * self.vocab_size + tokens
        place = np.minimum(np.searchsorted(self.pairs, key), len(self.pairs) - 1)
        count = np.where(self.pairs[place] == key, self.pair_counts[place], 0)
        frequency = count / np.maximum(self.history_counts[before], 1)
        return frequency, self.unigram[tokens], self.bucket[before]

    def tune(self, tokens: Ids, num_passes: int = 30) -> None:
        """Set every λ by expectation maximisation."""
        frequency, unigram, bucket = self.terms(tokens)
        size = np.bincount(bucket, minlength=len(self.weight))
        for _ in range(num_passes):
            share = self.weight[bucket] * frequency
            share = share / (share + (1 - self.weight[bucket]) * unigram)
            total = np.bincount(bucket, share, minlength=len(self.weight))
            best = total / np.maximum(size, 1)
            self.weight = np.where(size > 0, np.minimum(best, 0.999), self.weight)

    def perplexities(self, tokens: Ids) -> tuple[float, float]:
        """Perplexity of the unigram model and of the interpolated bigram model."""
        frequency, unigram, bucket = self.terms(tokens)
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
    text = f"unigram {unigram:.1f}, interpolated bigram {bigram:.1f} ({len(test):,} tokens)"
    print(json.dumps(result) if options.json else text)


if __name__ == "__main__":
    run(main)
