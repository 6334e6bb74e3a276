"""Every difference from the record is named, and only what depends on it is done again."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from data_prep import meta
from data_prep.errors import UserError
from data_prep.settings import Files, SplitFiles
from tests.data_prep.conftest import FILES, Corpus

CLASSES, VALID, REMOVED = {"classes.npy"}, {"valid.npy"}, "valid: valid.txt removed"
MARKS = "tokenizer.split_punctuation"
PIECES_FILES = FILES - {"vocab.txt", "speller.npz"} | {"tokenizer.model"}
PIECES = {"kind": "sentencepiece", "vocab_size": 300, "model_type": "char", "byte_fallback": True}
PIECES |= {"character_coverage": 0.99, "max_sentences": 200}
PIECES_CHANGED = (
    "tokenizer.kind: words → sentencepiece; tokenizer.vocab_size: None → 300; "
    f"tokenizer.min_count: 1 → None; tokenizer.lowercase: False → None; {MARKS}: False → None; "
    "tokenizer.model_type: None → char; tokenizer.byte_fallback: None → True; "
    "tokenizer.character_coverage: None → 0.99; tokenizer.max_sentences: None → 200"
)


def files(train: Files, valid: Files) -> dict[str, SplitFiles]:
    return {"files": SplitFiles(train=train, valid=valid)}


@pytest.mark.parametrize(
    "case",
    [
        ("tokenizer", {"vocab_size": 5}, "tokenizer.vocab_size: None → 5", FILES),
        ("tokenizer", {"min_count": 2}, "tokenizer.min_count: 1 → 2", FILES),
        ("tokenizer", {"lowercase": True}, "tokenizer.lowercase: False → True", FILES),
        ("tokenizer", {"split_punctuation": True}, f"{MARKS}: False → True", FILES),
        ("tokenizer", PIECES, PIECES_CHANGED, PIECES_FILES),
        ("data", {"keep_empty_lines": False}, "data.keep_empty_lines: True → False", FILES),
        ("data", {"text_field": "other"}, "data.text_field: text → other", FILES),
        ("train.txt", "a b\n", "train: train.txt changed", FILES),
        ("valid.txt", "the\n", "valid: valid.txt changed", VALID),
        ("classes", {"num_word_classes": 2}, "classes.num_word_classes: None → 2", CLASSES),
        ("classes", {"depth": 3}, "classes.depth: None → 3", CLASSES),
        ("classes", {"shortlist": 2}, "classes.shortlist: 0 → 2", CLASSES),
        ("data", files(["train.txt", "more.txt"], "valid.txt"), "train: more.txt added", FILES),
        ("data", files("train.txt", "more.txt"), f"{REMOVED}; valid: more.txt added", VALID),
        ("data", files("train.txt", None), REMOVED, set()),
    ],
)
def test_a_change_is_named_and_redoes_what_depends_on_it_unless_a_run_continues(
    corpus: Corpus, caplog: pytest.LogCaptureFixture, case: Any
) -> None:
    what, change, message, redone = case
    corpus.write("more.txt", "more\n")
    corpus.prepare()
    if isinstance(change, str):
        corpus.write(what, change)
    else:
        setattr(corpus, what, replace(getattr(corpus, what), **change))
    before = corpus.written()
    with pytest.raises(UserError) as refused:
        corpus.prepare(keep=True)
    assert str(refused.value) == (
        f"{corpus.prepared} was prepared from something else ({message}), and a run"
        " continues with the data it started with: undo that, or start another run"
    )
    assert corpus.written() == before
    caplog.clear()
    assert corpus.rewritten() == redone
    assert set(message.split("; ")) <= set(caplog.messages)
    assert corpus.rewritten() == set()
    assert corpus.classes is not None
    prepared = corpus.prepare()
    assert prepared.shortlist == corpus.classes.shortlist
    assert ("valid.npy" in corpus.written()) == ("valid" in prepared.splits)


def requested(corpus: Corpus) -> meta.Meta:
    return meta.requested_meta(corpus.data, corpus.tokenizer, corpus.classes, corpus.prepared, None)


def test_files_of_one_name_are_distinguished(corpus: Corpus) -> None:
    for folder in ("n1", "n2"):
        (corpus.folder / folder).mkdir()
        corpus.write(f"{folder}/t.txt", f"the {folder} sat\n")
    corpus.data = replace(corpus.data, files=SplitFiles(train=["n1/t.txt", "n2/t.txt"]))
    first = requested(corpus)
    corpus.write("n1/t.txt", "the cat sat\n")
    second = requested(corpus)
    assert meta.find_changes(first, second) == {"train": ["train: t.txt changed"]}
    corpus.data = replace(corpus.data, files=SplitFiles(train=["n2/t.txt", "n1/t.txt"]))
    changes = meta.find_changes(second, requested(corpus))
    assert changes == {"train": ["train: order of the files changed"]}


def test_a_file_of_two_splits_is_reported(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    corpus.data = replace(corpus.data, files=SplitFiles(train="train.txt", test="train.txt"))
    requested(corpus)
    assert "test: train.txt is in the training split as well" in caplog.messages


def test_the_record_contains_no_local_path(corpus: Corpus) -> None:
    corpus.prepare()
    text = (corpus.prepared / "meta.json").read_text()
    assert str(corpus.folder) not in text
    assert json.loads(text)["inputs"]["valid"][0]["num_bytes"] == 10


def test_every_changed_figure_of_the_record_is_detected(corpus: Corpus) -> None:
    folder = corpus.prepare().folder
    path, content = folder / "meta.json", (folder / "meta.json").read_text()
    assert meta.read_meta(folder) is not None
    for digit in re.finditer(r"\d", content):
        other = (int(digit[0]) + 1) % 10
        path.write_text(f"{content[: digit.start()]}{other}{content[digit.end() :]}")
        with pytest.raises(UserError, match=r"meta\.json(: unknown| is damaged| has format)"):
            meta.read_meta(folder)
    path.write_text(re.sub(r'"checksum": "\w+"', '"checksum": ""', content))
    assert meta.read_meta(folder) is not None  # of an earlier version
    record = json.loads(content)
    assert record["splits"]["train"].pop("known") is None  # a key that another one lacks
    path.write_text(json.dumps(record | {"checksum": meta._checksum(record)}))
    assert meta.read_meta(folder) == corpus.prepare().meta
