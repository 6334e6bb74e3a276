"""Word ids and counts equal those of `str.split` and a dictionary."""

import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.compiled import compiled
from data_prep.tokenizer import hash_table
from data_prep.tokenizer.word_dict import MAX_VOCABULARY_BYTES, WordDict
from data_prep.tokenizer.word_index import RepeatedWord, WordCounter, WordIndex, count_words_in


def counted(texts: list[str]) -> dict[str, int]:
    counter = WordCounter()
    for text in texts:
        counter.add(text)
    raw, starts, counts = counter.result()
    words = [raw[begin:end].tobytes() for begin, end in pairwise(starts)]
    decoded = [word.decode("utf-8", "surrogatepass") for word in words]
    return dict(zip(decoded, counts.tolist(), strict=True))


def test_whitespace_is_that_of_split() -> None:
    index = WordIndex.of(["a"])
    for point in range(sys.maxunicode + 1):
        text = f"a{chr(point)}a"
        if len(text.split()) == 2:
            assert index.ids(text, 7).tolist() == [0, 0], hex(point)
    others = "".join(map(chr, range(sys.maxunicode + 1)))
    expected = [0 if word == "a" else 7 for word in others.split()]
    assert index.ids(others, 7).tolist() == expected
    assert count_words_in(others) == len(expected)


@given(st.lists(st.text("abé\u2003\u00a0漢😀 \n\x1c\ud800"), max_size=6))
def test_counts_are_those_of_a_dictionary(texts: list[str]) -> None:
    expected = Counter(word for text in texts for word in text.split())
    assert list(counted(texts).items()) == list(expected.items())  # in order of first occurrence


def test_the_hash_table_of_a_counter_grows_with_the_words() -> None:
    words = [f"w{i * i % 7919}" for i in range(30_000)]
    assert counted([" ".join(words[:20_000]), *words[20_000:]]) == Counter(words)
    distinct = [str(i) for i in range(hash_table.MIN_SLOTS // 2)]  # exactly half full
    assert counted([" ".join(distinct), "0"]) == {**dict.fromkeys(distinct, 1), "0": 2}


def test_ids_are_positions_and_newlines_may_have_one() -> None:
    words = [f"{i:x}" for i in range(5_000)]
    index = WordIndex.of(words)
    assert (len(index), list(index), index[4_999]) == (5_000, words, "1387")
    assert [index.id(word) for word in words] == list(range(5_000))
    assert (index.id("nothing"), index.id("")) == (-1, -1)
    text = " ".join(words[::-1])
    assert index.ids(text, 9).tolist() == list(range(5_000))[::-1]
    assert index.ids("1\n\n 2 zebra\n", 9).tolist() == [1, 2, 9]
    assert index.ids("1\n\n 2 zebra\n", 9, line_end=3).tolist() == [1, 3, 3, 2, 9, 3]
    assert index.ids("", 9, line_end=3).tolist() == []


@given(st.text("ab \n\u2003\x1c\ud800"), st.sampled_from([-1, 3]))
def test_a_dictionary_finds_what_the_index_finds(text: str, line_end: int) -> None:
    words = ["a", "b", "ab", "<unk>", "<eos>"]
    small, index = WordDict(words), WordIndex.of(words)
    assert small.ids(text, 9, line_end).tolist() == index.ids(text, 9, line_end).tolist()
    assert (len(small), list(small), small[1], small.id("c")) == (5, words, "b", -1)


def test_a_vocabulary_that_is_large_or_wrong_is_not_read_as_a_dictionary() -> None:
    right = b"<eos>\t1\n<unk>\t2\nthe\t3\n"
    assert list(WordDict.parse(right) or ()) == ["<eos>", "<unk>", "the"]
    large = right + b"".join(b"%07d\t1\n" % i for i in range(MAX_VOCABULARY_BYTES // 10))
    for wrong in (b"", b"the\t3\n", right + b"the\t3\n", right + b"a\n", right + b"\t1\n"):
        assert WordDict.parse(wrong) is None
    for wrong in (right + b"\xff\t1\n", right + "a\t²\n".encode(), large):
        assert WordDict.parse(wrong) is None


def test_a_repeated_word_is_refused_with_both_ids() -> None:
    words = [str(i) for i in range(1_000)]
    words[700] = "31"
    with pytest.raises(RepeatedWord, match="the word '31' has the ids 31 and 700") as caught:
        WordIndex.of(words)
    assert (caught.value.word, caught.value.id, caught.value.first_id) == ("31", 700, 31)


def test_loops_are_compiled_if_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(*function: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*function)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda x: x + 1)(2) == 3
