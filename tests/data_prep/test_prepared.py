"""The door between preparation and models: what is damaged or does not belong together stays
outside.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.prepare import prepare
from data_prep.prepared import (
    Prepared,
    copy_tokenizer,
    load_tokenizer,
    open_prepared,
    parse_vocabulary,
    save_tokenizer,
    token_dtype,
)
from data_prep.settings import ClassesConfig, DataConfig, SplitFiles, TokenizerConfig
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import train_sentencepiece

LINES = "the cat sat\nthe dog\n\nthe cat ran\n"


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    (tmp_path / "train.txt").write_text(LINES)
    (tmp_path / "valid.txt").write_text("the zebra\n")
    return prepare(
        DataConfig(dir=str(tmp_path), files=SplitFiles(train="train.txt", valid="valid.txt")),
        TokenizerConfig(),
        ClassesConfig(method="frequency", num_word_classes=2),
        tmp_path / "prepared",
        progress=False,
    )


def replaced(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_a_prepared_folder_opens_with_what_was_put_in(prepared: Prepared) -> None:
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
    assert opened.num_word_classes == 2
    assert {name: info.oov for name, info in opened.splits.items()} == {"train": 0, "valid": 1}


def test_a_split_that_is_not_there_is_refused_with_its_key(prepared: Prepared) -> None:
    message = r"has no test split: give its files as data\.files\.test \(prepared: train, valid\)$"
    with pytest.raises(UserError, match=message):
        prepared.tokens("test")


@pytest.mark.parametrize("name", ["train.npy", "counts.npy", "classes.npy"])
def test_damaged_arrays_are_refused_by_name(prepared: Prepared, name: str) -> None:
    readers: dict[str, Callable[[Prepared], object]] = {
        "train.npy": lambda opened: opened.tokens("train"),
        "counts.npy": Prepared.counts,
        "classes.npy": Prepared.word_class,
    }
    path = prepared.folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{name} is damaged: {len(content) - 1} bytes, expected"):
        readers[name](open_prepared(prepared.folder))
    path.write_bytes(content[:-1] + b"\x01")
    with pytest.raises(UserError, match=rf"{name} is damaged: its SHA-256 is not the recorded one"):
        readers[name](open_prepared(prepared.folder))
    readers[name](open_prepared(prepared.folder, verify=False))
    path.unlink()
    with pytest.raises(UserError, match=rf"{name} cannot be read: No such file or directory$"):
        readers[name](open_prepared(prepared.folder))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format_version": 1', b'"format_version": 7', "has format version 7: expected 1$"),
        (b'"oov": 1', b'"oov": -1', r"is damaged: splits\.valid\.oov: Input should be greater"),
        (b'"complete": true', b'"complete": false', "is half prepared: run `lm prepare` again"),
        (b'"valid": {', b'"../../x": {', r"is damaged: splits\.\.\./\.\./x\.\[key\]: Input shou"),
        (b"{", b"[", r"meta\.json is damaged: Invalid JSON: "),
        (b'"train": {', b'"test": {', r"is damaged: it calls itself complete, but a stage is mis"),
    ],
)
def test_a_damaged_record_is_refused(
    prepared: Prepared, old: bytes, new: bytes, message: str
) -> None:
    replaced(prepared.folder / "meta.json", old, new)
    with pytest.raises(UserError, match=message):
        open_prepared(prepared.folder)


def test_a_folder_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no prepared folder: it has no meta\.json"):
        open_prepared(tmp_path / "nothing")


def test_another_tokenizer_is_refused(prepared: Prepared) -> None:
    save_tokenizer(
        prepared.folder, WordTokenizer(["<eos>", "<unk>"]), np.array([1, 1], dtype=np.int64)
    )
    with pytest.raises(UserError, match="is not the tokenizer that the token files were written"):
        open_prepared(prepared.folder).tokenizer()


def test_a_run_keeps_a_tokenizer_that_stands_alone(prepared: Prepared, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    copy_tokenizer(prepared, run)
    assert sorted(path.name for path in run.iterdir()) == ["tokenizer.json", "vocab.txt"]
    loaded = load_tokenizer(run)
    assert (
        loaded.encode("the zebra sat") == prepared.tokenizer().encode("the zebra sat") == [1, 6, 5]
    )
    replaced(run / "vocab.txt", b"dog", b"god")
    with pytest.raises(UserError, match=r"vocab\.txt is damaged: its SHA-256 differs"):
        load_tokenizer(run)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(tmp_path)


def test_settings_of_words_are_kept_with_the_vocabulary(tmp_path: Path) -> None:
    words = WordTokenizer(["<eos>", "<unk>", "a", "."], lowercase=True, split_punctuation=True)
    save_tokenizer(tmp_path, words, np.array([2, 0, 1, 1], dtype=np.int64))
    assert (tmp_path / "vocab.txt").read_text() == "<eos>\t2\n<unk>\t0\na\t1\n.\t1\n"
    assert load_tokenizer(tmp_path).encode("A.") == [2, 3]


def test_a_sentencepiece_model_is_kept_byte_by_byte(tmp_path: Path) -> None:
    settings = TokenizerConfig(kind="sentencepiece", vocab_size=15)
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES.split("\n"), settings))
    info = save_tokenizer(tmp_path, tokenizer)
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model
    assert (info.vocab_size, info.unk_id, info.eos_id) == (15, 0, 1)
    assert load_tokenizer(tmp_path).encode("the cat") == tokenizer.encode("the cat")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "words"}))
    with pytest.raises(UserError, match=r"vocab\.txt cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<eos>\t3\na\t2\na\t1\n", "line 3: 'a' is on line 2 too$"),
        (b"<eos>\t3\na 2\n", "line 2: expected word TAB count, got 'a 2'$"),
        (b"<eos>\t3\na\t-2\n", r"line 2: expected word TAB count, got 'a\\t-2'$"),
        (b"<eos>\t3\n\n<unk>\t1\n", "line 2: expected word TAB count, got ''$"),
        (b"<eos>\t3\n\xff\t1\n", "line 2: invalid UTF-8$"),
        (b"<eos>\t3\na\t1\n", "the word <unk> is missing$"),
        (b"<unk>\t3\na\t1\n", "the word <eos> is missing$"),
        (b"", "line 1: expected word TAB count, got ''$"),
    ],
)
def test_a_bad_vocabulary_is_refused_with_its_line(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=rf"^vocab\.txt(, |: ){message}"):
        parse_vocabulary(content, Path("vocab.txt"))


def test_a_vocabulary_reads_as_words_and_counts() -> None:
    words, counts = parse_vocabulary("<eos>\t3\né\u2028\t2\n<unk>\t0".encode(), Path("vocab.txt"))
    assert list(words) == ["<eos>", "é\u2028", "<unk>"]
    assert counts.tolist() == [3, 2, 0]


def test_token_types_hold_every_id() -> None:
    for vocab_size in (1, 65_536, 65_537, 10_000_000):
        assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1
