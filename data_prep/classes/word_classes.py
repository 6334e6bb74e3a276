"""Word classes for the two-level softmax: which class each word belongs to, by any of six methods.

Decides nothing about how classes become a tree, says nothing of how good they are, and writes no
file. A word class array is int32 [N] with values 0 to C - 1, every class non-empty. Word ids need
not be in order of frequency; whatever depends on frequency reads `counts`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_prep.classes.bigrams import Tokens, count_bigrams
from data_prep.classes.clustering import embedding_classes
from data_prep.classes.files import read_word_classes
from data_prep.errors import UserError
from data_prep.settings import ClassesConfig

__all__ = [
    "build_word_classes",
    "embedding_classes",
    "frequency_classes",
    "random_classes",
    "uniform_classes",
]

IntArray = NDArray[np.int64]
WordClass = NDArray[np.int32]


def build_word_classes(
    counts: IntArray,
    settings: ClassesConfig,
    *,
    tokens: Tokens,
    words: Callable[[], Sequence[str]],
    folder: Path,
    progress: bool = True,
) -> WordClass:
    """The classes that the section `classes` of a configuration asks for.

    Args:
        counts: [N] occurrences of each word in the training split, int64.
        settings: the section.
        tokens: [T] word ids of the training split; may be a memory map.
        words: gives the N words by id; `file` alone asks for them.
        folder: where a relative `settings.file` starts.
        progress: bars on stderr.

    Returns:
        int32 [N]. C is `settings.num_word_classes` or √N, rounded, but never more than N; a file
        decides its own. With `settings.clustered_words`, the classes of the clustered words come
        first, those of the others after them.

    Raises:
        UserError: the section contradicts itself, the vocabulary or the file it names.
    """
    vocab_size = len(counts)
    if settings.head > vocab_size:
        raise UserError(f"classes.head = {settings.head} is more than {vocab_size} words")
    if settings.method == "file":
        return _classes_from_file(settings, words(), folder)
    num_word_classes = min(settings.num_word_classes or round(vocab_size**0.5), vocab_size)
    if settings.method == "frequency":
        return frequency_classes(counts, num_word_classes)
    if settings.method == "uniform":
        return uniform_classes(counts, num_word_classes)
    if settings.method == "random":
        return random_classes(vocab_size, num_word_classes, settings.seed)
    clustered = min(settings.clustered_words or vocab_size, vocab_size)
    if clustered == vocab_size:
        bigrams = count_bigrams(tokens, vocab_size, progress=progress)
        return _clustered_classes(bigrams, counts, num_word_classes, settings, progress)
    return _clustered_head(counts, tokens, clustered, num_word_classes, settings, progress)


def _clustered_head(
    counts: IntArray,
    tokens: Tokens,
    num_clustered: int,
    num_word_classes: int,
    settings: ClassesConfig,
    progress: bool,
) -> WordClass:
    """The most frequent words clustered, the others in `frequency` classes that come after."""
    order = np.argsort(-counts, kind="stable")
    head, tail = order[:num_clustered], order[num_clustered:]
    in_head = _head_classes(counts[head], counts[tail], num_word_classes)
    word_class = np.zeros(len(counts), np.int32)
    if in_head == num_word_classes:
        return word_class  # one class holds both
    bigrams = count_bigrams(tokens, len(counts), words=head, progress=progress)
    others = _with_other_words(bigrams, counts[head], counts[tail], head, tokens)
    word_class[head] = _clustered_classes(
        bigrams, counts[head], in_head, settings, progress, others
    )
    word_class[tail] = in_head + frequency_classes(counts[tail], num_word_classes - in_head)
    return word_class


def _head_classes(head: IntArray, tail: IntArray, num_word_classes: int) -> int:
    """How many of the classes the clustered words get: their share of Σ √count, rounded, but one
    at least for either part and no more than it has words; all if there is only one.
    """
    mass, rest = np.sqrt(head).sum(), np.sqrt(tail).sum()
    wanted = round(num_word_classes * mass / max(mass + rest, 1))
    lowest = max(1, num_word_classes - len(tail))
    return int(max(lowest, min(wanted, len(head), max(num_word_classes - 1, 1))))


def _with_other_words(
    bigrams: sparse.csr_array, counts: IntArray, rest: IntArray, words: IntArray, tokens: Tokens
) -> tuple[sparse.csr_array, IntArray]:
    """Pairs and counts of `words`, and of all others as one word more, the last: [n + 1, n + 1]
    and [n + 1]. How often it follows itself is left out: no assignment changes that.
    """
    after = counts - bigrams.sum(axis=1) - np.isin(words, tokens[-1:])
    before = counts - bigrams.sum(axis=0) - np.isin(words, tokens[:1])
    column, row = sparse.csr_array(after[:, None]), sparse.csr_array(before[None])
    pairs = sparse.block_array([[bigrams, column], [row, None]], format="csr")
    return pairs, np.append(counts, rest.sum())


def _clustered_classes(
    bigrams: sparse.csr_array,
    counts: IntArray,
    num_word_classes: int,
    settings: ClassesConfig,
    progress: bool,
    others: tuple[sparse.csr_array, IntArray] | None = None,
) -> WordClass:
    """`embedding` classes; for `exchange` of equal sizes, then exchanged up to `max_words`: all
    words, then those below the head, to which its words are neighbours told apart, and so is the
    one that stands for all `others`, of `_with_other_words`, from the start.
    """
    equal = -(-len(counts) // num_word_classes)
    exchanged = settings.method == "exchange"
    capacity = settings.max_words or (2 * equal if exchanged else equal)
    word_class = embedding_classes(
        counts,
        bigrams,
        num_word_classes,
        dimensions=settings.dimensions,
        max_words=min(equal, capacity) if exchanged else capacity,
        seed=settings.seed,
        progress=progress,
    )
    if not exchanged:
        return word_class
    from data_prep.classes.exchange import exchange  # loads a compiler

    head = np.argsort(-counts, kind="stable")[: settings.head]
    num_words, last = len(counts), head[:0]
    if others is not None:
        bigrams, counts = others
        word_class, last = np.append(word_class, np.int32(0)), np.array([num_words])
    for alone in (head[:0], head) if settings.head else (head,):
        word_class = exchange(
            bigrams,
            counts,
            word_class,
            num_word_classes,
            capacity,
            alone=np.append(alone, last),
            column_cost=settings.column_cost,
            progress=progress,
        ).astype(np.int32)
    return word_class[:num_words]


def _classes_from_file(settings: ClassesConfig, words: Sequence[str], folder: Path) -> WordClass:
    """The classes of `settings.file`; UserError without one, or if C is not as asked for."""
    if settings.file is None:
        raise UserError(
            "classes.file: `classes.method: file` needs the name of a word → class file"
        )
    path = folder / settings.file
    word_class = read_word_classes(path, settings.file_format, words)
    found = int(word_class.max()) + 1
    if settings.num_word_classes not in (None, found):
        raise UserError(
            f"classes.num_word_classes: {settings.num_word_classes} asked for, "
            f"but the vocabulary has {found} classes in {path}"
        )
    return word_class


def frequency_classes(counts: IntArray, num_word_classes: int) -> WordClass:
    """Words by descending count, cut into classes of equal sums of √count to within one word.

    Where one word has more than a class's share, the classes after it get one word at least.

    Args:
        counts: [N] occurrences; words that never occur stand last.
        num_word_classes: C, 1 to N.

    Returns:
        int32 [N].

    Source:
        Mikolov et al. 2011 (RNNLM), with the square root of its later versions.
    """
    _check_num_word_classes(num_word_classes, len(counts))
    order = np.argsort(-counts, kind="stable")
    mass = np.sqrt(counts[order].astype(np.float64))
    middle = np.cumsum(mass) - mass / 2
    total = mass.sum()
    target = np.arange(num_word_classes) * (total / num_word_classes)
    first = np.searchsorted(middle, target)
    first[0] = 0
    rank = np.arange(num_word_classes)
    first = np.maximum.accumulate(first - rank) + rank
    first = np.minimum(first, len(counts) - num_word_classes + rank)
    sizes = np.diff(first, append=len(counts))
    return _by_rank(order, np.repeat(rank, sizes))


def uniform_classes(counts: IntArray, num_word_classes: int) -> WordClass:
    """Words by descending count, cut into classes of equal numbers of words, ± 1; int32 [N]."""
    _check_num_word_classes(num_word_classes, len(counts))
    order = np.argsort(-counts, kind="stable")
    return _by_rank(order, np.arange(len(counts)) * num_word_classes // len(counts))


def random_classes(vocab_size: int, num_word_classes: int, seed: int) -> WordClass:
    """Classes of equal numbers of words, ± 1, drawn at random; int32 [N]."""
    _check_num_word_classes(num_word_classes, vocab_size)
    order = np.random.default_rng(seed).permutation(vocab_size)
    return _by_rank(order, np.arange(vocab_size) * num_word_classes // vocab_size)


def _by_rank(order: IntArray, class_of_rank: IntArray) -> WordClass:
    """Class by word id from the class by rank, where `order` lists the ids by rank."""
    word_class = np.empty(len(order), dtype=np.int32)
    word_class[order] = class_of_rank
    return word_class


def _check_num_word_classes(num_word_classes: int, vocab_size: int) -> None:
    if not 1 <= num_word_classes <= vocab_size:
        raise ValueError(
            f"num_word_classes: expected 1 to {vocab_size} (the vocabulary), got {num_word_classes}"
        )
