"""Unknown words are counted, and named if they are many."""

import pytest

from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.scoring.unknown import UnknownWords, noted_words
from tests.conftest import toy_sentences
from tests.data_prep.conftest import trained_pieces

WORDS = WordTokenizer(["<eos>", "<unk>", "the", "cat", "sees", "do", "n't", "well", "-", "known"])


def test_more_than_a_fifth_of_unknown_words_are_named() -> None:
    warning = UnknownWords(WORDS, ["THE CAT sees", "THE a\u200bb"]).warning("references")
    assert warning is not None
    expected = "80 % of the words of the references are unknown, most often 'THE', 'CAT', "
    assert warning.startswith(expected + r"'a\u200bb': write them as in the training text (case,")
    for texts in (["the cat", "sees the ZEBRA"], ["", " "]):  # a fifth, and none
        assert UnknownWords(WORDS, texts).warning("hypotheses") is None


def test_many_unknown_words_at_the_beginning_of_a_text_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = ["THE cat"] * 300
    assert list(noted_words(WORDS, lines, "a.txt")) == lines
    (message,) = caplog.messages
    assert message.startswith("a.txt, first lines: 50 % of the words of the text are unknown, ")
    assert list(noted_words(WORDS, ["the cat"] * 300, "a.txt")) == ["the cat"] * 300
    assert len(caplog.messages) == 1


def test_a_word_with_an_unknown_part_is_unknown() -> None:
    pieces = trained_pieces(toy_sentences(0, 200), 36)
    assert UnknownWords(pieces, ["the c\u2603t", "the cat \u2603"]).num_unknown == 2
    separated = WordTokenizer(["<eos>", "<unk>", "cat", "."], split_punctuation=True)
    assert UnknownWords(separated, ["cat. dog. cat"]).num_unknown == 1
    assert separated.unknown_occurrences(["dog. dog, cat"]) == ["dog", "dog", ","]
