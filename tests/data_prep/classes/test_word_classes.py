"""Word classes: partitions of any size by every method, and of class files of other tools."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

import data_prep
from data_prep.classes import bigrams as bigrams_module
from data_prep.classes import embedding as embedding_module
from data_prep.classes.assignment import assign, smallest_classes
from data_prep.classes.bigrams import count_bigrams
from data_prep.classes.class_file import read_vectors
from data_prep.classes.embedding import truncated_svd
from data_prep.classes.exchange import exchange
from data_prep.classes.word_classes import WordClass, build_class_levels, frequency_classes
from data_prep.settings import ClassesConfig

METHODS: list[Any] = ["exchange", "embedding", "frequency", "uniform", "random"]
WORDS = ["<unk>", "a", "b", "c", "<eos>"]
LOWER = [[-1, 1, 0, -1, -1], [-1, 0, -1, -1, -1]]


def zipf_tokens(vocab_size: int, num_tokens: int, seed: int = 0) -> NDArray[np.uint16]:
    """Independent draws with P(rank) ∝ 1/rank, ranks shuffled over the ids."""
    generator = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocab_size + 1)
    tokens = generator.choice(vocab_size, num_tokens, p=share / share.sum())
    return generator.permutation(vocab_size)[tokens].astype(np.uint16)


def counts_of(tokens: NDArray[np.uint16], vocab_size: int) -> NDArray[np.int64]:
    return np.bincount(tokens, minlength=vocab_size).astype(np.int64)


def built(tokens: NDArray[np.uint16], vocab_size: int, **settings: Any) -> WordClass:
    text: dict[str, Any] = {"tokens": tokens, "words": list, "folder": Path(), "progress": False}
    counts = counts_of(tokens, vocab_size)
    (word_class,) = build_class_levels(counts, ClassesConfig(**settings), **text)
    return np.asarray(word_class, np.int32)


def planted_text(
    num_word_classes: int, words_per_class: int, num_tokens: int
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Text of a class bigram model (two preferred successors), and the class of each word."""
    generator = np.random.default_rng(5)
    truth = generator.permutation(np.arange(num_word_classes * words_per_class) % num_word_classes)
    members = [np.flatnonzero(truth == c) for c in range(num_word_classes)]
    tokens = np.empty(num_tokens, dtype=np.uint16)
    current = 0
    for position in range(num_tokens):
        steps = np.array([1, 3, generator.integers(num_word_classes)])
        current = (current + generator.choice(steps, p=[0.5, 0.3, 0.2])) % num_word_classes
        tokens[position] = generator.choice(members[current])
    return tokens, truth


def assert_partition(word_class: NDArray[np.int32], vocab_size: int, num_word_classes: int) -> None:
    assert word_class.dtype == np.int32
    assert len(word_class) == vocab_size
    assert set(word_class.tolist()) == set(range(num_word_classes))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, None])
@pytest.mark.parametrize(
    ("vocab_size", "asked", "expected"),
    [
        *((1, 1, 1), (2, 1, 1), (7, 7, 7), (13, 4, 4), (101, 10, 10), (101, 1, 1), (101, 101, 101)),
        *((60, 59, 59), (83, None, 9), (83, 500, 83)),
    ],
)
def test_every_method_puts_each_word_into_one_of_c_nonempty_classes(
    method: str, vocab_size: int, asked: int | None, expected: int, num_tokens: int | None
) -> None:
    """C is √N unless asked for, and never exceeds the words; few or no words may have occurred."""
    tokens = zipf_tokens(vocab_size, 3 * vocab_size)[:num_tokens]
    found = built(tokens, vocab_size, method=method, num_word_classes=asked, dimensions=8)
    assert_partition(found, vocab_size, expected)


def test_uniform_and_random_classes_have_equal_sizes_and_uniform_ones_are_blocks() -> None:
    counts = np.array([5, 0, 9, 7, 1, 3])
    for method in ("uniform", "random"):
        tokens = np.repeat(np.arange(102), np.resize(counts, 102)).astype(np.uint16)
        sizes = np.bincount(built(tokens, 102, method=method))
        assert sorted(sizes.tolist()) == [10] * 8 + [11] * 2
    tokens = np.repeat(np.arange(6), counts).astype(np.uint16)
    assert built(tokens, 6, method="uniform", num_word_classes=3).tolist() == [1, 2, 0, 0, 2, 1]


def test_frequency_classes_have_equal_sums_of_sqrt_count_to_within_one_word() -> None:
    counts = np.random.default_rng(0).permutation(20_000 // np.arange(20, 2_001))
    mass = np.sqrt(counts)
    for num in (2, 7, 20):
        word_class = frequency_classes(counts, num)
        assert np.abs(np.bincount(word_class, weights=mass) - mass.sum() / num).max() <= mass.max()
        groups = [counts[word_class == c] for c in range(num)]
        assert all(more.min() >= fewer.max() for more, fewer in pairwise(groups))
    dominant = frequency_classes(np.array([1, 1, 1_000_000, 1, 1, 0]), 3)
    assert dominant[2] == 0
    assert np.bincount(dominant).tolist() == [1, 1, 4]


def test_the_same_seed_gives_the_same_classes_and_another_seed_others() -> None:
    tokens = zipf_tokens(60, 2_000)
    for method in ("random", "embedding"):
        options: dict[str, Any] = {"method": method, "num_word_classes": 8}
        first, again, other = (built(tokens, 60, seed=seed, **options) for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("passes", [0, embedding_module.REFINEMENT_PASSES])
def test_embedding_recovers_planted_classes(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    monkeypatch.setattr(embedding_module, "REFINEMENT_PASSES", passes)
    tokens, truth = planted_text(6, 15, 12_000)
    word_class = built(tokens, 90, method="embedding", num_word_classes=6, dimensions=10)
    common = sum(Counter(truth[word_class == c].tolist()).most_common(1)[0][1] for c in range(6))
    assert common / 90 >= 0.9


@pytest.mark.parametrize("max_words", [None, 15, 101])
def test_no_class_exceeds_max_words(max_words: int | None) -> None:
    settings = {"num_word_classes": 9, "dimensions": 10, "max_words": max_words}
    word_class = built(zipf_tokens(101, 4_000), 101, method="embedding", **settings)
    assert np.bincount(word_class).max() <= (max_words or 12)


def test_bigram_counts_do_not_depend_on_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, words = zipf_tokens(30, 1_001), np.array([7, 0, 21, 3])
    expected = np.zeros((30, 30))
    np.add.at(expected, (tokens[:-1], tokens[1:]), 1)
    for portion in (1_000, 7, 1_000_000):
        monkeypatch.setattr(bigrams_module, "TOKENS_PER_CHUNK", portion)
        monkeypatch.setattr(bigrams_module, "PAIRS_PER_PORTION", portion)
        assert np.array_equal(count_bigrams(tokens, 30).toarray(), expected)
        some = count_bigrams(tokens, 30, words=words).toarray()
        assert np.array_equal(some, expected[np.ix_(words, words)])
    assert count_bigrams(tokens[:1], 30).nnz == 0


def test_truncated_svd_equals_the_dense_one() -> None:
    dense = np.random.default_rng(2).standard_normal((40, 60)) ** 3
    vectors, values = truncated_svd(sparse.csr_array(dense), 5, seed=1, iterations=20)
    expected, expected_values, _ = np.linalg.svd(dense, full_matrices=False)
    assert values == pytest.approx(expected_values[:5], rel=1e-5)
    assert np.abs(vectors.T @ expected[:, :5]) == pytest.approx(np.eye(5), abs=1e-3)
    assert (np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0) > 0).all()


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("num_word_classes", [1, 9, 101])
@pytest.mark.parametrize("clustered_words", [1, 30, 100, 101, 500])
def test_clustered_words_and_the_others_by_count_are_a_partition(
    method: str, num_word_classes: int, clustered_words: int
) -> None:
    tokens = zipf_tokens(101, 3_000)
    settings = {"method": method, "num_word_classes": num_word_classes}
    word_class = built(tokens, 101, clustered_words=clustered_words, **settings)
    assert_partition(word_class, 101, num_word_classes)
    assert clustered_words < 101 or np.array_equal(word_class, built(tokens, 101, **settings))
    frequent = np.argsort(-counts_of(tokens, 101), kind="stable")[:clustered_words]
    in_both = set(word_class[frequent].tolist()) & set(np.delete(word_class, frequent).tolist())
    assert in_both == ({0} if num_word_classes == 1 and clustered_words < 101 else set())


def test_clustered_words_are_clustered_as_if_they_were_the_whole_text() -> None:
    tokens, _ = planted_text(6, 15, 12_000)
    text = np.concatenate([tokens, np.tile(np.arange(90, 130, dtype=np.uint16), 9)])
    counts = counts_of(text, 130)
    settings = {"method": "embedding", "dimensions": 10}
    word_class = built(text, 130, num_word_classes=8, clustered_words=90, **settings)
    num_clustered_classes = len(set(word_class[:90].tolist()))
    share = np.sqrt(counts[:90]).sum() / np.sqrt(counts).sum()
    assert num_clustered_classes == round(8 * share) == 8 - len(set(word_class[90:]))
    order = np.argsort(-counts[:90], kind="stable")
    sorted_tokens = np.argsort(order)[tokens].astype(np.uint16)
    expected = built(sorted_tokens, 90, num_word_classes=num_clustered_classes, **settings)
    assert np.array_equal(word_class[order], expected)


@pytest.mark.parametrize("shortlist", [0, 5])
def test_exchange_treats_words_that_are_not_clustered_as_one_neighbour(shortlist: int) -> None:
    tokens, _ = planted_text(6, 15, 12_000)
    counts, n = counts_of(tokens, 90), 60
    settings = {"num_word_classes": 12, "clustered_words": n, "shortlist": shortlist}
    settings |= {"dimensions": 10}
    words = np.argsort(-counts, kind="stable")[:n]
    clustered = built(tokens, 90, max_words=20, **settings)[words]
    num_clustered_classes = len(set(clustered.tolist()))
    start = built(tokens, 90, method="embedding", **settings)[words]
    assert len(set(start.tolist())) == num_clustered_classes
    id = np.full(90, n)
    id[words] = np.arange(n)
    text = id[tokens].astype(np.uint16)
    pairs, occurrences = count_bigrams(text, n + 1), counts_of(text, n + 1)
    expected = np.append(start, 0)
    for separate in ([n], [*range(shortlist), n]) if shortlist else ([n],):
        expected = exchange(
            pairs, occurrences, expected, num_clustered_classes, 20, separate=np.array(separate)
        ).astype(np.int32)
    assert np.array_equal(clustered, expected[:n])
    assert not np.array_equal(clustered, start)


@pytest.mark.parametrize("method", METHODS)
def test_a_line_makes_the_classes_of_a_configuration(method: Any) -> None:
    tokens, _ = planted_text(6, 15, 3_000)
    options = {"method": method, "shortlist": 4, "seed": 2}
    expected = built(tokens, 90, num_word_classes=6, **options)
    for text in (tokens, tokens.tolist(), tokens.astype(np.uint64)):
        assert np.array_equal(data_prep.word_classes(text, 90, 6, **options), expected)


@pytest.mark.parametrize(("num_word_classes", "sizes"), [(27, [3, 9, 27]), (None, [3, 9, 29])])
@pytest.mark.parametrize("method", METHODS)
def test_each_level_has_classes_of_the_classes_below(
    method: Any, num_word_classes: Any, sizes: Any
) -> None:
    """They are made by the method from the text in which words are replaced by their classes."""
    tokens, _ = planted_text(6, 15, 3_000)
    levels = data_prep.class_levels(tokens, 90, num_word_classes, depth=4, method=method)
    assert levels.dtype == np.int32
    assert (levels.max(axis=1) + 1).tolist() == sizes
    assert np.array_equal(levels[2], data_prep.word_classes(tokens, 90, sizes[-1], method=method))
    for above, below in pairwise(levels):
        size = below.max() + 1
        of_class = data_prep.word_classes(below[tokens], size, above.max() + 1, method=method)
        assert np.array_equal(above, of_class[below])


def test_classes_of_what_is_no_text_of_the_vocabulary_are_refused() -> None:
    for tokens in ([0, 4], [-1], [[0, 1]], [0.5]):
        with pytest.raises(ValueError, match=r"tokens: expected \[T\] integers in \[0, 4\)"):
            data_prep.word_classes(tokens, 4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"num_word_classes": 0}, "num_word_classes: expected at least 1, got 0"),
        ({"depth": 1}, "depth: expected at least 2, got 1"),
        ({"shortlist": -1}, "shortlist: expected at least 0, got -1"),
        ({"shortlist": 5}, "shortlist = 5 is more than 4 words"),
        ({"method": "magic"}, "method: expected one of exchange, embedding, .*, got 'magic'"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            data_prep.class_levels([0, 1], 4, **options)
    assert sorted(data_prep.word_classes(np.empty(0, int), 4).tolist()) == [0, 0, 1, 1]


def test_assignment_is_close_to_the_best_possible() -> None:
    scores = np.random.default_rng(4).random((120, 12)).astype(np.float32)
    words, prices, occupied = np.arange(120), np.zeros(12, np.float32), np.zeros(12, np.int64)
    assigned, _ = assign(lambda ids: scores[ids], words, occupied, 10, prices, 0.02)
    slots = np.repeat(scores, 10, axis=1)
    best = slots[linear_sum_assignment(slots, maximize=True)].sum()
    assert np.bincount(assigned).tolist() == [10] * 12
    assert scores[np.arange(120), assigned].sum() >= 0.98 * best


def test_further_words_fill_the_smallest_classes() -> None:
    sizes = np.array([3, 0, 5, 1])
    places = smallest_classes(sizes, 5, 6)
    assert sorted((sizes + np.bincount(places, minlength=4)).tolist()) == [3, 3, 4, 5]
    assert len(smallest_classes(sizes, 5, 0)) == 0
    assert (sizes + np.bincount(smallest_classes(sizes, 5, 11), minlength=4)).tolist() == [5] * 4


def build(settings: ClassesConfig, folder: Path, words: Sequence[str] = WORDS) -> WordClass:
    """The classes on each level of words that occur once."""
    counts, tokens = np.ones(len(words), np.int64), np.arange(len(words), dtype=np.uint16)
    text: dict[str, Any] = {"tokens": tokens, "words": lambda: words, "folder": folder}
    return build_class_levels(counts, settings, progress=False, **text)


@pytest.mark.parametrize(
    ("file_format", "text", "lower"),
    [
        ("mkcls", "b\t7\nz\t9\nc\t3\na\t7\n", []),
        ("mkcls", "b\t7\r\n\r\nc\t3\r\na\t7\r\nb\t7", []),
        ("mkcls", "\ufeffb\t7\nc\t3\na\t7\n", []),
        ("mkcls", "b\tX\nc\tY\na\tX\n<unk>\tZ\n<eos>\tZ\n", []),
        ("srilm", "X 0.5 b\nY 1 c\nX 0.5 a\n", []),
        ("srilm", "X b\nY c\nX a\n", []),
        ("brown", "0110\tb\t12\n00\tc\t4\n0110\ta\t1\n", []),
        ("brown", "10\tb\t12\n0\tc\t4\n110\ta\t1\n", LOWER),
        ("taxonomy", "b\tanimal/pet\nc\tfood\na\tanimal/farm/cow\nz\tx/y\n", LOWER),
    ],
)
def test_class_files_are_read_and_special_words_get_a_separate_class_if_they_lack_one(
    tmp_path: Path, file_format: Any, text: str, lower: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """On each level of a file of paths, up to the depth."""
    (tmp_path / "map").write_bytes(text.encode())
    settings = ClassesConfig(method="file", file="map", file_format=file_format)
    levels = [[2, 0, 0, 1, 2], *lower]
    found = build(replace(settings, depth=9 if lower else None), tmp_path)
    assert (found.tolist(), str(found.dtype), caplog.text) == (levels, "int32", "")
    if lower:
        assert build(replace(settings, depth=3), tmp_path).tolist() == levels[:2]
        assert "2 of 3 levels of classes are used (classes.depth)" in caplog.text


def test_vectors_are_clustered_by_angle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["<unk>", "a b", "c", "d", "e", "<eos>"]
    lines = ["4 2", "a b\t3 0.1", "d\t-1e3 9", "c\t0.5 0", "z\t1 1", ""]
    (tmp_path / "vectors").write_text("\n".join(lines))
    vectors = read_vectors(tmp_path / "vectors", words)
    expected = [[0, 0], [3, 0.1], [0.5, 0], [-1000, 9], [0, 0], [0, 0]]
    assert vectors.tolist() == np.array(expected, np.float32).tolist()
    assert "1 of 6 words have no vector, the first is 'e'" in caplog.text
    settings = ClassesConfig(method="embedding", vectors="vectors", num_word_classes=3)
    (found,) = build(settings, tmp_path, words)
    assert found[1] == found[2] != found[3]
    assert np.bincount(found).tolist() == [2, 2, 2]
    (tmp_path / "vectors").write_text("c 0.5 0\nd -1000 9\n")  # spaces
    assert read_vectors(tmp_path / "vectors", words)[2:4].tolist() == vectors[2:4].tolist()
    (tmp_path / "vectors").write_text("".join(f"{word}\t1 0\n" for word in words))
    assert np.bincount(build(settings, tmp_path, words)[0]).tolist() == [2, 2, 2]
