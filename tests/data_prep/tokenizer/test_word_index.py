"""Ids of words are their positions; compiled loops are cached where possible."""

import runpy
from pathlib import Path
from typing import Any

import numba
import pytest

from data_prep.compiled import compiled
from data_prep.tokenizer.word_index import WordIndex


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
    with pytest.raises(ValueError, match="invalid continuation byte"):
        WordIndex.parse(b"aga\xe9n\t1\n")


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
