"""A text is cut into splits that together have every line of it, once."""

import gzip
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from data_prep.corpus import split as split_module
from data_prep.corpus.lines import TextFile
from data_prep.corpus.split import Sample, read_sample, split_text, write_splits

BOTH = ["valid", "test"]


Cut = tuple[dict[str, tuple[int, int]], dict[str, list[str]]]


def cut(folder: Path, text: str, unit: Any, splits: list[str]) -> Cut:
    """Sizes and lines of the splits, of which each held-out one has every 20th unit."""
    path, new = folder / "text.txt", folder / "new"
    path.write_bytes(text.encode())
    new.mkdir()
    sizes = write_splits(TextFile(path), new, unit, 20, splits)
    return sizes, {path.stem: path.read_text().splitlines() for path in new.iterdir()}


def test_lines_are_held_out_at_even_distances(tmp_path: Path) -> None:
    text = [f"line {number}" for number in range(61)]
    sizes, splits = cut(tmp_path, "\r\n".join(text), "lines", BOTH)
    assert sizes == {"train": (55, 431), "valid": (3, 23), "test": (3, 24)}
    assert splits["valid"] == ["line 9", "line 29", "line 49"]
    assert splits["test"] == ["line 19", "line 39", "line 59"]
    assert splits["train"] == [
        line for line in text if line not in splits["valid"] + splits["test"]
    ]


def test_documents_are_never_divided(tmp_path: Path) -> None:
    documents = [[f"{number}: {line}" for line in "abc"[: 1 + number % 3]] for number in range(40)]
    text = "\n\n\n".join("\n".join(document) for document in documents)
    sizes, found = cut(tmp_path, text, "documents", ["test"])
    assert {split: num_units for split, (num_units, _) in sizes.items()} == {"train": 38, "test": 2}
    splits = {name: list(filter(None, lines)) for name, lines in found.items()}
    assert splits["test"] == documents[19] + documents[39]
    assert splits["train"] == list(chain(*documents[:19], *documents[20:39]))


def split(folder: Path, documents: list[list[str]]) -> tuple[str, dict[str, int]]:
    """Split a text of documents as `split_text` chooses; return what was cut and the units."""
    path = folder / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n")
    (folder / "new").mkdir(exist_ok=True)
    unit, sizes = split_text(TextFile(path), folder / "new", read_sample(TextFile(path)), BOTH)
    return unit, {name: num_units for name, (num_units, _) in sizes.items()}


def test_documents_stay_whole_if_the_splits_have_useful_sizes(tmp_path: Path) -> None:
    page = ["a line of eight words, that is this"] * 300
    assert split(tmp_path, [page] * 20) == ("documents", {"train": 18, "valid": 1, "test": 1})
    assert split(tmp_path, [page] * 19)[0] == "lines"
    cut = {"train": 4500, "valid": 250, "test": 250}
    assert split(tmp_path, [page[:250]] * 20) == ("lines", cut)
    short = [["one line"]] * 30
    for long in (0, 9):  # in the training and in the validation split
        documents = [*short[:long], page * 100, *short[long:]]
        assert split(tmp_path, documents)[0] == "lines"


def test_large_texts_are_sampled_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "SAMPLE_BYTES", 1600)
    text = [f"line {number:06}" for number in range(10_000)]
    (tmp_path / "text.txt").write_text("\n".join(text) + "\n")
    sample = read_sample(TextFile(tmp_path / "text.txt"))
    assert set(sample.lines) <= set(text)
    assert int(sample.lines[0].split()[1]) < 20
    assert int(sample.lines[-1].split()[1]) > 9980
    assert 0.008 < sample.share < 1600 / 120_000
    assert sample.num_bytes == 120_000


def test_the_size_of_a_large_compressed_text_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "SAMPLE_BYTES", 1600)
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"the same line\n" * 10_000))
    assert path.stat().st_size < 1600
    sample = read_sample(TextFile(path))
    assert (sample.num_bytes, len(sample.lines)) == (140_000, 115)
    assert sample.share == 115 / 10_000


def test_large_texts_hold_out_a_size_not_a_share() -> None:
    assert Sample(["a"], 1.0, 1_000_000).period == 20
    assert Sample(["a"], 0.02, 200_000_000).period == 200
