"""Class files of other tools: every format, and the errors in them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.classes.class_file import read_vectors
from data_prep.classes.word_classes import WordClass, build_class_levels
from data_prep.settings import ClassesConfig

WORDS = ["<unk>", "a", "b", "c", "<eos>"]


def build(settings: ClassesConfig, folder: Path, words: Sequence[str] = WORDS) -> WordClass:
    """The classes on each level of words that occur once."""
    counts, tokens = np.ones(len(words), np.int64), np.arange(len(words), dtype=np.uint16)
    text: dict[str, Any] = {"tokens": tokens, "words": lambda: words, "folder": folder}
    return build_class_levels(counts, settings, progress=False, **text)


@pytest.mark.parametrize(
    ("file_format", "text"),
    [
        ("mkcls", "b\t7\nz\t9\nc\t3\na\t7\n"),
        ("mkcls", "b\t7\r\n\r\nc\t3\r\na\t7\r\nb\t7"),
        ("mkcls", "\ufeffb\t7\nc\t3\na\t7\n"),
        ("brown", "0110\tb\t12\n00\tc\t4\n0110\ta\t1\n"),
        ("srilm", "X 0.5 b\nY 1 c\nX 0.5 a\n"),
        ("srilm", "X b\nY c\nX a\n"),
        ("mkcls", "b\tX\nc\tY\na\tX\n<unk>\tZ\n<eos>\tZ\n"),
    ],
)
def test_class_files_are_read_and_special_words_get_a_separate_class_if_they_lack_one(
    tmp_path: Path, file_format: Any, text: str
) -> None:
    (tmp_path / "map").write_bytes(text.encode())
    settings = ClassesConfig(method="file", file="map", file_format=file_format)
    (word_class,) = build(settings, tmp_path)
    assert word_class.tolist() == [2, 0, 0, 1, 2]
    assert word_class.dtype == np.int32


@pytest.mark.parametrize(
    ("file_format", "text"),
    [
        ("brown", "10\tb\t12\n0\tc\t4\n110\ta\t1\n"),
        ("taxonomy", "b\tanimal/pet\nc\tfood\na\tanimal/farm/cow\nz\tx/y\n"),
    ],
)
def test_files_of_paths_have_a_class_on_each_level(
    tmp_path: Path, file_format: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "map").write_text(text)
    settings = ClassesConfig(method="file", file="map", file_format=file_format, depth=9)
    levels = [[2, 0, 0, 1, 2], [-1, 1, 0, -1, -1], [-1, 0, -1, -1, -1]]
    assert build(settings, tmp_path).tolist() == levels
    assert not caplog.text
    assert build(replace(settings, depth=3), tmp_path).tolist() == levels[:2]
    assert "2 of 3 levels of classes are used (classes.depth)" in caplog.text


def test_given_vectors_are_clustered_by_their_directions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["<unk>", "a b", "c", "d", "e", "<eos>"]
    lines = ["4 2", "a b\t3 0.1", "d\t-1e3 9", "c\t0.5 0", "z\t1 1", ""]
    (tmp_path / "vectors").write_text("\n".join(lines))
    vectors = read_vectors(tmp_path / "vectors", words)
    expected = [[0, 0], [3, 0.1], [0.5, 0], [-1000, 9], [0, 0], [0, 0]]
    assert vectors.tolist() == np.array(expected, np.float32).tolist()
    assert "1 of 6 words have no vector, the first is 'e'" in caplog.text
    settings = ClassesConfig(method="embedding", vectors="vectors", num_word_classes=3)
    (found,) = build(settings, tmp_path, words)
    assert found[1] == found[2] != found[3]
    assert np.bincount(found).tolist() == [2, 2, 2]
    (tmp_path / "vectors").write_text("c 0.5 0\nd -1000 9\n")  # spaces
    assert read_vectors(tmp_path / "vectors", words)[2:4].tolist() == vectors[2:4].tolist()
    (tmp_path / "vectors").write_text("".join(f"{word}\t1 0\n" for word in words))
    assert np.bincount(build(settings, tmp_path, words)[0]).tolist() == [2, 2, 2]
