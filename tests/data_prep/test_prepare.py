"""Preparation does only what is necessary and replaces nothing that it did not write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from datasets import IterableDataset

from data_prep import prepare as prepare_module
from data_prep import prepared as prepared_module
from data_prep import stages
from data_prep.classes import word_classes
from data_prep.errors import UserError
from data_prep.prepare import open_made_by
from data_prep.prepared import copy_tokenizer, open_prepared
from data_prep.settings import ClassesConfig, DataConfig, SplitFiles, TokenizerConfig

if TYPE_CHECKING:
    from tests.data_prep.conftest import Corpus

Contents = Callable[[Path], dict[str, str]]

FILES = {"train.npy", "valid.npy", "counts.npy", "classes.npy", "vocab.txt", "tokenizer.json"}


def test_a_corpus_becomes_tokens_counts_and_classes(corpus: Corpus) -> None:
    prepared = corpus.prepare()
    assert corpus.text() == "the cat sat\nthe dog ran <unk>\n"
    assert prepared.counts().sum() == len(prepared.tokens("train")) == 9
    assert {name: info.tokens for name, info in prepared.splits.items()} == {"train": 9, "valid": 3}
    assert prepared.num_word_classes == round(prepared.vocab_size**0.5) == 3


def test_sentencepiece_is_prepared_the_same_way(corpus: Corpus) -> None:
    corpus.tokenizer = TokenizerConfig(kind="sentencepiece", vocab_size=15)
    prepared = corpus.prepare()
    assert corpus.text() == "the cat sat\nthe dog ran <unk>\n"
    assert (prepared.vocab_size, prepared.splits["train"].oov) == (15, 1)
    assert corpus.rewritten() == set()


def test_the_same_again_writes_nothing(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    corpus.prepare()
    before = corpus.written()
    caplog.clear()
    corpus.prepare()
    assert corpus.written() == before
    assert caplog.messages == [f"{corpus.folder / 'prepared'} is up to date"]


def test_an_up_to_date_folder_is_checked_and_copied_without_loading_the_vocabulary(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.prepare()
    for module in (stages, prepared_module):
        monkeypatch.setattr(module, "load_tokenizer", None)
    copy_tokenizer(corpus.prepare(), corpus.folder)
    copied = (corpus.folder / "vocab.txt").read_bytes()
    assert copied == (corpus.prepared / "vocab.txt").read_bytes()
    corpus.classes = ClassesConfig(method="uniform")
    assert corpus.rewritten() == {"classes.npy"}


def test_a_corpus_that_moves_is_the_same_corpus(corpus: Corpus) -> None:
    corpus.prepare()
    moved = corpus.folder / "moved"
    moved.mkdir()
    for name in ("train.txt", "valid.txt"):
        (corpus.folder / name).rename(moved / name)
    corpus.data = replace(corpus.data, dir=str(moved))
    assert corpus.rewritten() == set()


def test_only_the_settings_that_made_a_folder_open_it(corpus: Corpus) -> None:
    folder = corpus.prepare().folder
    opened = open_made_by(corpus.data, corpus.tokenizer, corpus.classes, folder)
    assert opened.meta == open_prepared(folder).meta
    corpus.tokenizer = TokenizerConfig(lowercase=True)
    corpus.classes = ClassesConfig(method="frequency", num_word_classes=2)
    with pytest.raises(UserError) as refused:
        open_made_by(corpus.data, corpus.tokenizer, corpus.classes, folder)
    assert str(refused.value) == (
        f"{folder} was prepared with tokenizer.lowercase = False, not True;"
        " classes.num_word_classes = None, not 2: run `lm prepare` first"
    )


def test_classes_are_made_when_they_are_needed_and_stay_when_they_are_not(corpus: Corpus) -> None:
    method = corpus.classes
    corpus.classes = None
    prepared = corpus.prepare()
    assert set(corpus.written()) == FILES - {"classes.npy"} | {".lock", "meta.json"}
    assert prepared.meta.complete
    assert corpus.rewritten() == set()
    corpus.classes = method
    assert corpus.rewritten() == {"classes.npy"}
    assert corpus.prepare().num_word_classes == 3
    corpus.classes = None
    before = corpus.written()
    assert corpus.prepare(keep=True).num_word_classes == 3
    assert corpus.written() == before
    corpus.classes = method
    assert corpus.rewritten() == set()


def test_a_folder_without_classes_refuses_to_give_any(corpus: Corpus) -> None:
    method, corpus.classes = corpus.classes, None
    prepared = corpus.prepare()
    for read in (
        lambda: prepared.word_class().tolist(),
        lambda: prepared.num_word_classes,
        lambda: prepared.shortlist,
        lambda: open_made_by(corpus.data, corpus.tokenizer, method, corpus.prepared),
    ):
        with pytest.raises(UserError, match=r"prepared was prepared without word classes: run `lm"):
            read()
    opened = open_made_by(corpus.data, corpus.tokenizer, None, corpus.prepared)
    assert opened.tokens("train").tolist() == prepared.tokens("train").tolist()
    corpus.classes = method
    corpus.prepare(keep=True)
    opened = open_made_by(corpus.data, corpus.tokenizer, None, corpus.prepared)
    assert opened.num_word_classes == 3


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


def test_an_interrupted_class_stage_leaves_a_folder_that_is_complete_without_classes(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(word_classes, "build_word_classes", None)
        with pytest.raises(TypeError):
            corpus.prepare()
    method, corpus.classes = corpus.classes, None
    assert corpus.rewritten() == set()
    assert open_prepared(corpus.prepared).meta.classes is None
    corpus.classes = method
    assert corpus.rewritten() == {"classes.npy"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("vocab.txt", "mine\n"), ("meta.json", '{"version": 3}'), ("test.npy", "mine")],
)
def test_files_that_no_preparation_wrote_are_not_replaced(
    corpus: Corpus, contents: Contents, name: str, content: str
) -> None:
    folder = corpus.prepared
    folder.mkdir()
    corpus.write(f"prepared/{name}", content)
    before = contents(folder)
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            corpus.prepare()
        assert str(refused.value) == (
            f"{folder / name} is not from a preparation and would be replaced: choose another"
            " data.prepared_dir"
        )
        assert contents(folder) == before


def test_a_copy_without_hidden_files_is_still_a_prepared_folder(corpus: Corpus) -> None:
    corpus.prepare()
    (corpus.prepared / prepare_module.LOCK).unlink()
    assert corpus.rewritten() == {prepare_module.LOCK}


@pytest.mark.parametrize("pattern", ["prepared/corpus.txt", "**/*.txt"])
def test_a_corpus_in_the_prepared_folder_is_refused(corpus: Corpus, pattern: str) -> None:
    corpus.prepared.mkdir()
    corpus.write("prepared/corpus.txt", "the cat\n")
    corpus.data = replace(corpus.data, files=SplitFiles(train=pattern))
    message = r"prepared/corpus\.txt is in the prepared folder: the corpus must be elsewhere$"
    with pytest.raises(UserError, match=message):
        corpus.prepare()


def test_a_folder_that_cannot_be_made_is_refused(corpus: Corpus) -> None:
    corpus.write("prepared", "a file in the way")
    with pytest.raises(UserError, match=r"prepared is a file, not a folder$"):
        corpus.prepare()


def test_a_dataset_on_the_hub_is_opened_only_to_be_prepared(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = IterableDataset.from_generator(lambda: iter([{"text": "the cat sat\n"}]))
    load = Mock(return_value={"train": lines, "validation": lines})
    monkeypatch.setattr("data_prep.corpus.loader.load_hub", load)
    corpus.data = DataConfig(dir=str(corpus.folder), hub="some/corpus")
    assert list(corpus.prepare().splits) == ["train", "valid"]
    load.reset_mock()
    assert corpus.rewritten() == set()
    corpus.classes = ClassesConfig(method="uniform")
    assert corpus.rewritten() == {"classes.npy"}
    load.assert_not_called()
    corpus.data = replace(corpus.data, hub_config="large")
    assert corpus.rewritten() == FILES
    load.assert_called_with(corpus.data)
