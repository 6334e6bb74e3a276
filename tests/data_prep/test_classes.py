"""Word classes: partitions of any size, likelihood as computed by hand, files of other tools."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from data_prep import bigrams as bigrams_module
from data_prep import classes as classes_module
from data_prep import clustering
from data_prep.assignment import assign, smallest_classes
from data_prep.bigrams import count_bigrams
from data_prep.classes import (
    build_word_classes,
    class_report,
    embedding_classes,
    frequency_classes,
    random_classes,
    read_word_classes,
    uniform_classes,
)
from data_prep.exchange import exchange
from data_prep.settings import ClassesConfig, UserError

SIZES = [(1, 1), (2, 1), (7, 7), (13, 4), (101, 10), (101, 1), (101, 101), (60, 59)]
"""N, C: a single word, one class, as many classes as words, N prime, nearly as many."""


def zipf_tokens(vocab_size: int, num_tokens: int, seed: int = 0) -> NDArray[np.uint16]:
    """Independent draws with P(rank) ∝ 1/rank, ranks shuffled over the ids."""
    generator = np.random.default_rng(seed)
    share = 1 / np.arange(1, vocab_size + 1)
    tokens = generator.choice(vocab_size, num_tokens, p=share / share.sum())
    return generator.permutation(vocab_size)[tokens].astype(np.uint16)


def counts_of(tokens: NDArray[np.uint16], vocab_size: int) -> NDArray[np.int64]:
    return np.bincount(tokens, minlength=vocab_size).astype(np.int64)


def embedded(
    counts: NDArray[np.int64],
    tokens: NDArray[np.uint16],
    num_word_classes: int,
    *,
    dimensions: int = 100,
    max_words: int | None = None,
    seed: int = 1,
) -> NDArray[np.int32]:
    """`embedding_classes` of a text."""
    bigrams = count_bigrams(tokens, len(counts))
    return embedding_classes(
        counts, bigrams, num_word_classes, dimensions=dimensions, max_words=max_words, seed=seed
    )


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
        step = generator.choice(steps, p=[0.5, 0.3, 0.2])
        current = (current + step) % num_word_classes
        tokens[position] = generator.choice(members[current])
    return tokens, truth


def assert_partition(word_class: NDArray[np.int32], vocab_size: int, num_word_classes: int) -> None:
    assert word_class.dtype == np.int32
    assert len(word_class) == vocab_size
    assert set(word_class.tolist()) == set(range(num_word_classes))


@pytest.mark.parametrize(("vocab_size", "num_word_classes"), SIZES)
def test_every_method_puts_each_word_into_one_of_c_nonempty_classes(
    vocab_size: int, num_word_classes: int
) -> None:
    tokens = zipf_tokens(vocab_size, 3 * vocab_size)
    counts = counts_of(tokens, vocab_size)
    for word_class in (
        frequency_classes(counts, num_word_classes),
        uniform_classes(counts, num_word_classes),
        random_classes(vocab_size, num_word_classes, seed=3),
        embedded(counts, tokens, num_word_classes, dimensions=8),
    ):
        assert_partition(word_class, vocab_size, num_word_classes)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_classes_of_words_that_hardly_occur_are_still_a_partition(num_tokens: int) -> None:
    tokens = np.full(num_tokens, 4, dtype=np.uint16)
    counts = counts_of(tokens, 23)
    assert_partition(frequency_classes(counts, 5), 23, 5)
    word_class = embedded(counts, tokens, 5)
    assert_partition(word_class, 23, 5)
    assert sorted(np.bincount(word_class).tolist()) == [4, 4, 5, 5, 5]


def test_uniform_and_random_classes_differ_by_one_word_in_size() -> None:
    counts = np.arange(103)
    for word_class in (uniform_classes(counts, 10), random_classes(103, 10, seed=1)):
        assert sorted(np.bincount(word_class).tolist()) == [10] * 7 + [11] * 3


def test_uniform_classes_are_blocks_of_descending_count() -> None:
    counts = np.array([5, 0, 9, 7, 1, 3])
    assert uniform_classes(counts, 3).tolist() == [1, 2, 0, 0, 2, 1]


@pytest.mark.parametrize("num_word_classes", [2, 7, 20])
def test_frequency_classes_have_equal_sums_of_sqrt_count_to_within_one_word(
    num_word_classes: int,
) -> None:
    counts = np.random.default_rng(0).permutation(20_000 // np.arange(20, 2_001))
    word_class = frequency_classes(counts, num_word_classes)
    mass = np.sqrt(counts)
    sums = np.bincount(word_class, weights=mass)
    assert np.abs(sums - mass.sum() / num_word_classes).max() <= mass.max()
    lowest = [counts[word_class == c].min() for c in range(num_word_classes)]
    highest = [counts[word_class == c].max() for c in range(num_word_classes)]
    assert all(low >= high for low, high in zip(lowest[:-1], highest[1:], strict=True))


def test_a_word_of_overwhelming_count_has_a_class_of_its_own() -> None:
    counts = np.array([1, 1, 1_000_000, 1, 1, 0])
    word_class = frequency_classes(counts, 3)
    assert word_class[2] == 0
    assert np.bincount(word_class).tolist() == [1, 1, 4]


def test_the_same_seed_gives_the_same_classes_and_another_seed_others() -> None:
    tokens = zipf_tokens(60, 2_000)
    counts = counts_of(tokens, 60)
    methods: list[Callable[[int], NDArray[np.int32]]] = [
        lambda seed: random_classes(60, 8, seed),
        lambda seed: embedded(counts, tokens, 8, dimensions=10, seed=seed),
    ]
    for make in methods:
        assert np.array_equal(make(1), make(1))
        assert not np.array_equal(make(1), make(2))


def test_embedding_recovers_the_classes_that_made_the_text() -> None:
    tokens, truth = planted_text(6, 15, 12_000)
    word_class = embedded(counts_of(tokens, 90), tokens, 6, dimensions=10)
    common = sum(Counter(truth[word_class == c].tolist()).most_common(1)[0][1] for c in range(6))
    assert common / 90 >= 0.9


def test_vectors_alone_recover_the_classes_that_made_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clustering, "REFINEMENT_PASSES", 0)
    test_embedding_recovers_the_classes_that_made_the_text()


@pytest.mark.parametrize("max_words", [None, 15, 30, 101])
def test_no_class_exceeds_max_words(max_words: int | None) -> None:
    tokens = zipf_tokens(101, 4_000)
    word_class = embedded(counts_of(tokens, 101), tokens, 9, dimensions=10, max_words=max_words)
    assert_partition(word_class, 101, 9)
    assert np.bincount(word_class).max() <= (max_words or 12)


def test_refinement_raises_the_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, _ = planted_text(8, 20, 6_000)
    counts = counts_of(tokens, 160)
    refined = class_report(counts, embedded(counts, tokens, 8, dimensions=3), tokens)
    monkeypatch.setattr(clustering, "REFINEMENT_PASSES", 0)
    plain = class_report(counts, embedded(counts, tokens, 8, dimensions=3), tokens)
    arbitrary = class_report(counts, random_classes(160, 8, seed=1), tokens)
    assert refined.log_likelihood > plain.log_likelihood > arbitrary.log_likelihood


def test_bigram_counts_do_not_depend_on_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = zipf_tokens(30, 1_001)
    expected = np.zeros((30, 30))
    np.add.at(expected, (tokens[:-1], tokens[1:]), 1)
    for portion in (1_000, 7, 1_000_000):
        monkeypatch.setattr(bigrams_module, "TOKENS_PER_CHUNK", portion)
        monkeypatch.setattr(bigrams_module, "PAIRS_PER_PORTION", portion)
        assert np.array_equal(count_bigrams(tokens, 30).toarray(), expected)


def test_truncated_svd_equals_the_dense_one() -> None:
    dense = np.random.default_rng(2).standard_normal((40, 60)) ** 3
    vectors, values = clustering.truncated_svd(sparse.csr_array(dense), 5, seed=1, iterations=20)
    expected, expected_values, _ = np.linalg.svd(dense, full_matrices=False)
    assert values == pytest.approx(expected_values[:5], rel=1e-5)
    assert np.abs(vectors.T @ expected[:, :5]) == pytest.approx(np.eye(5), abs=1e-3)
    assert (np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0) > 0).all()


def test_words_get_their_best_classes_where_these_have_room() -> None:
    preferred = np.array([2, 0, 1, 1, 0, 2])
    placed, prices = assign(
        lambda ids: np.eye(3, dtype=np.float32)[preferred[ids]],
        np.arange(6),
        np.zeros(3, dtype=np.int64),
        2,
        np.zeros(3, dtype=np.float32),
        0.01,
    )
    assert placed.tolist() == preferred.tolist()
    assert prices == pytest.approx(0, abs=1e-3)


def test_scarce_places_go_to_the_words_that_need_them_most() -> None:
    scores = np.array([[5, 4], [5, 0], [5, 3], [5, 1]], dtype=np.float32)
    nothing = np.zeros(2, dtype=np.float32)
    placed, _ = assign(
        lambda ids: scores[ids], np.arange(4), nothing.astype(np.int64), 2, nothing, 0.1
    )
    assert placed.tolist() == [1, 0, 1, 0]


def test_assignment_is_close_to_the_best_possible() -> None:
    scores = np.random.default_rng(4).random((120, 12)).astype(np.float32)
    placed, _ = assign(
        lambda ids: scores[ids],
        np.arange(120),
        np.zeros(12, dtype=np.int64),
        10,
        np.zeros(12, dtype=np.float32),
        0.02,
    )
    slots = np.repeat(scores, 10, axis=1)
    best = slots[linear_sum_assignment(slots, maximize=True)].sum()
    assert np.bincount(placed).tolist() == [10] * 12
    assert scores[np.arange(120), placed].sum() >= 0.98 * best


def test_leftover_words_level_the_classes() -> None:
    sizes = np.array([3, 0, 5, 1])
    places = smallest_classes(sizes, 5, 6)
    assert sorted((sizes + np.bincount(places, minlength=4)).tolist()) == [3, 3, 4, 5]
    assert len(smallest_classes(sizes, 5, 0)) == 0
    assert (sizes + np.bincount(smallest_classes(sizes, 5, 11), minlength=4)).tolist() == [5] * 4


def test_too_few_places_name_the_key() -> None:
    tokens = zipf_tokens(10, 50)
    with pytest.raises(
        UserError, match=r"classes\.max_words: 3 classes .* 9 words, but 10 are to be"
    ):
        embedded(counts_of(tokens, 10), tokens, 3, max_words=3)


@pytest.mark.parametrize("num_word_classes", [0, 11])
def test_an_impossible_number_of_classes_is_refused(num_word_classes: int) -> None:
    counts = np.ones(10, dtype=np.int64)
    methods: list[Callable[[], NDArray[np.int32]]] = [
        lambda: frequency_classes(counts, num_word_classes),
        lambda: uniform_classes(counts, num_word_classes),
        lambda: random_classes(10, num_word_classes, seed=1),
        lambda: embedded(counts, np.arange(10, dtype=np.uint16), num_word_classes),
    ]
    for make in methods:
        with pytest.raises(
            ValueError, match=f"num_word_classes: expected 1 to 10.*, got {num_word_classes}"
        ):
            make()


# Clustered head, tail by count


def built(
    counts: NDArray[np.int64], tokens: NDArray[np.uint16], settings: ClassesConfig
) -> NDArray[np.int32]:
    return build_word_classes(
        counts, settings, tokens=tokens, words=list, folder=Path(), progress=False
    )


@pytest.mark.parametrize("method", ["embedding", "exchange"])
@pytest.mark.parametrize("num_word_classes", [1, 2, 9, 40, 101])
@pytest.mark.parametrize("clustered_words", [1, 2, 30, 100, 101, 500])
def test_a_clustered_head_and_a_tail_by_count_are_a_partition(
    method: Literal["embedding", "exchange"], num_word_classes: int, clustered_words: int
) -> None:
    tokens = zipf_tokens(101, 3_000)
    counts = counts_of(tokens, 101)
    settings = ClassesConfig(
        method=method,
        num_word_classes=num_word_classes,
        clustered_words=clustered_words,
        dimensions=8,
    )
    word_class = built(counts, tokens, settings)
    assert_partition(word_class, 101, num_word_classes)
    whole = built(counts, tokens, replace(settings, clustered_words=None))
    assert (clustered_words < 101) or np.array_equal(word_class, whole)
    head = np.argsort(-counts, kind="stable")[:clustered_words]
    in_both = set(word_class[head].tolist()) & set(np.delete(word_class, head).tolist())
    assert in_both == ({0} if num_word_classes == 1 and clustered_words < 101 else set())


def test_head_and_tail_share_the_classes_by_sqrt_count() -> None:
    counts = np.array([100, 1, 1, 1, 1, 1, 1, 36, 36, 36], dtype=np.int64)
    tokens = np.repeat(np.arange(10, dtype=np.uint16), counts)
    settings = ClassesConfig(method="embedding", num_word_classes=5, clustered_words=4)
    word_class = built(counts, tokens, settings)
    # √count: 10 + 3 · 6 = 28 of 34, so 4 of 5 classes.
    assert sorted(word_class[[0, 7, 8, 9]].tolist()) == [0, 1, 2, 3]
    assert word_class[1:7].tolist() == [4] * 6
    nothing = np.zeros(10, dtype=np.int64)
    sizes = np.bincount(built(nothing, tokens[:0], settings)).tolist()
    assert (len(sizes), sum(sizes)) == (5, 10)


def test_the_clustered_head_is_clustered_as_a_text_of_its_own() -> None:
    tokens, _ = planted_text(6, 15, 12_000)
    rare = np.tile(np.arange(90, 130, dtype=np.uint16), 9)
    text = np.concatenate([tokens, rare])
    counts = counts_of(text, 130)
    settings = ClassesConfig(
        method="embedding", num_word_classes=8, clustered_words=90, dimensions=10
    )
    word_class = built(counts, text, settings)
    in_head = len(set(word_class[:90].tolist()))
    mass = np.sqrt(counts)
    assert in_head == round(8 * mass[:90].sum() / mass.sum()) == 8 - len(set(word_class[90:]))
    order = np.argsort(-counts[:90], kind="stable")
    sorted_tokens = np.argsort(order)[tokens].astype(np.uint16)
    expected = embedded(counts[order], sorted_tokens, in_head, dimensions=10)
    assert np.array_equal(word_class[order], expected)


@pytest.mark.parametrize("head", [0, 5])
def test_to_exchange_the_words_that_are_not_clustered_are_one_neighbour(head: int) -> None:
    tokens, _ = planted_text(6, 15, 12_000)
    counts, n = counts_of(tokens, 90), 60
    settings = ClassesConfig(
        num_word_classes=12, clustered_words=n, head=head, dimensions=10, max_words=20
    )
    words = np.argsort(-counts, kind="stable")[:n]
    clustered = built(counts, tokens, settings)[words]
    in_head = len(set(clustered.tolist()))
    start = built(counts, tokens, replace(settings, method="embedding", max_words=None))[words]
    assert len(set(start.tolist())) == in_head
    id = np.full(90, n)
    id[words] = np.arange(n)
    text = id[tokens].astype(np.uint16)
    pairs, occurrences = count_bigrams(text, n + 1), counts_of(text, n + 1)
    expected = np.append(start, 0)
    for alone in ([n], [*range(head), n]) if head else ([n],):
        expected = exchange(
            pairs, occurrences, expected, in_head, 20, alone=np.array(alone)
        ).astype(np.int32)
    assert np.array_equal(clustered, expected[:n])
    assert not np.array_equal(clustered, start)


def test_pairs_of_some_words_are_a_part_of_all_pairs() -> None:
    tokens = zipf_tokens(30, 2_000)
    words = np.array([7, 0, 21, 3])
    every = count_bigrams(tokens, 30).toarray()
    some = count_bigrams(tokens, 30, words=words).toarray()
    assert np.array_equal(some, every[np.ix_(words, words)])
    assert count_bigrams(tokens[:1], 30).nnz == 0


# Report


def test_report_equals_the_computation_by_hand() -> None:
    tokens = np.array([0, 1, 0, 2, 3, 0, 1], dtype=np.uint16)
    report = class_report(np.array([3, 2, 1, 1, 0]), np.array([0, 1, 1, 0, 0]), tokens)
    assert (report.num_word_classes, report.min_words, report.max_words) == (2, 2, 3)
    assert report.median_words == 2.5
    assert report.sizes == (3, 2)
    assert report.token_mass == pytest.approx((4 / 7, 3 / 7))
    assert report.columns_per_token == pytest.approx(2 + 4 / 7 * 3 + 3 / 7 * 2)
    assert report.top_words == ((0, 3, 4), (1, 2))
    # Classes 0 1 0 1 0 0 1: 0 → 0 once, 0 → 1 three times, 1 → 0 twice.
    transitions = 1 * math.log(1 / 4) + 3 * math.log(3 / 4) + 2 * math.log(2 / 2)
    words = 2 * math.log(3 / 4) + 1 * math.log(1 / 4) + 2 * math.log(2 / 3) + 1 * math.log(1 / 3)
    assert report.log_likelihood == pytest.approx((transitions + words) / 6)
    assert report.class_entropy == pytest.approx(
        -4 / 7 * math.log2(4 / 7) - 3 / 7 * math.log2(3 / 7)
    )
    in_class = 3 * math.log2(3 / 4) + math.log2(1 / 4) + 2 * math.log2(2 / 3) + math.log2(1 / 3)
    assert report.word_entropy == pytest.approx(-in_class / 7)


def test_words_of_the_head_are_classes_of_their_own_to_the_report() -> None:
    """Words 0 (3 times) and 1 (twice) on the root leave class 0 words 3 and 4, class 1 word 2."""
    tokens = np.array([0, 1, 0, 2, 3, 0, 1], dtype=np.uint16)
    counts = np.array([3, 2, 1, 1, 0])
    report = class_report(counts, np.array([0, 1, 1, 0, 0]), tokens, head=2)
    assert (report.num_word_classes, report.head) == (2, 2)
    assert report.sizes == (2, 1)
    assert report.head_mass == pytest.approx(5 / 7)
    assert report.token_mass == pytest.approx((1 / 7, 1 / 7))
    assert report.columns_per_token == pytest.approx(4 + 1 / 7 * 2 + 1 / 7 * 1)
    assert report.top_words == ((3, 4), (2,))
    apart = class_report(counts, np.array([2, 3, 1, 0, 0]), tokens)
    assert report.log_likelihood == pytest.approx(apart.log_likelihood)
    assert report.class_entropy == pytest.approx(apart.class_entropy)
    assert report.word_entropy == pytest.approx(apart.word_entropy)
    all_on_the_root = class_report(counts, np.array([0, 1, 1, 0, 0]), tokens, head=5)
    assert all_on_the_root.sizes == (0, 0)
    assert all_on_the_root.columns_per_token == 5


def test_a_head_of_more_words_than_there_are_is_refused(tmp_path: Path) -> None:
    counts = np.array([3, 2], dtype=np.int64)
    with pytest.raises(UserError, match=r"classes\.head = 3 is more than 2 words"):
        build_word_classes(
            counts, ClassesConfig(method="uniform", head=3),
            tokens=np.array([0, 1]), words=list, folder=tmp_path,
        )  # fmt: skip


def test_with_one_class_the_report_is_the_unigram_model() -> None:
    tokens = zipf_tokens(40, 3_000)
    counts = counts_of(tokens, 40)
    report = class_report(counts, np.zeros(40, dtype=np.int32), tokens)
    log_prob = np.log(counts[tokens[1:]] / len(tokens))
    assert report.log_likelihood == pytest.approx(log_prob.mean())
    assert report.class_entropy == 0
    assert report.columns_per_token == 41


def test_report_does_not_depend_on_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = zipf_tokens(40, 1_003)
    counts, word_class = counts_of(tokens, 40), random_classes(40, 6, seed=1)
    whole = class_report(counts, word_class, tokens)
    monkeypatch.setattr(classes_module, "TOKENS_PER_CHUNK", 17)
    assert class_report(counts, word_class, tokens) == whole


def test_report_refuses_arrays_that_do_not_belong_together() -> None:
    tokens = np.array([0, 1, 1], dtype=np.uint16)
    with pytest.raises(ValueError, match="expected classes of 2 words and 4 tokens"):
        class_report(np.array([1, 3]), np.array([0, 1]), tokens)
    with pytest.raises(UserError, match=r"wants two tokens of training text at least, got 1$"):
        class_report(np.array([1, 0]), np.array([0, 0]), np.array([0], dtype=np.uint16))
    with pytest.raises(ValueError, match="class 1 has no words"):
        class_report(np.array([1, 2]), np.array([0, 2]), tokens)


# Files


WORDS = ["<unk>", "a", "b", "c", "<eos>"]


@pytest.mark.parametrize(
    ("file_format", "text"),
    [
        ("mkcls", "b\t7\nz\t9\nc\t3\na\t7\n"),
        ("mkcls", "b\t7\r\n\r\nc\t3\r\na\t7\r\nb\t7"),
        ("mkcls", "\ufeffb\t7\nc\t3\na\t7\n"),
        ("brown", "0110\tb\t12\n00\tc\t4\n0110\ta\t1\n"),
        ("srilm", "X 0.5 b\nY 1 c\nX 0.5 a\n"),
        ("srilm", "X b\nY c\nX a\n"),
    ],
)
def test_class_files_are_read_and_sentence_words_get_their_own_class(
    tmp_path: Path, file_format: str, text: str
) -> None:
    (tmp_path / "map").write_bytes(text.encode())
    settings = ClassesConfig(method="file", file="map", file_format=file_format)  # type: ignore[arg-type]
    word_class = build_word_classes(
        np.ones(5, dtype=np.int64),
        settings,
        tokens=np.arange(5, dtype=np.uint16),
        words=lambda: WORDS,
        folder=tmp_path,
    )
    assert word_class.tolist() == [2, 0, 0, 1, 2]
    assert word_class.dtype == np.int32


def test_a_class_file_may_hold_the_sentence_words(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("<eos>\tX\na\tY\nb\tY\nc\tX\n<unk>\tY\n")
    assert read_word_classes(tmp_path / "map", "mkcls", WORDS).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("file_format", "text", "message"),
    [
        ("mkcls", "a\t1\n", "2 of the vocabulary's 5 words have no class, the first is 'b'"),
        ("mkcls", "a\t1\nb\t2\na\t2\n", "line 3: 'a' already has another class"),
        ("mkcls", "a 1\n", r"line 1: expected word TAB class \(mkcls\), got 'a 1'"),
        ("brown", "01\ta\t3\n02\tb\t3\n", "line 2: expected bit string TAB word TAB count"),
        ("brown", "01\ta\tmany\n", "line 1: expected bit string TAB word TAB count"),
        ("srilm", "X 0.5 a b\n", r"line 1: expected class \[probability\] word"),
        ("srilm", "X a b\n", r"line 1: expected class \[probability\] word"),
        ("mkcls", "a\t1\n\udcff\t2\n", "not valid UTF-8"),
    ],
)
def test_a_faulty_class_file_is_refused_in_one_line(
    tmp_path: Path, file_format: str, text: str, message: str
) -> None:
    path = tmp_path / "map"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message) as caught:
        read_word_classes(path, file_format, WORDS)  # type: ignore[arg-type]
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("a\tX\nb\tY\nc\tX\n")
    settings = ClassesConfig(method="file", file="map", num_word_classes=4)
    tokens = np.arange(5, dtype=np.uint16)

    def build(settings: ClassesConfig) -> None:
        counts = np.ones(5, dtype=np.int64)
        build_word_classes(counts, settings, tokens=tokens, words=lambda: WORDS, folder=tmp_path)

    with pytest.raises(UserError, match=r"classes\.num_word_classes: 4 asked for, .* 3 classes"):
        build(settings)
    with pytest.raises(UserError, match=r"classes\.file: .* needs the name"):
        build(replace(settings, file=None))
    with pytest.raises(UserError, match=r"classes\.file: cannot read .*nowhere: No such file"):
        build(replace(settings, file="nowhere"))


# Settings


@pytest.mark.parametrize("method", ["embedding", "exchange", "frequency", "uniform", "random"])
@pytest.mark.parametrize(("asked", "expected"), [(None, 9), (5, 5), (500, 83)])
def test_the_default_number_of_classes_is_the_root_and_never_exceeds_the_words(
    tmp_path: Path, method: str, asked: int | None, expected: int
) -> None:
    tokens = zipf_tokens(83, 700)
    settings = ClassesConfig(method=method, num_word_classes=asked, dimensions=5)  # type: ignore[arg-type]
    word_class = build_word_classes(
        counts_of(tokens, 83), settings, tokens=tokens, words=list, folder=tmp_path, progress=False
    )
    assert_partition(word_class, 83, expected)


def test_progress_goes_to_a_terminal_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = zipf_tokens(20, 200)
    for terminal, progress in [(True, False), (True, True), (False, True)]:
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        build_word_classes(
            counts_of(tokens, 20),
            ClassesConfig(),
            tokens=tokens,
            words=list,
            folder=tmp_path,
            progress=progress,
        )
        shown = capsys.readouterr()
        assert shown.out == ""
        assert ("k-means" in shown.err) == (terminal and progress)
