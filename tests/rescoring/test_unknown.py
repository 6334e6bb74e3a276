"""Unknown words are counted, and the likely cause of many is named."""

import pytest

from data_prep.settings import TokenizerConfig
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import train_sentencepiece
from lm.rescoring.unknown import UnknownWords, noted_words
from tests.conftest import toy_sentences

WORDS = WordTokenizer(["<eos>", "<unk>", "the", "cat", "sees", "do", "n't", "well", "-", "known"])
CAPITALS = WordTokenizer(["<eos>", "<unk>", "THE", "CAT", "SEES"])
FORMS = WordTokenizer(
    ["<eos>", "<unk>", "été", "e\u0301ta\u0301", "it's", "l\u2019an", "x-y", "ab"]
)


@pytest.mark.parametrize(
    ("tokenizer", "text", "cause"),
    [
        (WORDS, "THE CAT sees", "67 % of .*; likely cause: upper case, without which 100 % of"),
        (CAPITALS, "the CAT sees", "likely cause: lower case, .*: convert .* to upper case"),
        (WORDS, "the, cat. sees!", "likely cause: attached punctuation, .*split_punctuation=true"),
        (WORDS, f"a{'%' * 200_000}a", "neither lower case nor"),  # hours, if its square counted
        (WORDS, "\u2581the \u2581cat sees", "likely cause: marks of pieces of words"),
        (WORDS, "don't well-known the", "likely cause: another tokenisation of contractions"),
        (FORMS, "e\u0301te\u0301 ab", "another form of Unicode than NFC, .*: convert .* to NFC"),
        (FORMS, "\uff41\uff42 ab", "another form of Unicode than NFKC, .* to NFKC, uconv -x nfkc"),
        (FORMS, "it\u2019s ab", "typographic apostrophes and hyphens"),
        (FORMS, "l'an ab", "typewriter apostrophes"),
        (FORMS, "a\u200bb ab", r"not visible, such as U\+200B and U\+00AD, .*: remove them from"),
        (WORDS, "un zèbre , the", "neither lower case nor removed punctuation"),
    ],
)
def test_the_cause_of_many_unknown_words_is_named(
    tokenizer: WordTokenizer, text: str, cause: str
) -> None:
    warning = UnknownWords(tokenizer, [text]).warning("references")
    assert warning is not None
    assert "of the words of the references are unknown" in warning
    with pytest.raises(ValueError, match=cause):
        raise ValueError(warning)


def test_many_unknown_words_at_the_beginning_of_a_text_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = ["e\u0301te\u0301 ab"] * 300
    assert list(noted_words(FORMS, lines, "a.txt")) == lines
    (message,) = caplog.messages
    assert message.startswith("a.txt, first lines: 50 % of the words of the text are unknown;")
    assert list(noted_words(FORMS, ["ab été"] * 300, "a.txt")) == ["ab été"] * 300
    assert len(caplog.messages) == 1


def test_up_to_a_fifth_of_unknown_words_is_no_reason_for_a_warning() -> None:
    words = UnknownWords(WORDS, ["the cat", "sees the ZEBRA"])
    assert (words.num_words, words.num_unknown) == (5, 1)
    assert words.warning("hypotheses") is None
    assert UnknownWords(WORDS, ["", " "]).warning("hypotheses") is None


def test_a_word_with_an_unknown_part_is_unknown() -> None:
    settings = TokenizerConfig(kind="sentencepiece", vocab_size=36)
    pieces = SentencePieceTokenizer(train_sentencepiece(toy_sentences(0, 200), settings))
    assert UnknownWords(pieces, ["the c\u2603t", "the cat \u2603"]).num_unknown == 2
    separated = WordTokenizer(["<eos>", "<unk>", "cat", "."], split_punctuation=True)
    assert UnknownWords(separated, ["cat. dog. cat"]).num_unknown == 1
    assert separated.unknown_occurrences(["dog. dog, cat"]) == ["dog", "dog", ","]
