"""Word classes for the two-level softmax: which class each word belongs to, by any of six methods.

Decides nothing about how classes become a tree, and writes no file. A word class array is int32 [N]
with values 0 to C - 1, every class non-empty. Word ids need not be in order of frequency; whatever
depends on frequency reads `counts`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_prep.bigrams import TOKENS_PER_CHUNK, Tokens, count_bigrams
from data_prep.clustering import embedding_classes
from data_prep.settings import ClassesConfig, UserError

__all__ = [
    "ClassReport",
    "build_word_classes",
    "class_report",
    "embedding_classes",
    "frequency_classes",
    "random_classes",
    "read_word_classes",
    "uniform_classes",
]

IntArray = NDArray[np.int64]
WordClass = NDArray[np.int32]

SENTENCE_WORDS = ("<unk>", "<eos>")
"""Words that class files of other tools may lack: theirs then is a class of their own, together."""


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
    from data_prep.exchange import exchange  # loads a compiler

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


# Files of other tools


def read_word_classes(
    path: Path, file_format: Literal["mkcls", "brown", "srilm"], words: Sequence[str]
) -> WordClass:
    """Classes from a file that another program wrote, a line for each word.

    Words outside the vocabulary are passed over. `<unk>` and `<eos>`, which such programs may not
    know, share a class of their own if the file lacks them.

    Args:
        path: the file, UTF-8.
        file_format: `mkcls`, word TAB class; `brown`, bit string TAB word TAB count; `srilm`, class
            [probability] word.
        words: the vocabulary by id.

    Returns:
        int32 [N], classes numbered in the order in which the file first names one of their words.

    Raises:
        UserError: no such file, not UTF-8, a line of another format, a word in two classes, or a
            word of the vocabulary missing.
    """
    id_of_word = {word: index for index, word in enumerate(words)}
    number: dict[str, int] = {}
    word_class = np.full(len(words), -1, dtype=np.int32)
    for line_number, name, word in _read_pairs(path, file_format):
        index = id_of_word.get(word)
        if index is None:
            continue
        found = number.setdefault(name, len(number))
        if word_class[index] not in (-1, found):
            raise UserError(f"{path}, line {line_number}: {word!r} already has another class")
        word_class[index] = found
    missing = np.flatnonzero(word_class < 0).tolist()
    unknown = [words[index] for index in missing if words[index] not in SENTENCE_WORDS]
    if unknown:
        raise UserError(
            f"{path}: {len(unknown)} of the vocabulary's {len(words)} words have no class, "
            f"the first is {unknown[0]!r}"
        )
    word_class[missing] = len(number)
    return word_class


def _read_pairs(
    path: Path, file_format: Literal["mkcls", "brown", "srilm"]
) -> Iterator[tuple[int, str, str]]:
    """Line number, name of the class and word, of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line_number, line in enumerate(file, start=1):
                text = line.rstrip("\r\n")
                if text.strip():
                    yield (
                        line_number,
                        *_parse_line(text, file_format, f"{path}, line {line_number}"),
                    )
    except OSError as error:
        raise UserError(f"classes.file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8 ({error.reason})") from error


def _parse_line(
    text: str, file_format: Literal["mkcls", "brown", "srilm"], place: str
) -> tuple[str, str]:
    """Name of the class and word; UserError naming `place` if the line has another format."""
    match file_format, text.split() if file_format == "srilm" else text.split("\t"):
        case "mkcls", [word, name]:
            return name.strip(), word
        case "brown", [name, word, count] if not name.strip("01") and count.strip().isdecimal():
            return name, word
        case "srilm", [name, word]:
            return name, word
        case "srilm", [name, probability, word] if _is_probability(probability):
            return name, word
    expected = {
        "mkcls": "word TAB class",
        "brown": "bit string TAB word TAB count",
        "srilm": "class [probability] word",
    }[file_format]
    raise UserError(f"{place}: expected {expected} ({file_format}), got {text[:80]!r}")


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


# Report


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """What word classes cost and how well they predict, on the text that they were made for."""

    num_word_classes: int
    head: int
    """Words on the root, beside the classes and in none of them. Those with head words alone are
    empty here, and not in the tree."""
    head_mass: float
    """Share of the tokens that the head's words make up."""
    min_words: int
    """Words in the smallest class."""
    median_words: float
    max_words: int
    sizes: tuple[int, ...]
    """Words in each class."""
    token_mass: tuple[float, ...]
    """Share of the tokens that each class's words make up."""
    columns_per_token: float
    """Logits that the two-level softmax computes for a token, on average: the root's children +
    Σ mass · size."""
    log_likelihood: float
    """Nats per token of the maximum likelihood class bigram model, P(w'|w) = P(c'|c) · P(w'|c');
    the first token is not predicted. A word of the head is a class to it, and to the entropies."""
    class_entropy: float
    """Bits: entropy of the class of a token."""
    word_entropy: float
    """Bits: entropy of a token when its class is known."""
    top_words: tuple[tuple[int, ...], ...]
    """Ids of each class's most frequent words, most frequent first."""


def class_report(
    counts: IntArray,
    word_class: NDArray[np.integer],
    tokens: Tokens,
    *,
    head: int = 0,
    num_top_words: int = 10,
) -> ClassReport:
    """Sizes, masses, entropies and bigram likelihood of word classes.

    Args:
        counts: [N] occurrences of each word in `tokens`.
        word_class: [N], values 0 to C - 1, every class non-empty.
        tokens: [T] word ids, at least two; may be a memory map, is read in portions.
        head: this many of the most frequent words are in no class, whatever `word_class` says.
        num_top_words: most ids in each of `top_words`.

    Raises:
        ValueError: the arrays do not belong together, or a class is empty.
        UserError: there are fewer than two tokens.

    Source:
        Brown et al. 1992, equation 10, for the likelihood.
    """
    if len(word_class) != len(counts) or counts.sum() != len(tokens):
        raise ValueError(
            f"expected classes of {len(counts)} words and {counts.sum()} tokens, "
            f"got classes of {len(word_class)} words and {len(tokens)} tokens"
        )
    if len(tokens) < 2:
        raise UserError(
            f"a class report wants two tokens of training text at least, got {len(tokens)}"
        )
    num_word_classes = int(word_class.max()) + 1
    if not (sizes := np.bincount(word_class)).all():
        raise ValueError(f"class {sizes.argmin()} has no words")
    in_class = word_class.astype(np.int64)
    in_class[np.argsort(-counts, kind="stable")[:head]] = num_word_classes + np.arange(head)
    sizes = np.bincount(in_class, minlength=num_word_classes)
    class_counts = np.bincount(in_class, weights=counts, minlength=len(sizes)).astype(np.float64)
    class_entropy = _entropy(class_counts)
    mass, head_mass = np.split(class_counts / len(tokens), [num_word_classes])
    columns = np.count_nonzero(sizes) + mass @ sizes[:num_word_classes]
    log_likelihood = _bigram_log_likelihood(counts, class_counts, in_class, tokens)
    top_words = _top_words(counts, in_class, sizes, num_top_words)[:num_word_classes]
    sizes = sizes[:num_word_classes]
    return ClassReport(
        num_word_classes=num_word_classes,
        head=head,
        head_mass=float(head_mass.sum()),
        min_words=int(sizes.min()),
        median_words=float(np.median(sizes)),
        max_words=int(sizes.max()),
        sizes=tuple(sizes.tolist()),
        token_mass=tuple(mass.tolist()),
        columns_per_token=float(columns),
        log_likelihood=log_likelihood,
        class_entropy=class_entropy / np.log(2),
        word_entropy=(_entropy(counts) - class_entropy) / np.log(2),
        top_words=top_words,
    )


def _bigram_log_likelihood(
    counts: IntArray,
    class_counts: NDArray[np.float64],
    word_class: NDArray[np.integer],
    tokens: Tokens,
) -> float:
    """Nats per predicted token: P(c'|c) from the T - 1 pairs, P(w|c) from all T tokens."""
    shape = (len(class_counts), len(class_counts))
    transitions = sparse.csr_array(shape, dtype=np.int64)
    for start in range(0, len(tokens) - 1, TOKENS_PER_CHUNK):
        classes = word_class[tokens[start : start + TOKENS_PER_CHUNK + 1]]
        once = np.ones(len(classes) - 1, np.int64)
        transitions += sparse.coo_array((once, (classes[:-1], classes[1:])), shape).tocsr()
    of_class = -_entropy(transitions.data) + _entropy(transitions.sum(axis=1))
    log_prob_in_class = np.log(np.maximum(counts, 1) / np.maximum(class_counts, 1)[word_class])
    first = int(tokens[0])
    of_words = counts @ log_prob_in_class - log_prob_in_class[first]
    return float(of_class + of_words / (len(tokens) - 1))


def _entropy(counts: NDArray[np.integer] | NDArray[np.float64]) -> float:
    """Entropy (nats) of the distribution that the counts are proportional to."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _top_words(
    counts: IntArray, word_class: NDArray[np.integer], sizes: IntArray, num_top_words: int
) -> tuple[tuple[int, ...], ...]:
    """Ids of the most frequent words of each class; the lower id first among equals."""
    order = np.lexsort((-counts, word_class))
    starts = np.cumsum(sizes) - sizes
    return tuple(
        tuple(order[start : start + min(size, num_top_words)].tolist())
        for start, size in zip(starts, sizes, strict=True)
    )
