"""Words by id and back, as `str.split` separates them and as a dictionary would count them."""

import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.compiled import compiled
from data_prep.tokenizer import word_index as word_table
from data_prep.tokenizer.word_index import (
    RepeatedWord,
    WordCounter,
    WordTable,
    num_words,
    parse_counts,
)


def counted(texts: list[str]) -> dict[str, int]:
    counter = WordCounter()
    for text in texts:
        counter.add(text)
    raw, starts, counts = counter.result()
    return dict(zip(WordTable(raw, starts), counts.tolist(), strict=True))


def test_whitespace_is_what_split_takes_for_it() -> None:
    table = WordTable.of(["a"])
    for point in range(sys.maxunicode + 1):
        text = f"a{chr(point)}a"
        if len(text.split()) == 2:
            assert table.ids(text, 7).tolist() == [0, 0], hex(point)
    others = "".join(map(chr, range(sys.maxunicode + 1)))
    expected = [0 if word == "a" else 7 for word in others.split()]
    assert table.ids(others, 7).tolist() == expected
    assert num_words(others) == len(expected)


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.text("abé\u2003\u00a0漢😀 \n\x1c\ud800"), max_size=6))
def test_counts_are_those_of_a_dictionary(texts: list[str]) -> None:
    found = WordCounter()
    for text in texts:
        found.add(text)
    expected = Counter(word for text in texts for word in text.split())
    raw, starts, counts = found.result()
    words = [
        raw[begin:end].tobytes().decode("utf-8", "surrogatepass") for begin, end in pairwise(starts)
    ]
    assert dict(zip(words, counts.tolist(), strict=True)) == expected
    assert words == list(dict.fromkeys(word for text in texts for word in text.split()))


def test_the_table_of_a_counter_grows_with_the_words() -> None:
    words = [f"w{i * i % 7919}" for i in range(30_000)]
    assert counted([" ".join(words[:20_000]), *words[20_000:]]) == Counter(words)
    distinct = [str(i) for i in range(word_table.SMALLEST_TABLE // 2)]  # exactly half full
    assert counted([" ".join(distinct), "0"]) == {**dict.fromkeys(distinct, 1), "0": 2}


def test_ids_are_places_and_newlines_may_have_one() -> None:
    words = [f"{i:x}" for i in range(5_000)]
    table = WordTable.of(words)
    assert (len(table), list(table), table[4_999]) == (5_000, words, "1387")
    assert [table.id(word) for word in words] == list(range(5_000))
    assert (table.id("nothing"), table.id("")) == (-1, -1)
    text = " ".join(words[::-1])
    assert table.ids(text, 9).tolist() == list(range(5_000))[::-1]
    assert table.ids("1\n\n 2 zebra\n", 9).tolist() == [1, 2, 9]
    assert table.ids("1\n\n 2 zebra\n", 9, line_end=3).tolist() == [1, 3, 3, 2, 9, 3]
    assert table.ids("", 9, line_end=3).tolist() == []


def test_a_word_that_is_there_twice_is_refused_with_both_places() -> None:
    words = [str(i) for i in range(1_000)]
    words[700] = "31"
    with pytest.raises(RepeatedWord, match="the word '31' has the ids 31 and 700") as caught:
        WordTable.of(words)
    assert (caught.value.word, caught.value.id, caught.value.first_id) == ("31", 700, 31)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        (b"a\t1\nbc\t23", 2),
        (b"a\t1\nbc\t23\n", 2),
        (b"a\t1\n\nbc\t23\n", 1),
        (b"a\t1\nbc\t23\t\n", 1),
        (b"a\t1\nbc\t\n", 1),
        (b"a\t1\nbc", 1),
        (b"a\t1\n\t5\n", 1),
        (b"a\t1\nbc\t9999999999999999999\n", 1),
        (b"", 0),
    ],
)
def test_lines_of_words_and_counts_are_read_to_the_first_mistake(
    content: bytes, right: int
) -> None:
    text, starts, counts, found = parse_counts(content)
    assert found == right
    assert text.tobytes() == b"abc"[: (0, 1, 3)[right]]
    assert starts[: right + 1].tolist() == [0, 1, 3][: right + 1]
    assert counts[:right].tolist() == [1, 23][:right]
    assert counts.dtype == np.int64


def test_loops_are_compiled_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(*function: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*function)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda x: x + 1)(2) == 3
