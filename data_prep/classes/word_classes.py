"""Word classes for the two-level softmax, by any of six methods, and classes of classes.

A word class array is int32 [N] with values 0 to C - 1, every class non-empty. Word ids need not be
in order of frequency; the methods that depend on frequency read `counts`.

Legend: N words, C classes, T tokens, n words that are clustered.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_prep.classes.bigrams import IntArray, Tokens, count_bigrams
from data_prep.classes.class_file import lowest_classes, read_class_levels, read_vectors
from data_prep.classes.embedding import Clustering
from data_prep.errors import DataError
from data_prep.settings import ClassesConfig

WordClass = NDArray[np.int32]


def build_class_levels(
    counts: IntArray,
    settings: ClassesConfig,
    *,
    tokens: Tokens,
    words: Callable[[], Sequence[str]],
    folder: Path,
    progress: bool = True,
) -> WordClass:
    """Make the classes that the section `classes` of a configuration describes.

    With `settings.depth` > 2, the classes of one level are the words of the level above: the text
    is rewritten as their numbers, from which classes of them are made by the same method.

    Args:
        counts: int64 [N], occurrences of each word among the `tokens` [T] of the training split.
        words: returns the N words by id; called if there is a file of classes or vectors, whose
            relative name starts at `folder`.

    Returns:
        int32 [levels, N], the class of each word on each level, from the root down; -1 (of a file
        only) below its last one. UserError if the section contradicts itself, the vocabulary or
        the file. C is at most N. The classes of `settings.clustered_words` come first.
    """
    vocab_size, depth = len(counts), settings.depth or 2
    if settings.shortlist > vocab_size:
        raise DataError(f"classes.shortlist = {settings.shortlist} is more than {vocab_size} words")
    if settings.method == "file":
        return _levels_from_file(settings, words(), folder)
    lowest = min(settings.num_word_classes or round(vocab_size ** (1 - 1 / depth)), vocab_size)
    if settings.vectors is not None:
        vectors = read_vectors(folder / settings.vectors, words())
        max_words = settings.max_words or -(-vocab_size // lowest)
        clustering = Clustering(counts, lowest, max_words, settings.seed, progress)
        return clustering.by_vectors(vectors)[None]
    levels: list[WordClass] = []
    for level in reversed(range(1, depth)):
        num_word_classes = max(1, round(lowest ** (level / (depth - 1))))
        made = _Classes(settings, num_word_classes, progress)
        classes = made.of(counts, tokens)
        levels.insert(0, classes[levels[0]] if levels else classes)
        if level > 1:
            counts = np.bincount(classes, counts).astype(np.int64)
            tokens = classes[tokens]
            settings = replace(settings, shortlist=0, clustered_words=None, max_words=None)
    return np.stack(levels)


class _Classes(NamedTuple):
    """How the words, or the classes of the level below, are divided into C classes."""

    settings: ClassesConfig
    num_word_classes: int
    progress: bool

    def of(self, counts: IntArray, tokens: Tokens) -> WordClass:
        """The classes of N words, int32 [N]."""
        vocab_size = len(counts)
        match self.settings.method:
            case "frequency":
                return frequency_classes(counts, self.num_word_classes)
            case "uniform":
                return self._equal_sizes(np.argsort(-counts, kind="stable"))
            case "random":
                generator = np.random.default_rng(self.settings.seed)
                return self._equal_sizes(generator.permutation(vocab_size))
        num_clustered = min(self.settings.clustered_words or vocab_size, vocab_size)
        if num_clustered == vocab_size:
            bigrams = count_bigrams(tokens, vocab_size, progress=self.progress)
            return self._clusters(bigrams, counts)
        order = np.argsort(-counts, kind="stable")
        return self._clusters_of_frequent(counts, tokens, *np.split(order, [num_clustered]))

    def _equal_sizes(self, order: IntArray) -> WordClass:
        """Blocks of equal numbers of words, ± 1, in an order."""
        return _by_rank(order, np.arange(len(order)) * self.num_word_classes // len(order))

    def _clusters_of_frequent(
        self, counts: IntArray, tokens: Tokens, frequent: IntArray, rare: IntArray
    ) -> WordClass:
        """Clusters of frequent words, then `frequency` classes of the others, ∝ their Σ √count."""
        total = self.num_word_classes
        mass, rest = (np.sqrt(counts[group]).sum() for group in (frequent, rare))
        share = min(round(total * mass / max(mass + rest, 1)), len(frequent), max(total - 1, 1))
        num_frequent = int(max(1, total - len(rare), share))
        word_class = np.zeros(len(counts), np.int32)
        if num_frequent == total:
            return word_class
        bigrams = count_bigrams(tokens, len(counts), words=frequent, progress=self.progress)
        # All other words are one word; how often it follows itself is 0.
        after = counts[frequent] - bigrams.sum(axis=1) - np.isin(frequent, tokens[-1:])
        before = counts[frequent] - bigrams.sum(axis=0) - np.isin(frequent, tokens[:1])
        column, row = sparse.csr_array(after[:, None]), sparse.csr_array(before[None])
        others = sparse.block_array([[bigrams, column], [row, None]], format="csr")
        with_others = others, np.append(counts[frequent], counts[rare].sum())
        some = self._replace(num_word_classes=num_frequent)
        word_class[frequent] = some._clusters(bigrams, counts[frequent], with_others)
        word_class[rare] = num_frequent + frequency_classes(counts[rare], total - num_frequent)
        return word_class

    def _clusters(
        self,
        bigrams: sparse.csr_array,
        counts: IntArray,
        with_others: tuple[sparse.csr_array, IntArray] | None = None,
    ) -> WordClass:
        """Clusters of n words by `embedding`, then for `exchange` exchanged from equal sizes.

        `with_others` are the counts of pairs and words with all other words as word n.
        """
        settings, num_words = self.settings, len(counts)
        equal = -(-num_words // self.num_word_classes)
        is_exchange = settings.method == "exchange"
        capacity = settings.max_words or (2 * equal if is_exchange else equal)
        sizes = self.num_word_classes, min(equal, capacity) if is_exchange else capacity
        clustering = Clustering(counts, *sizes, settings.seed, self.progress)
        word_class = clustering.by_neighbours(bigrams, settings.dimensions)
        if not is_exchange:
            return word_class
        from data_prep.classes.exchange import exchange  # imports numba

        shortlist = np.argsort(-counts, kind="stable")[: settings.shortlist]
        last = shortlist[:0]
        if with_others is not None:
            bigrams, counts = with_others
            word_class, last = np.append(word_class, np.int32(0)), np.array([num_words])
        # All words are exchanged, then, with a separate shortlist, the words below it again.
        for separate in (shortlist[:0], shortlist) if len(shortlist) else (shortlist,):
            word_class = exchange(
                bigrams,
                counts,
                word_class,
                self.num_word_classes,
                capacity,
                separate=np.append(separate, last),
                progress=self.progress,
            ).astype(np.int32)
        return word_class[:num_words]


def _levels_from_file(settings: ClassesConfig, words: Sequence[str], folder: Path) -> WordClass:
    """The classes of `settings.file`; UserError for another number of classes."""
    assert settings.file is not None
    path = folder / settings.file
    levels = read_class_levels(path, settings.file_format, words, settings.depth)
    found = int(lowest_classes(levels).max()) + 1
    if settings.num_word_classes not in (None, found):
        raise DataError(
            f"classes.num_word_classes: {settings.num_word_classes} requested, "
            f"but the vocabulary has {found} classes in {path}"
        )
    return levels


def frequency_classes(counts: IntArray, num_word_classes: int) -> WordClass:
    """Divide words by descending count into classes of equal sums of √count, within one word.

    If one word exceeds the share of a class, the following classes still have at least one word.
    Mikolov et al. 2011 (RNNLM), with the square root of its later versions.

    >>> frequency_classes(np.array([1, 9, 4, 1, 1]), 2).tolist()
    [1, 0, 1, 1, 1]
    """
    order = np.argsort(-counts, kind="stable")
    mass = np.sqrt(counts[order].astype(np.float64))
    middle = np.cumsum(mass) - mass / 2
    target = np.arange(num_word_classes) * (mass.sum() / num_word_classes)
    first = np.searchsorted(middle, target)
    first[0] = 0
    rank = np.arange(num_word_classes)
    first = np.maximum.accumulate(first - rank) + rank
    first = np.minimum(first, len(counts) - num_word_classes + rank)
    return _by_rank(order, np.repeat(rank, np.diff(first, append=len(counts))))


def _by_rank(order: IntArray, class_of_rank: IntArray) -> WordClass:
    """Class by word id from the class by rank, where `order` lists the ids by rank."""
    word_class = np.empty(len(order), dtype=np.int32)
    word_class[order] = class_of_rank
    return word_class
