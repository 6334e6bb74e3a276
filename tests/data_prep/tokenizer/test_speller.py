"""Spellings have the probabilities of the definition, and are drawn by them."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from data_prep.errors import UserError
from data_prep.tokenizer import speller as speller_module
from data_prep.tokenizer.speller import NUM_SCALARS, ORDER, Speller
from data_prep.tokenizer.word_index import WordIndex
from tests.data_prep.tokenizer.spelling import NUM_SCALARS as TRUE_NUM_SCALARS
from tests.data_prep.tokenizer.spelling import Definition

KNOWN = ["<eos>", "<unk>", "ab", "b", "bab", "abbab", "bé"]
OTHERS = ["ba", "aab", "bba", "abab", "baab"]
TYPES = [*KNOWN[2:], *OTHERS]
SHARE = 0.125


def trained(known: list[str] = KNOWN, others: list[str] = OTHERS) -> Speller:
    return Speller.train(WordIndex.of(known), WordIndex.of(others), literal_share=SHARE)


def truth(definition: Definition, known: list[str], word: str) -> float:
    """Equation (2)."""
    mass = sum(definition.prob(each) / definition.others(each) for each in ["", *known])
    return (1 - SHARE) * definition.prob(word) / definition.others(word) / (1 - mass)


def test_probabilities_are_those_of_the_definition() -> None:
    words = ["a", "ba", "aab", "bbbb", "bc", "日本", "abababababab", "abé"]
    expected = [truth(Definition(TYPES, ORDER), KNOWN, word) for word in words]
    assert np.exp(trained().log_prob(words)) == pytest.approx(expected, rel=1e-12)
    assert trained().log_prob(["<unk>"]) == pytest.approx(np.log(SHARE), rel=1e-12)
    assert NUM_SCALARS == TRUE_NUM_SCALARS
    other = ["<unk>", "b", "abb"]
    expected = [truth(Definition(TYPES, ORDER), other, word) for word in words]
    assert np.exp(trained().outside(other).log_prob(words)) == pytest.approx(expected, rel=1e-12)


def test_a_large_alphabet_has_shorter_ngrams() -> None:
    random.seed(1)
    letters = [chr(0x4E00 + number) for number in range(5_000)]
    types = ["".join(random.choices(letters, k=3)) for _ in range(9_000)]
    types = list(dict.fromkeys(types))
    speller = trained(["<eos>", "<unk>", *types[:50]], types[50:])
    definition = Definition(types, 4)
    assert (speller.order, len(speller.alphabet)) == (4, len(definition.alphabet))
    words = ["".join(random.choices(letters, k=k)) for k in range(1, 7)]
    expected = [truth(definition, ["<eos>", "<unk>", *types[:50]], word) for word in words]
    assert np.exp(speller.log_prob(words)) == pytest.approx(expected, rel=1e-12)


def test_without_a_character_of_two_words_no_spelling_is_drawn() -> None:
    """There was no end to the search for one."""
    speller = Speller.train(WordIndex.of(["a", "b"]), WordIndex.of([]), literal_share=0.1)
    with pytest.raises(UserError, match="no character is in two words of the training split"):
        speller.draw(np.random.default_rng(0), {"a", "b"}.__contains__)


def test_spellings_are_drawn_by_their_probabilities() -> None:
    speller, generator = trained(), np.random.default_rng(3)
    drawn = Counter(speller.draw(generator, KNOWN.__contains__) for _ in range(1_500))
    assert all(set(word) <= {"a", "b"} for word in drawn)
    assert not drawn.keys() & set(KNOWN)
    words = ["a", "ba", "aab", "bba", "abab", "baab", "aba", "bb"]
    observed = [drawn[word] for word in words]
    expected = np.exp(speller.log_prob(words))
    assert min(observed) >= 5
    assert chisquare(observed, expected / expected.sum() * sum(observed)).pvalue > 1e-3


def test_a_text_without_words_gives_every_string_a_probability() -> None:
    speller = trained(["<eos>", "<unk>"], [])
    p = [0.25 / NUM_SCALARS, 0.125 / NUM_SCALARS**2]  # of one and of two characters
    mass = 0.5 + sum(0.5 * (0.5 / NUM_SCALARS) ** len(word) for word in ("<eos>", "<unk>"))
    expected = np.log(p) + np.log1p(-SHARE) - np.log1p(-mass)
    assert speller.log_prob(["x", "日本"]) == pytest.approx(expected, rel=1e-12)
    assert len(speller.log_prob([])) == 0


def test_of_many_types_every_kth_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speller_module, "MAX_TYPES", 6)
    sampled = ["<eos>", *("ab", "bab", "bé", "aab", "abab")]
    expected = truth(Definition(sampled[1:], ORDER), KNOWN, "bb")
    assert np.exp(trained().log_prob(["bb"])) == pytest.approx(expected, rel=1e-12)


def test_a_file_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    speller, path = trained(), tmp_path / "speller.npz"
    sha256 = speller.save(path, "of the tokenizer")
    assert speller.save(path, "of the tokenizer") == sha256
    words = ["ba", "日本", "<unk>"]
    read = Speller.load(path, "of the tokenizer")
    assert read.log_prob(words).tolist() == speller.log_prob(words).tolist()
    with pytest.raises(UserError, match=r"speller.npz was made for another vocabulary"):
        Speller.load(path, "of another one")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"speller.npz is damaged$"):
        Speller.load(path, "of the tokenizer")
    path.unlink()
    with pytest.raises(UserError, match=r"speller.npz cannot be read: No such file"):
        Speller.load(path, "of the tokenizer")
