"""Stages: interrupted or damaged ones are done again, and nothing incomplete is used."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest

from data_prep import stages
from data_prep.classes import word_classes
from data_prep.errors import UserError
from data_prep.prepared import open_prepared
from data_prep.tokenizer.files import save_tokenizer
from data_prep.tokenizer.tokenizer import WordTokenizer

if TYPE_CHECKING:
    from tests.data_prep.conftest import Corpus

FILES = {"train.npy", "valid.npy", "counts.npy", "classes.npy", "vocab.txt", "tokenizer.json"}


@pytest.mark.parametrize(
    ("name", "redone"),
    [
        ("train.npy", {"train.npy", "counts.npy", "classes.npy"}),
        ("valid.npy", {"valid.npy"}),
        ("counts.npy", {"train.npy", "counts.npy", "classes.npy"}),
        ("classes.npy", {"classes.npy"}),
        ("vocab.txt", FILES),
        ("tokenizer.json", FILES),
        ("meta.json", FILES),
    ],
)
def test_a_damaged_or_missing_file_is_made_again(
    corpus: Corpus, name: str, redone: set[str]
) -> None:
    prepared = corpus.prepare()
    tokens, classes = prepared.tokens("train").tolist(), prepared.word_class().tolist()
    path = corpus.prepared / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x07")
    assert corpus.rewritten() == redone
    path.unlink()
    assert corpus.rewritten() == redone
    assert corpus.prepare().tokens("train").tolist() == tokens
    assert corpus.prepare().word_class().tolist() == classes


def test_an_intact_tokenizer_of_another_text_is_made_again(corpus: Corpus) -> None:
    tokens = corpus.prepare().tokens("train").tolist()
    other = WordTokenizer(["<eos>", "<unk>", "the"])
    save_tokenizer(corpus.prepared, other, np.array([1, 1, 1], dtype=np.int64))
    assert corpus.rewritten() == FILES
    assert corpus.prepare().tokens("train").tolist() == tokens


@pytest.mark.parametrize("stage", ["save_tokenizer", "encode_split", "build_word_classes"])
def test_an_interrupted_preparation_continues_and_cannot_be_opened_before(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    corpus.prepare()
    corpus.write("train.txt", "another text\n")

    with monkeypatch.context() as patched:
        module = word_classes if stage == "build_word_classes" else stages
        patched.setattr(module, stage, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare()
    with pytest.raises(UserError, match="is half prepared"):
        open_prepared(corpus.prepared)
    done = {"save_tokenizer": set(), "encode_split": {"vocab.txt", "tokenizer.json"}}
    expected = FILES - done.get(stage, FILES - {"classes.npy"})
    assert corpus.rewritten() == expected
    assert corpus.prepare().tokens("train").tolist() == [1, 2, 0]


def test_absent_or_incomplete_files_are_made_for_a_run_that_continues(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = corpus.prepare(keep=True).tokens("train").tolist()
    (corpus.prepared / "train.npy").unlink()
    assert corpus.prepare(keep=True).tokens("train").tolist() == tokens
    corpus.write("train.txt", "another text\n")
    with monkeypatch.context() as patched:
        patched.setattr(stages, "encode_split", None)
        with pytest.raises(TypeError):
            corpus.prepare()
    corpus.write("train.txt", "a text\n")
    corpus.prepare(keep=True)
    assert corpus.text() == "a text\n"


def test_a_mistake_in_the_corpus_leaves_no_token_file(corpus: Corpus) -> None:
    corpus.write("valid.txt", "nul \0\n")
    with pytest.raises(UserError, match=r"valid\.txt, line 1: a NUL character$"):
        corpus.prepare()
    assert set(corpus.written()) == FILES - {"valid.npy", "classes.npy"} | {".lock", "meta.json"}
