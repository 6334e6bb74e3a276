"""An n-gram model of prepared data, written as an ARPA file: interpolated modified Kneser–Ney.

    P(w | h) = (a(h w) - D(a(h w))) / Σ_x a(h x) + γ(h) P(w | h')                                (1)
    γ(h) = Σ_x D(a(h x)) / Σ_x a(h x)

h' is h without its first word, and P(w | h') of a single word's h' is uniform over the vocabulary.
a(g) is the count of g if g has the largest order or begins with `<s>`, else the number of distinct
words before g. With n_k the number of n-grams of an order with a(g) = k, Y = n_1 / (n_1 + 2 n_2),

    D(k) = k - (k + 1) Y n_{k+1} / n_k     for k = 1, 2, 3, and D(k) = D(3) for k > 3            (2)

or D(k) = Y for all k if one of n_1, n_2, n_3 or D(k) is not positive, in a very small text.

Nothing is pruned, as in KenLM's lmplz. Every line begins with one `<s>` and ends with `</s>`.

Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling";
Heafield et al. 2013, "Scalable Modified Kneser-Ney Language Model Estimation".
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.prepared import open_prepared
from scripts import run

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
NEVER = 1e-99
"""P of `<s>` in an ARPA file, which cannot hold 0."""


class Order(NamedTuple):
    """The distinct n-grams [g] of one order."""

    key: Ids  # [g], ascending: history · (vocab_size + 1) + last word
    first: Ids  # [g] where each occurs first
    history: Ids  # [g] index of its first n - 1 words among the n-grams of that order
    suffix: Ids  # [g] the same of its last n - 1 words
    frequency: Ids  # [g]


class KneserNey:
    """The model of equation (1).

    Args:
        tokens: [n] ids in [0, vocab_size), `eos_id` at the end of each line.
        order: the largest n, at least 2.

    Attributes:
        stream: [n + lines] the tokens, with the id `vocab_size` for `<s>` before each line.
        orders: the n-grams of order 1, 2, …
        prob, backoff: for each order, P [g] and γ [g] of each n-gram (γ = 1: no history of any).
    """

    def __init__(self, tokens: Ids, vocab_size: int, eos_id: int, order: int = 5) -> None:
        self.begin, self.eos_id, self.vocab_size = vocab_size, eos_id, vocab_size
        self.stream = self._with_begins(tokens)
        self.orders = self._count(order)
        self.prob: list[Floats] = []
        self.backoff: list[Floats] = []
        lower = np.full(1, 1 / vocab_size)
        for n, ngrams in enumerate(self.orders, 1):
            adjusted = self._adjusted_counts(n)
            total, reserved, discounted = self._discount(ngrams, adjusted, len(lower))
            gamma = np.divide(reserved, total, out=np.ones(len(lower)), where=total > 0)
            if n > 1:
                self.backoff.append(gamma)
            history = ngrams.history
            lower = discounted / total[history] + gamma[history] * lower[ngrams.suffix]
            if n == 1:
                lower[self.begin] = NEVER
            self.prob.append(lower)
        self.backoff.append(np.ones(len(lower)))

    def _with_begins(self, tokens: Ids) -> Ids:
        starts = np.concatenate([[0], np.flatnonzero(tokens == self.eos_id) + 1])
        return np.insert(tokens, starts[starts < len(tokens)], self.begin)

    def log_prob(self, tokens: Ids) -> Floats:
        """Log-probabilities, in nats, of the tokens [n] of a text of lines, as `tokens` above."""
        stream = self._with_begins(tokens)
        prob = self.prob[0][stream]
        node = stream  # of the n-gram that ends at each place; -1: there is none
        for n, ngrams in enumerate(self.orders[1:], 2):
            history = np.where(stream == self.begin, -1, np.append(-1, node[:-1]))
            key = history * (self.vocab_size + 1) + stream
            place = np.minimum(np.searchsorted(ngrams.key, key), len(ngrams.key) - 1)
            is_known, is_found = history >= 0, (history >= 0) & (ngrams.key[place] == key)
            prob[is_known] *= self.backoff[n - 2][history[is_known]]
            prob[is_found] = self.prob[n - 1][place[is_found]]
            node = np.where(is_found, place, -1)
        log_prob: Floats = np.log(prob[stream != self.begin])
        return log_prob

    def _count(self, order: int) -> list[Order]:
        """The n-grams of each order; of order 1, all words and `<s>`, by id."""
        size = self.vocab_size + 1
        count = np.bincount(self.stream, minlength=size)
        nothing = np.zeros(size, np.int64)
        orders = [Order(np.arange(size), np.arange(size), nothing, nothing, count)]
        index, valid = self.stream, np.ones(len(self.stream), bool)  # of the n-gram at each place
        for n in range(2, order + 1):
            last = self.stream[n - 1 :]
            valid = valid[:-1] & (last != self.begin)
            places = np.flatnonzero(valid)
            keys = index[places] * size + last[places]
            key, first, inverse, count = np.unique(
                keys, return_index=True, return_inverse=True, return_counts=True
            )
            first = places[first]
            orders.append(Order(key, first, index[first], index[first + 1], count))
            index = np.zeros(len(valid), np.int64)
            index[places] = inverse
        return orders

    def _adjusted_counts(self, n: int) -> Ids:
        """a(g) of each n-gram of an order; 0 for `<s>` itself, which is not predicted."""
        ngrams = self.orders[n - 1]
        if n == len(self.orders):
            return ngrams.frequency
        adjusted = np.bincount(self.orders[n].suffix, minlength=len(ngrams.frequency))
        if n == 1:
            return adjusted
        begins = self.stream[ngrams.first] == self.begin
        return np.where(begins, ngrams.frequency, adjusted)

    def _discount(
        self, ngrams: Order, adjusted: Ids, num_histories: int
    ) -> tuple[Floats, Floats, Floats]:
        """The sums of a and of D for each history, and a - D for each n-gram."""
        ones, twos, threes, fours = (int((adjusted == k).sum()) for k in (1, 2, 3, 4))
        y = ones / max(1, ones + 2 * twos)
        ratios = twos / max(1, ones), threes / max(1, twos), fours / max(1, threes)
        by_count = [k - (k + 1) * y * ratio for k, ratio in enumerate(ratios, 1)]
        if min(ones, twos, threes, *by_count) <= 0:
            by_count = [y] * 3
        discount = np.array([0.0, *by_count])[np.minimum(adjusted, 3)]
        total, reserved = (
            np.bincount(ngrams.history, each, minlength=num_histories).astype(np.float64)
            for each in (adjusted, discount)
        )
        return total, reserved, adjusted - discount

    def write_arpa(self, path: Path, words: list[str]) -> None:
        """Write the model; `words` [vocab_size + 1] are those of the ids."""
        with path.open("w", encoding="utf-8") as file:
            file.write("\\data\\\n")
            for n, ngrams in enumerate(self.orders, 1):
                file.write(f"ngram {n}={len(ngrams.frequency)}\n")
            for n, ngrams in enumerate(self.orders, 1):
                file.write(f"\n\\{n}-grams:\n")
                ids = np.arange(self.begin + 1)[:, None] if n == 1 else self._ids(ngrams.first, n)
                values = np.log10(self.prob[n - 1]), np.log10(self.backoff[n - 1])
                for row, log_prob, backoff in zip(
                    ids.tolist(), *map(np.ndarray.tolist, values), strict=True
                ):
                    end = "" if n == len(self.orders) else f"\t{backoff:.7g}"
                    ngram = " ".join([words[id] for id in row])
                    file.write(f"{log_prob:.7g}\t{ngram}{end}\n")
            file.write("\n\\end\\\n")

    def _ids(self, first: Ids, n: int) -> Ids:
        ids: Ids = self.stream[first[:, None] + np.arange(n)]
        return ids


def main() -> None:
    """Write the ARPA file, or print the perplexity of a split."""
    parser = argparse.ArgumentParser(description="Kneser–Ney model of prepared data")
    add = parser.add_argument
    add("folder", type=Path, help="prepared data, for instance runs/demo/data")
    output = parser.add_mutually_exclusive_group(required=True)
    arpa = "file to write, for `lm evaluate --arpa`"
    output.add_argument("arpa", type=Path, nargs="?", help=arpa)
    perplexity = "print its perplexity instead, without a file"
    output.add_argument("--split", choices=["valid", "test"], help=perplexity)
    add("--order", type=int, default=5, help="largest n, at least 2")
    add("--tokens", type=int, metavar="N", help="count so many of training, default all")
    streams = "the beginnings of so many parts, as a run of this train.batch_size reads first"
    add("--streams", type=int, default=1, metavar="B", help=streams)
    options = parser.parse_args()
    if options.order < 2:
        parser.error(f"--order must be at least 2, got {options.order}")
    prepared = open_prepared(options.folder)
    tokens = prepared.tokens("train")
    if options.tokens is not None:  # the beginnings of equal parts
        size = len(tokens) // options.streams
        parts = tokens[: size * options.streams].reshape(options.streams, size)
        tokens = parts[:, : -(-options.tokens // options.streams)].ravel()
    ids = prepared.vocab_size, prepared.eos_id
    model = KneserNey(tokens.astype(np.int64), *ids, options.order)
    if options.split is None:
        words = list(map(prepared.tokenizer().token, range(prepared.vocab_size)))
        words[prepared.eos_id] = "</s>"
        model.write_arpa(options.arpa, [*words, "<s>"])
        return
    text = prepared.tokens(options.split).astype(np.int64)
    log_prob, known = model.log_prob(text), text != prepared.unk_id
    row = {"counted_tokens": int((model.stream < model.begin).sum()), "order": options.order}
    row |= {"split": options.split, "perplexity": np.exp(-log_prob.mean())}
    print(json.dumps(row | {"perplexity_excluding_oov": np.exp(-log_prob[known].mean())}))


if __name__ == "__main__":
    run(main)
