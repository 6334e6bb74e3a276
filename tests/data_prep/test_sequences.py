"""Independent sequences: what is read and what is predicted, from lines to a prepared folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prepare import prepare
from data_prep.prepared import Prepared
from data_prep.sequences import find_sequences
from data_prep.settings import ClassesConfig, DataConfig, SplitFiles, TokenizerConfig
from tests.data_prep.conftest import Corpus, write_table

EOS, UNK = 0, 1
ITEMS: dict[str, Any] = {"format": "csv", "sequences": "independent", "user_field": "user"}
ITEMS |= {"time_field": None}


@pytest.mark.parametrize("predict_eos", [False, True])
def test_unknown_items_are_left_out_and_counted_where_they_are_predicted(predict_eos: bool) -> None:
    rng = np.random.default_rng(5)
    lines = [rng.integers(1, 5, size=rng.integers(7)) for _ in range(50)]
    num_known = np.array([rng.integers(len(line) + 1) for line in lines])
    tokens = np.concatenate([np.append(line, EOS) for line in lines]).astype(np.uint16)
    options: Any = {"num_known": num_known, "predict_eos": predict_eos}
    found = find_sequences(tokens, eos_id=EOS, unk_id=UNK, **options)
    for i, (line, known, read) in enumerate(zip(lines, num_known, found.lines(), strict=True)):
        assert read.tolist() == [*line[line != UNK].tolist(), *[EOS] * predict_eos]
        assert found.num_known[i] == (line[:known] != UNK).sum()
        assert found.num_left_out[i] == (line[known:] == UNK).sum()
        assert found.num_predicted[i] == (line[known:] != UNK).sum() + predict_eos
    pairs = zip(found.lines(), found.num_known, strict=True)
    repeated = [[x in line[:at] for at, x in enumerate(line) if at >= n] for line, n in pairs]
    shares = [np.mean(each) for each in repeated if each]
    assert found.repeated_share == pytest.approx(np.mean(shares))


def prepared(folder: Path, **lines: str) -> Prepared:
    for split, text in lines.items():
        (folder / f"{split}.txt").write_text(text)
    files = SplitFiles(**{split: f"{split}.txt" for split in lines})
    data = DataConfig(dir=str(folder), files=files, sequences="independent")
    return prepare(data, TokenizerConfig(lowercase=True), None, folder / "data", progress=False)


def test_a_tab_separates_the_items_that_are_known(tmp_path: Path) -> None:
    found = prepared(tmp_path, train="a b c\nb b\n", valid="a new b\tc\nc a\n\tb new\n")
    tokenizer = found.tokenizer()
    valid = found.sequences("valid")
    assert [" ".join(map(tokenizer.token, line)) for line in valid.lines()] == ["a b c", "c a", "b"]
    assert valid.num_known.tolist() == [2, 0, 0]
    assert valid.num_left_out.tolist() == [0, 0, 1]
    assert found.sequences("train").num_known.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("valid", "num_again"),
    [("a b c\nb b\n", 2), ("a b\tc\nb\tb\nb b c\n", 2), ("a b\tc\nb c\n", 0), ("c a b\n", 0)],
)
def test_sequences_that_predict_those_of_training_again_are_counted(
    valid: str, num_again: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(tmp_path, train="a b\nb b\nc\n", valid=valid)
    num_lines = len(valid.splitlines())
    problem = f"valid: {num_again} of {num_lines} sequences begin with one of training, whose items"
    assert (problem in caplog.text) == bool(num_again) == ("predicted again" in caplog.text)


def test_a_damaged_record_of_known_items_is_made_again(tmp_path: Path) -> None:
    texts = {"train": "a b c\n", "valid": "a\tb c\n"}
    path = prepared(tmp_path, **texts).folder / "valid-known.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    assert prepared(tmp_path, **texts).sequences("valid").num_known.tolist() == [1]
    assert path.read_bytes() == content


def test_events_of_new_validation_files_are_known_in_test(corpus: Corpus) -> None:
    files = SplitFiles(train="train.csv", valid="valid.csv", test="test.csv")
    corpus.data, corpus.classes = replace(corpus.data, files=files, **ITEMS), None
    for num_valid in (3, 4):
        for split, items in {"train": "ab", "valid": "abab"[:num_valid], "test": "ababa"}.items():
            rows = [{"user": "u", "item": item} for item in items]
            write_table(corpus.folder / f"{split}.csv", rows)
        assert corpus.prepare().sequences("test").num_known.tolist() == [num_valid]


@pytest.mark.parametrize(
    "classes",
    [
        ClassesConfig(method="file", file="map"),
        ClassesConfig(method="embedding", vectors="map", num_word_classes=2),
    ],
    ids=["file", "vectors"],
)
def test_classes_of_items_come_from_files_of_items_as_their_table_has_them(
    corpus: Corpus, classes: ClassesConfig, caplog: pytest.LogCaptureFixture
) -> None:
    items = ["Heat (1995)", "5 % off", "c", "d"]
    write_table(corpus.folder / "events.csv", [{"user": 1, "item": item} for item in items])
    corpus.data = replace(corpus.data, files=SplitFiles(train="events.csv"), **ITEMS)
    corpus.write("map", "Heat (1995)\t1\nd\t1\nc\t-1\n5 % off\t-1\n")
    corpus.classes = classes

    def class_of(item: str) -> int:
        prepared = corpus.prepare()
        return int(prepared.word_class()[prepared.tokenizer().encode(item)[0]])

    assert class_of("Heat%20(1995)") == class_of("d") != class_of("c")
    assert class_of("c") == class_of("5%20%25%20off")
    assert "speller.npz" not in corpus.written()
    assert corpus.rewritten() == set()
    corpus.write("map", "Heat (1995)\t1\nd\t-1\nc\t-1\n5 % off\t1\n")
    assert corpus.rewritten() == {"classes.npy"}
    assert "classes: map changed" in caplog.messages
    assert class_of("Heat%20(1995)") != class_of("d")
