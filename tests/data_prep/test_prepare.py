"""Preparation does only what is necessary, continues where it was interrupted, and opens intact."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from datasets import IterableDataset

from data_prep import prepare as prepare_module
from data_prep.classes import word_classes
from data_prep.errors import UserError
from data_prep.prepared import Prepared, open_made_by, open_prepared
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.tokenizer.serialization import load_tokenizer, save_tokenizer
from data_prep.tokenizer.tokenizer import WordTokenizer
from tests.conftest import flip_bit
from tests.data_prep.conftest import FILES, VOCABULARY, Corpus


def test_sentencepiece_is_prepared_the_same_way(corpus: Corpus) -> None:
    corpus.tokenizer = TokenizerConfig(kind="sentencepiece", vocab_size=15)
    prepared = corpus.prepare()
    assert corpus.text() == "the cat sat\nthe dog ran <unk>\n"
    assert (prepared.vocab_size, prepared.splits["train"].oov) == (15, 1)
    with pytest.raises(UserError, match=r"prepared has no speller\.npz: run `lm prepare`"):
        prepared.speller()
    assert corpus.rewritten() == set()


def test_the_same_corpus_is_up_to_date(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    corpus.prepare()
    assert corpus.rewritten() == set()
    assert caplog.messages[-1] == f"{corpus.prepared} is up to date"
    moved = corpus.folder / "moved"
    moved.mkdir()
    for name in ("train.txt", "valid.txt"):
        (corpus.folder / name).rename(moved / name)
    corpus.data = replace(corpus.data, dir=str(moved))
    assert corpus.rewritten() == set()


def test_the_same_data_of_another_folder_are_linked_and_verified(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    first = corpus.prepare()
    others = [corpus.folder, corpus.folder / "absent", first.folder]

    def second(name: str, classes: ClassesConfig | None = corpus.classes) -> Any:
        caplog.clear()
        folder = corpus.folder / name
        settings = corpus.data, corpus.tokenizer, classes
        prepare_module.prepare(*settings, folder, progress=False, others=others)
        own = open_prepared(folder)
        for split in ("train", "valid"):
            assert own.tokens(split).tolist() == first.tokens(split).tolist()
        return own.word_class().tolist()

    assert second("second") == first.word_class().tolist()
    assert not any("building" in message for message in caplog.messages)
    links = {(corpus.folder / each / "train.npy").stat().st_ino for each in ("prepared", "second")}
    assert len(links) == 1
    assert second("classes", ClassesConfig(method="uniform", num_word_classes=2)) != second("third")
    flip_bit(first.folder / "classes.npy")
    second("damaged")
    assert any("classes.npy is damaged" in message for message in caplog.messages)
    corpus.write("valid.txt", "a dog\n")
    first = corpus.prepare()
    second("third")
    assert "valid: valid.txt changed" in caplog.messages


def test_classes_are_made_when_they_are_needed_and_stay_when_they_are_not(corpus: Corpus) -> None:
    method, corpus.classes = corpus.classes, None
    settings = corpus.data, corpus.tokenizer
    prepared = corpus.prepare()
    assert set(corpus.written()) == FILES - {"classes.npy"} | {".lock", "meta.json"}
    assert prepared.meta.complete
    assert corpus.rewritten() == set()
    others = (lambda: prepared.shortlist, lambda: open_made_by(*settings, method, corpus.prepared))
    for read in (prepared.word_class, *others):
        with pytest.raises(UserError, match=r"prepared was prepared without word classes: run `lm"):
            read()
    opened = open_made_by(*settings, None, corpus.prepared)
    assert opened.tokens("train").tolist() == prepared.tokens("train").tolist()
    corpus.classes = method
    assert corpus.rewritten() == {"classes.npy"}
    classes = open_made_by(*settings, None, corpus.prepared).word_class().tolist()
    assert set(classes) == {0, 1, 2}
    corpus.classes, before = None, corpus.written()
    assert corpus.prepare(keep=True).word_class().tolist() == classes
    assert corpus.written() == before
    corpus.classes = method
    assert corpus.rewritten() == set()


def test_classes_that_are_not_needed_survive_a_change_of_another_split(corpus: Corpus) -> None:
    classes = corpus.prepare().word_class().tolist()
    method, corpus.classes = corpus.classes, None
    (corpus.prepared / "classes.npy").touch()
    corpus.write("valid.txt", "the\n")
    assert corpus.rewritten() == {"valid.npy"}
    assert corpus.prepare().word_class().tolist() == classes
    corpus.write("train.txt", "a text\n")
    corpus.prepare()
    assert not (corpus.prepared / "classes.npy").exists()
    corpus.classes = method
    assert corpus.rewritten() == {"classes.npy"}


def test_an_interrupted_class_stage_leaves_all_but_classes(corpus: Corpus) -> None:
    corpus.prepare_without(word_classes, "build_class_levels")
    method, corpus.classes = corpus.classes, None
    assert corpus.rewritten() == set()
    assert open_prepared(corpus.prepared).meta.classes is None
    corpus.classes = method
    assert corpus.rewritten() == {"classes.npy"}


def test_a_copy_without_hidden_files_is_still_a_prepared_folder(corpus: Corpus) -> None:
    corpus.prepare()
    (corpus.prepared / prepare_module.LOCK).unlink()
    assert corpus.rewritten() == {prepare_module.LOCK}


def test_a_dataset_on_the_hub_is_opened_only_to_be_prepared(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = IterableDataset.from_generator(lambda: iter([{"text": "the cat sat\n"}]))
    load = Mock(return_value={"train": lines, "validation": lines})
    builder = Mock(return_value=Mock(hash="first"))
    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    corpus.data = DataConfig(dir=str(corpus.folder), hub="some/corpus")
    assert list(corpus.prepare().splits) == ["train", "valid"]
    load.reset_mock()
    assert corpus.rewritten() == set()
    corpus.classes = ClassesConfig(method="uniform")
    assert corpus.rewritten() == {"classes.npy"}
    builder.side_effect = ConnectionError("no network")
    assert corpus.rewritten() == set()
    assert "ConnectionError: no network: it is taken as unchanged" in caplog.text
    load.assert_not_called()
    builder.side_effect, builder.return_value.hash = None, "second"
    corpus.prepare(keep=True)  # of a run that continues
    load.assert_not_called()
    assert corpus.rewritten() == FILES
    assert "train: some/corpus changed" in caplog.text
    assert corpus.rewritten() == set()
    corpus.data = replace(corpus.data, hub_config="large")
    assert corpus.rewritten() == FILES
    load.assert_called_with("some/corpus", "large", streaming=True)


@pytest.mark.parametrize(
    ("name", "redone"),
    [
        *(
            (name, {"train.npy", "counts.npy", "classes.npy"})
            for name in ("train.npy", "counts.npy")
        ),
        *((name, {name}) for name in ("valid.npy", "classes.npy", "speller.npz")),
        *((name, FILES) for name in ("vocab.txt", "tokenizer.json", "meta.json")),
    ],
)
def test_a_damaged_or_missing_file_is_remade(corpus: Corpus, name: str, redone: set[str]) -> None:
    prepared = corpus.prepare()
    tokens, classes = prepared.tokens("train").tolist(), prepared.word_class().tolist()
    path = corpus.prepared / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    assert corpus.rewritten() == redone
    path.unlink()
    assert corpus.rewritten() == redone
    path.unlink()
    again = corpus.prepare(keep=True)  # as for a run that continues
    assert again.tokens("train").tolist() == tokens
    assert again.word_class().tolist() == classes


def test_an_intact_tokenizer_of_another_text_is_made_again(corpus: Corpus) -> None:
    tokens = corpus.prepare().tokens("train").tolist()
    other = WordTokenizer(["<eos>", "<unk>", "the"])
    save_tokenizer(corpus.prepared, other, np.array([1, 1, 1], dtype=np.int64))
    assert corpus.rewritten() == FILES
    assert corpus.prepare().tokens("train").tolist() == tokens


@pytest.mark.parametrize("stage", ["save_tokenizer", "encode_split", "build_class_levels"])
def test_an_interrupted_preparation_continues_and_cannot_be_opened_before(
    corpus: Corpus, stage: str
) -> None:
    corpus.prepare()
    corpus.write("train.txt", "another text\n")
    module = word_classes if stage == "build_class_levels" else prepare_module
    corpus.prepare_without(module, stage)
    with pytest.raises(UserError, match="is half prepared"):
        open_prepared(corpus.prepared)
    done = {"save_tokenizer": set(), "encode_split": VOCABULARY}
    assert corpus.rewritten() == FILES - done.get(stage, FILES - {"classes.npy"})
    assert corpus.prepare().tokens("train").tolist() == [1, 2, 0]
    corpus.write("train.txt", "a text\n")
    corpus.prepare_without(module, stage)
    corpus.write("train.txt", "the last text\n")
    corpus.prepare(keep=True)  # of a folder that was not complete
    assert corpus.text() == "the last text\n"


def test_a_mistake_in_the_corpus_leaves_no_token_file(corpus: Corpus) -> None:
    corpus.write("valid.txt", "nul \0\n")
    with pytest.raises(UserError, match=r"valid\.txt, line 1: a NUL character$"):
        corpus.prepare()
    assert set(corpus.written()) == VOCABULARY | {".lock", "meta.json"}


def test_a_mistake_in_a_class_file_leaves_the_tokens_and_earlier_classes(corpus: Corpus) -> None:
    corpus.classes = ClassesConfig(method="file", file="classes.txt")
    mistake = r"classes\.txt: 4 of the vocabulary's 7 words .*; the tokens in .* remain valid$"
    corpus.write("classes.txt", "the\t1\n")
    with pytest.raises(UserError, match=mistake):
        corpus.prepare()
    assert set(corpus.written()) == FILES - {"classes.npy"} | {".lock", "meta.json"}
    corpus.write("classes.txt", "the\t1\ncat\t2\nsat\t3\ndog\t2\nran\t3\n")
    assert corpus.rewritten() == {"classes.npy"}
    before, classes = corpus.written(), corpus.prepare().word_class().tolist()
    corpus.write("classes.txt", "the\t1\n")
    with pytest.raises(UserError, match=mistake):
        corpus.prepare()
    assert corpus.written() == before
    assert open_prepared(corpus.prepared).word_class().tolist() == classes


def test_misleading_figures_are_warned_of(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"<s> the {word} sat </s>\n" for word in ("cat", "dog", "cow")]
    corpus.write("train.txt", "".join(lines * 9))
    corpus.write("valid.txt", "".join([*lines, "<s> a new line </s>\n"]))
    corpus.prepare()
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    starts = ("train: the lines begin with <s>, ", "train: the lines end with </s>, ", "valid: 75")
    for start, warning in zip(starts, sorted(warnings), strict=True):
        assert warning.startswith(start)


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
    assert [opened.tokenizer.token(id) for id in range(7)] == words
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
        ("tokenizer.json", lambda opened: opened.tokenizer),
    ],
)
def test_damaged_files_are_refused_by_name(prepared: Prepared, name: str, read: Any) -> None:
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
def test_a_bad_record_is_refused(prepared: Prepared, old: bytes, new: bytes, message: str) -> None:
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
    for tokenizer in (load_tokenizer(run), prepared.tokenizer):
        assert tokenizer.encode("the zebra sat") == [1, 6, 5]
    replaced(run / "vocab.txt", b"dog", b"god")
    with pytest.raises(UserError, match=r"vocab\.txt is damaged: its SHA-256 differs"):
        load_tokenizer(run)
