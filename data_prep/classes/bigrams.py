"""Bigram counts of a text of any length in little memory, used by `embedding` and `exchange`.

Legend: N words, T tokens; a row is a word, its columns are the words that follow it.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

IntArray = NDArray[np.int64]
Tokens = NDArray[np.unsignedinteger] | NDArray[np.signedinteger]

TOKENS_PER_CHUNK = 1 << 22
PAIRS_PER_PORTION = 1 << 25
"""Number of pairs that are sorted and counted at a time."""


def count_bigrams(
    tokens: Tokens, vocab_size: int, *, words: IntArray | None = None, progress: bool = False
) -> sparse.csr_array:
    """Count how often word w is followed by word v: int32 [n, n], row w, column v.

    Rows and columns are `words` [n] in that order, by default all N. The text is read once for
    every `PAIRS_PER_PORTION` pairs, so that only the matrix and one portion are in memory.
    """
    size = vocab_size if words is None else len(words)
    row_of_word = np.full(vocab_size, -1)
    row_of_word[slice(None) if words is None else words] = np.arange(size)
    # Ranges of rows with about `PAIRS_PER_PORTION` pairs each.
    most_pairs = np.zeros(size, np.int64)
    for start in range(0, len(tokens), TOKENS_PER_CHUNK):
        rows = row_of_word[tokens[start : start + TOKENS_PER_CHUNK]]
        most_pairs += np.bincount(rows[rows >= 0], minlength=size)
    before = np.cumsum(most_pairs) - most_pairs
    firsts = np.flatnonzero(np.diff(before // PAIRS_PER_PORTION, prepend=-1))
    sums = np.add.reduceat(most_pairs, firsts)
    ranges = list(zip(firsts, np.append(firsts[1:], size), sums, strict=True))
    columns, values, row_sizes = [], [], [np.zeros(1, np.int64)]
    for first, end, num_pairs in tqdm(
        ranges, desc="counting word pairs", disable=None if progress else True
    ):
        keys, found = np.empty(num_pairs, np.int64), 0  # (row - first) · size + column
        for start in range(0, len(tokens) - 1, TOKENS_PER_CHUNK):
            chunk = row_of_word[tokens[start : start + TOKENS_PER_CHUNK + 1]]
            row, column = chunk[:-1], chunk[1:]
            selected = (row >= first) & (row < end) & (column >= 0)
            chunk_keys = (row[selected] - first) * size + column[selected]
            keys[found : found + len(chunk_keys)] = chunk_keys
            found += len(chunk_keys)
        keys = keys[:found]
        keys.sort()
        distinct = np.flatnonzero(np.diff(keys, prepend=-1))
        columns.append((keys[distinct] % size).astype(np.int32))
        values.append(np.diff(distinct, append=found).astype(np.int32))
        row_sizes.append(np.bincount(keys[distinct] // size, minlength=end - first))
    begins = np.cumsum(np.concatenate(row_sizes))
    return sparse.csr_array(
        (np.concatenate(values), np.concatenate(columns), begins), shape=(size, size)
    )
