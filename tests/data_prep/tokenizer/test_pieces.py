"""The pieces of the words of a vocabulary."""

import numpy as np
import pytest

from data_prep.tokenizer.pieces import MAX_PIECES, find_pieces

STEMS = ("walk", "talk", "jump", "look", "call", "play", "turn", "open", "learn", "stay")
ENDINGS = ("", "s", "ed", "ing", "er")
WORDS = ["<eos>", *(stem + ending for stem in STEMS for ending in ENDINGS), "<unk>"]
SPECIAL = (0, len(WORDS) - 1)
ONES = np.ones(len(WORDS), np.int64)


def rows(pieces: np.ndarray) -> list[tuple[int, ...]]:
    """The pieces of each word."""
    return [tuple(row[row >= 0].tolist()) for row in pieces]


def test_words_share_the_pieces_of_their_stems_and_endings() -> None:
    found = dict(zip(WORDS, rows(find_pieces(WORDS, ONES, 40, SPECIAL)), strict=True))
    shares_stem = [len({found[stem + each][0] for each in ("", "s", "ing")}) == 1 for stem in STEMS]
    assert sum(shares_stem) >= 8
    assert len({found[stem + "ing"][-1] for stem in STEMS}) == 1
    assert found["<eos>"] == found["<unk>"] == ()
    known = [row for row in found.values() if row]
    assert len(set(known)) == len(WORDS) - 2  # different words, different pieces


@pytest.mark.parametrize("num_pieces", [8, 20, 100_000])
@pytest.mark.parametrize(
    "words",
    [["a"], ["ab", "b"], [chr(0x4E00 + number) for number in range(3000)], ["x" * 6000, "\u2581y"]],
    ids=["a word", "two words", "more characters than pieces", "a long word"],
)
def test_every_vocabulary_has_pieces(words: list[str], num_pieces: int) -> None:
    pieces = find_pieces(words, np.arange(len(words)), num_pieces)
    assert pieces.dtype == np.int32
    assert len(pieces) == len(words)
    assert pieces.shape[1] <= MAX_PIECES
    assert pieces.max() < num_pieces
    assert all(rows(pieces))


def test_rare_characters_share_a_piece() -> None:
    words = ["aa", "ab", "ba", "bb", "ñ", "ø"]
    found = rows(find_pieces(words, np.array([9, 9, 9, 9, 1, 1]), 8))
    assert found[-1] == found[-2]
    assert len(set(found)) == len(words) - 1


def test_without_words_there_are_no_pieces() -> None:
    assert find_pieces(["<eos>", "<unk>"], np.array([5, 5]), 8, [0, 1]).tolist() == [[-1], [-1]]
