"""The words and pieces of a vocabulary built from a corpus, their ids, and pieces of the words."""

import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.compiled import compiled
from data_prep.errors import UserError
from data_prep.settings import TokenizerConfig
from data_prep.tokenizer import tokenizer
from data_prep.tokenizer.pieces import MAX_PIECES, find_pieces
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, line_batches
from data_prep.tokenizer.vocabulary import count_words, reservoir_sample, train_sentencepiece
from data_prep.tokenizer.word_index import WordIndex
from tests.data_prep.conftest import trained_pieces

TEXT = tuple(f"the cat {word} on the mat number {word}" for word in ("sat", "lay", "ran", "is"))
SIZES = [("unigram", 23), ("bpe", 30), ("char", 9), ("word", 9)]
STEMS = ("walk", "talk", "jump", "look", "call", "play", "turn", "open", "learn", "stay")
WORDS = ["<eos>", *(stem + end for stem in STEMS for end in ("", "s", "ed", "ing", "er")), "<unk>"]
ONES = np.ones(len(WORDS), np.int64)


def counted(lines: list[str], settings: TokenizerConfig) -> list[tuple[str, int]]:
    words, counts, *_ = count_words(lines, settings)
    return list(zip(words, counts.tolist(), strict=True))


def pieces(vocab_size: int | None, **options: Any) -> TokenizerConfig:
    return TokenizerConfig(kind="sentencepiece", vocab_size=vocab_size, **options)


def test_excluded_words_count_as_unknown_with_the_literal_ones() -> None:
    lines = ["a a a b b c d <unk> <eos>", "<unk>"]
    expected = [("<unk>", 4), ("<eos>", 3), ("a", 3), ("b", 2)]
    assert counted(lines, TokenizerConfig(min_count=2)) == expected
    assert counted(lines, TokenizerConfig(vocab_size=3)) == [("<unk>", 6), ("<eos>", 3), ("a", 3)]


@given(
    st.lists(st.text("ab<unk>é ", max_size=12), min_size=1, max_size=20),
    st.integers(1, 3),
    st.none() | st.integers(3, 8),
)
def test_counts_add_up_to_the_tokens_and_agree_with_a_plain_count(
    lines: list[str], min_count: int, vocab_size: int | None
) -> None:
    settings = TokenizerConfig(min_count=min_count, vocab_size=vocab_size)
    with patch.object(tokenizer, "LINES_PER_BATCH", 3):
        words, counts, others, num_literal = count_words(lines, settings)
    plain = Counter(word for line in lines for word in line.split())
    assert counts.sum() == plain.total() + len(lines)
    assert len(words) <= (vocab_size or len(plain) + 2)
    assert set(others) == plain.keys() - set(words)
    assert num_literal == plain["<unk>"]
    for word, count in zip(words, counts.tolist(), strict=True):
        if word not in {"<unk>", "<eos>"}:
            assert count == plain[word] >= min_count
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)


@pytest.mark.parametrize(("model_type", "vocab_size"), SIZES)
def test_equal_arguments_give_equal_model_bytes(model_type: str, vocab_size: int) -> None:
    settings = pieces(vocab_size, max_sentences=101, model_type=model_type)
    model = train_sentencepiece(TEXT * 60, settings, seed=5)
    assert train_sentencepiece(iter(TEXT * 60), settings, seed=5) == model
    assert SentencePieceTokenizer(model).vocab_size == settings.vocab_size


def test_a_sample_of_the_lines_depends_on_the_seed_alone() -> None:
    """Nor does it depend on the process, on which the library's own sampling depends."""
    program = (
        "import hashlib, sys\n"
        "from data_prep.settings import TokenizerConfig\n"
        "from data_prep.tokenizer.vocabulary import train_sentencepiece\n"
        "lines = [f'{i:b} {i:o} {i:x}' for i in range(3000)]\n"
        "options = TokenizerConfig(kind='sentencepiece', vocab_size=60, max_sentences=50)\n"
        "model = train_sentencepiece(lines, options, seed=int(sys.argv[1]))\n"
        "print(hashlib.sha256(model).hexdigest())\n"
    )
    command = [sys.executable, "-c", program]
    first, again, other = (subprocess.check_output([*command, seed]) for seed in "556")
    assert first == again != other


def test_every_line_is_equally_likely_to_be_sampled() -> None:
    drawn = [reservoir_sample(map(str, range(20)), 5, Random(seed)) for seed in range(2000)]
    assert {len(set(each)) for each in drawn} == {5}
    times = Counter(chain.from_iterable(drawn))
    assert len(times) == 20
    assert max(abs(count - 500) for count in times.values()) < 5 * 500**0.5
    assert reservoir_sample(["a", "b"], 5, Random(1)) == ["a", "b"]


def test_a_batch_of_lines_ends_where_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "LINES_PER_BATCH", 3)
    monkeypatch.setattr(tokenizer, "CHARACTERS_PER_BATCH", 5)
    lines = ["a", "b", "c", "d", "eeee", "ffffffff", "g"]
    assert list(line_batches(iter(lines))) == [lines[:3], lines[3:5], lines[5:6], lines[6:]]


def test_a_giant_line_is_learned_to_its_end() -> None:
    line = "the cat sat " * 5_000 + "Ω" * 9_000 + " mat"
    tokenizer = trained_pieces([line], 14, character_coverage=1.0)
    ids = tokenizer.encode(line)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == line


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_the_space_before_a_long_line_has_a_piece(model_type: str, byte_fallback: bool) -> None:
    settings = {"model_type": model_type, "byte_fallback": byte_fallback}
    text = ["".join(Random(seed).choices("一丁七万", k=4_000)) for seed in range(9)]
    tokenizer = trained_pieces(text, 7 + 256 * byte_fallback, **settings)
    for line in ("一丁", "七 万"):
        ids = tokenizer.encode(line)
        assert len(ids) == len(line) + 1
        assert tokenizer.unk_id not in ids
        assert tokenizer.decode(ids) == line


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (TEXT, pieces(None), r"^tokenizer\.vocab_size is not set"),
        (TEXT, pieces(5), r"^tokenizer\.vocab_size is 5: expected at least \d+, a piece for every"),
        (TEXT, pieces(1), "sentencepiece could not build a model of the training split: INTERNAL"),
        (TEXT, pieces(300, model_type="word", byte_fallback=True), "requires another .*model_type"),
        (TEXT, pieces(9999), r"size is 9999: expected at most \d+, all that the training"),
        (["", ""], pieces(20), "has no text that a sentencepiece model could be built"),
    ],
)
def test_impossible_models_of_pieces_are_refused(lines: Any, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_sentencepiece(lines, settings)


def test_the_number_of_characters_is_a_maximum() -> None:
    assert trained_pieces(TEXT, 9999, model_type="char").vocab_size == len(set("".join(TEXT))) + 2


def test_a_mistake_in_the_corpus_reaches_the_user_through_sentencepiece() -> None:
    def broken() -> Iterator[str]:
        yield "the cat"
        raise UserError("corpus.txt, line 2: a NUL character")

    with pytest.raises(UserError, match=r"^corpus\.txt, line 2: a NUL character$"):
        train_sentencepiece(broken(), pieces(20))


def test_a_vocabulary_file_has_a_word_and_a_count_on_each_line() -> None:
    words = WordIndex.parse("<eos>\t5\né\u2028\t12\n<unk>\t0\n".encode())
    assert list(words) == ["<eos>", "é\u2028", "<unk>"]
    for wrong in (b"", b"a\t1\nb", b"a\t1\nb 2\n", b"a\t1\n\t2\n", b"a\t1\t1\nb\n", b"a\n\t1"):
        with pytest.raises(ValueError, match="expected lines word TAB count"):
            WordIndex.parse(wrong)
    with pytest.raises(ValueError, match="invalid continuation byte"):
        WordIndex.parse(b"aga\xe9n\t1\n")


def test_loops_without_a_file_for_which_there_is_a_cache_are_compiled() -> None:
    loops = compiled(eval("lambda x: x + 1"))
    assert (loops(2), loops.stats.cache_path) == (3, None)


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_files_of_the_cache_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Cut, empty or of zeros, as after a crash; and then the cache serves again."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    config: Any = numba.config
    config.reload_config()  # which numba does when it compiles, after it chose the folder
    path = tmp_path / f"loops_{ending}.py"
    path.write_text("def add(x):\n    return x + 1\n")
    add = runpy.run_path(str(path), run_name=path.stem)["add"]
    for content in (None, b"", b"half", bytes(5000)):
        for kept in (False, True):
            if content is not None and not kept:
                (file,) = tmp_path.rglob(f"*.{ending}")
                file.write_bytes(content)
            loops: Any = compiled(add)
            assert loops(2) == 3
            assert (content, sum(loops.stats.cache_hits.values())) == (content, kept)


def rows(pieces: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row[row >= 0].tolist()) for row in pieces]


def test_words_share_the_pieces_of_their_stems_and_endings() -> None:
    found = dict(zip(WORDS, rows(find_pieces(WORDS, ONES, 40, (0, 51))), strict=True))
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


def test_pieces_are_found_in_some_words_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    some = find_pieces(WORDS[1:51:2], ONES, 80)
    monkeypatch.setattr("data_prep.tokenizer.pieces.MAX_WORDS", 25)
    monkeypatch.setattr("data_prep.tokenizer.pieces.WORDS_PER_CHUNK", 7)
    every = find_pieces(WORDS, ONES, 80, (0, 51))
    assert rows(every[1:51:2]) == rows(some)


def test_rare_characters_share_a_piece() -> None:
    words = ["aa", "ab", "ba", "bb", "ñ", "ø"]
    found = rows(find_pieces(words, np.array([9, 9, 9, 9, 1, 1]), 8))
    assert found[-1] == found[-2]
    assert len(set(found)) == len(words) - 1


def test_without_words_there_are_no_pieces() -> None:
    assert find_pieces(["<eos>", "<unk>"], np.array([5, 5]), 8, [0, 1]).tolist() == [[-1], [-1]]
