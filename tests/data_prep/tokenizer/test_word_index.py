"""Word ids and counts equal those of `str.split` and a dictionary."""

import runpy
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.compiled import compiled
from data_prep.tokenizer import hash_table, word_index
from data_prep.tokenizer.hash_table import WordCounter
from data_prep.tokenizer.word_index import WordIndex


@pytest.fixture(params=["dict", "hash table"])
def _lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look words up in a dict, as for a small vocabulary, or in a compiled hash table."""
    if request.param == "hash table":
        monkeypatch.setattr(word_index, "MAX_DICT_BYTES", -1)


def counted(texts: list[str]) -> dict[str, int]:
    counter = WordCounter()
    for text in texts:
        counter.add(text)
    raw, starts, counts = counter.result()
    words = [raw[begin:end].tobytes() for begin, end in pairwise(starts)]
    decoded = [word.decode("utf-8", "surrogatepass") for word in words]
    return dict(zip(decoded, counts.tolist(), strict=True))


@pytest.mark.usefixtures("_lookup")
def test_whitespace_is_that_of_split() -> None:
    index = WordIndex.of(["a"])
    for point in range(sys.maxunicode + 1):
        text = f"a{chr(point)}a"
        if len(text.split()) == 2:
            assert index.ids(text, 7).tolist() == [0, 0], hex(point)
    others = "".join(map(chr, range(sys.maxunicode + 1)))
    expected = [0 if word == "a" else 7 for word in others.split()]
    assert index.ids(others, 7).tolist() == expected


@given(st.lists(st.text("abé\u2003\u00a0漢😀 \n\x1c\ud800"), max_size=6))
def test_counts_are_those_of_a_dictionary(texts: list[str]) -> None:
    expected = Counter(word for text in texts for word in text.split())
    assert list(counted(texts).items()) == list(expected.items())  # in order of first occurrence


def test_the_hash_table_of_a_counter_grows_with_the_words() -> None:
    words = [f"w{i * i % 7919}" for i in range(30_000)]
    assert counted([" ".join(words[:20_000]), *words[20_000:]]) == Counter(words)
    distinct = [str(i) for i in range(hash_table.MIN_SLOTS // 2)]  # exactly half full
    assert counted([" ".join(distinct), "0"]) == {**dict.fromkeys(distinct, 1), "0": 2}


@pytest.mark.usefixtures("_lookup")
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


def test_a_vocabulary_file_has_a_word_and_a_count_on_each_line() -> None:
    words = WordIndex.parse("<eos>\t5\né\u2028\t12\n<unk>\t0\n".encode())
    assert list(words) == ["<eos>", "é\u2028", "<unk>"]
    for wrong in (b"", b"a\t1\nb", b"a\t1\nb 2\n", b"a\t1\n\t2\n", b"a\t1\t1\nb\n", b"a\n\t1"):
        with pytest.raises(ValueError, match="expected lines word TAB count"):
            WordIndex.parse(wrong)


def test_loops_are_compiled_if_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(*function: Any, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*function)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled(lambda x: x + 1)(2) == 3


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
