"""A prepared folder opens with what was prepared; damaged or foreign files are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.prepared import Prepared, open_prepared
from data_prep.settings import ClassesConfig
from data_prep.tokenizer.serialization import load_tokenizer
from tests.data_prep.conftest import VOCABULARY, Corpus


@pytest.fixture
def prepared(corpus: Corpus) -> Prepared:
    corpus.write("train.txt", "the cat sat\nthe dog\n\nthe cat ran\n")
    corpus.classes = ClassesConfig(method="frequency", num_word_classes=2)
    return corpus.prepare()


def replaced(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_a_prepared_folder_opens_with_what_was_prepared(prepared: Prepared) -> None:
    opened = open_prepared(prepared.folder)
    words = ["<eos>", "the", "cat", "dog", "ran", "sat", "<unk>"]
    assert [opened.tokenizer().token(id) for id in range(7)] == words
    assert (opened.vocab_size, opened.eos_id, opened.unk_id) == (7, 0, 6)
    assert opened.tokens("train").tolist() == [1, 2, 5, 0, 1, 3, 0, 0, 1, 2, 4, 0]
    assert opened.tokens("valid").tolist() == [1, 6, 0]
    assert opened.counts().tolist() == [4, 3, 2, 1, 1, 1, 0]
    assert opened.counts().dtype == np.int64
    assert opened.word_class().dtype == np.int32
    assert sorted(set(opened.word_class().tolist())) == [0, 1]
    assert {name: info.oov for name, info in opened.splits.items()} == {"train": 0, "valid": 1}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("train.npy", lambda opened: opened.tokens("train")),
        ("counts.npy", Prepared.counts),
        ("classes.npy", Prepared.word_class),
        ("tokenizer.json", Prepared.tokenizer),
    ],
)
def test_damaged_files_are_refused_by_name(
    prepared: Prepared, name: str, read: Callable[[Prepared], object]
) -> None:
    path = prepared.folder / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=rf"{name} is (damaged: its SHA-256|not the tokenizer)"):
        read(open_prepared(prepared.folder))
    path.unlink()
    with pytest.raises(UserError, match=rf"{name} cannot be read: No such file or directory$"):
        read(open_prepared(prepared.folder))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format_version": 1', b'"format_version": 7', "has format version 7: expected 1$"),
        (b'"oov": 1', b'"oov": -1', r"is damaged: splits\.valid\.oov: Input should be greater"),
        (b'"complete": true', b'"complete": false', "is half prepared: run `lm prepare` again"),
        (b'"valid": {', b'"../../x": {', r"is damaged: splits\.\.\./\.\./x\.\[key\]: Input shou"),
        (b"{", b"[", r"meta\.json is damaged: Invalid JSON: "),
        (b'"classes": {', b'"other": {', r"is damaged: it is marked complete, but a stage is miss"),
        (b'"train": {', b'"test": {', r"is damaged: it is marked complete, but a stage is miss"),
        (b'"length": 7', b'"length": 6', r"is damaged: an array has not one value for each word"),
    ],
)
def test_a_damaged_record_is_refused(
    prepared: Prepared, old: bytes, new: bytes, message: str
) -> None:
    path = prepared.folder / "meta.json"
    checksum = f'"checksum": "{open_prepared(prepared.folder).meta.checksum}"'.encode()
    replaced(path, checksum, b'"checksum": ""')  # as in folders of earlier versions
    replaced(path, old, new)
    with pytest.raises(UserError, match=message):
        open_prepared(prepared.folder)


def test_a_copied_tokenizer_needs_no_other_file(prepared: Prepared, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    prepared.copy_to(run)
    assert {path.name for path in run.iterdir()} == VOCABULARY
    for tokenizer in (load_tokenizer(run), prepared.tokenizer()):
        assert tokenizer.encode("the zebra sat") == [1, 6, 5]
    replaced(run / "vocab.txt", b"dog", b"god")
    with pytest.raises(UserError, match=r"vocab\.txt is damaged: its SHA-256 differs"):
        load_tokenizer(run)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(tmp_path)
