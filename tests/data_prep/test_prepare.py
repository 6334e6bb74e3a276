"""Preparation does what is missing, says why, and trusts nothing that is half there."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import IterableDataset

import data_prep.prepare as module
from data_prep import prepared as artifacts
from data_prep.errors import UserError
from data_prep.prepared import Prepared, copy_tokenizer, open_prepared, save_tokenizer
from data_prep.settings import ClassesConfig, DataConfig, Files, SplitFiles, TokenizerConfig
from data_prep.storage import sha256_file
from data_prep.tokenizer.tokenizer import WordTokenizer

Contents = Callable[[Path], dict[str, str]]

FILES = {"train.npy", "valid.npy", "counts.npy", "classes.npy", "vocab.txt", "tokenizer.json"}


class Corpus:
    """A small corpus and the settings to prepare it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = DataConfig(
            dir=str(folder), files=SplitFiles(train="train.txt", valid="valid.txt")
        )
        self.tokenizer = TokenizerConfig()
        self.classes = ClassesConfig(method="frequency")
        self.write("train.txt", "the cat sat\nthe dog ran <unk>\n")
        self.write("valid.txt", "the zebra\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def prepare(self, *, keep: bool = False) -> Prepared:
        folder = self.folder / "prepared"
        return module.prepare(
            self.data, self.tokenizer, self.classes, folder, keep=keep, progress=False
        )

    def written(self) -> dict[str, int]:
        paths = (self.folder / "prepared").iterdir()
        return {path.name: path.stat().st_mtime_ns for path in paths}

    def rewritten(self) -> set[str]:
        """The files that another preparation writes, `meta.json` aside."""
        before = self.written()
        self.prepare()
        after = self.written()
        return {name for name in after if after[name] != before.get(name)} - {"meta.json"}


@pytest.fixture
def corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Corpus:
    caplog.set_level(logging.INFO, "data_prep")
    return Corpus(tmp_path)


def test_a_corpus_becomes_tokens_counts_and_classes(corpus: Corpus) -> None:
    prepared = corpus.prepare()
    assert prepared.tokenizer().decode(prepared.tokens("train")) == (
        "the cat sat\nthe dog ran <unk>\n"
    )
    assert prepared.counts().sum() == len(prepared.tokens("train")) == 9
    assert {name: info.tokens for name, info in prepared.splits.items()} == {"train": 9, "valid": 3}
    assert prepared.num_word_classes == round(prepared.vocab_size**0.5) == 3


def test_the_same_again_writes_nothing(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    corpus.prepare()
    before = corpus.written()
    caplog.clear()
    corpus.prepare()
    assert corpus.written() == before
    assert caplog.messages == [f"{corpus.folder / 'prepared'} is up to date"]


def test_what_is_up_to_date_is_checked_and_copied_without_loading_the_vocabulary(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.prepare()

    def refuse(*_: object) -> None:
        raise AssertionError("the tokenizer was loaded")

    monkeypatch.setattr(module, "load_tokenizer", refuse)
    monkeypatch.setattr(artifacts, "load_tokenizer", refuse)
    copy_tokenizer(corpus.prepare(), corpus.folder)
    copied = (corpus.folder / "vocab.txt").read_bytes()
    assert copied == (corpus.folder / "prepared" / "vocab.txt").read_bytes()
    corpus.classes = ClassesConfig(method="uniform")
    assert corpus.rewritten() == {"classes.npy"}


def test_a_folder_of_before_a_setting_existed_is_up_to_date(corpus: Corpus) -> None:
    corpus.prepare()
    path = corpus.folder / "prepared" / "meta.json"
    record = json.loads(path.read_text())
    assert record["settings"]["classes"].pop("clustered_words") is None
    path.write_text(json.dumps(record))
    assert corpus.rewritten() == set()
    corpus.classes = replace(corpus.classes, clustered_words=3)
    assert corpus.rewritten() == {"classes.npy"}


def test_a_corpus_that_moves_is_the_same_corpus(corpus: Corpus) -> None:
    corpus.prepare()
    moved = corpus.folder / "moved"
    moved.mkdir()
    for name in ("train.txt", "valid.txt"):
        (corpus.folder / name).rename(moved / name)
    corpus.data = replace(corpus.data, dir=str(moved))
    assert corpus.rewritten() == set()


def edit(name: str, text: str) -> Callable[[Corpus], None]:
    return lambda corpus: corpus.write(name, text)


def files(train: Files, valid: Files) -> Callable[[Corpus], None]:
    def change(corpus: Corpus) -> None:
        corpus.write("more.txt", "more\n")
        corpus.data = replace(corpus.data, files=SplitFiles(train=train, valid=valid))

    return change


def lowercase(corpus: Corpus) -> None:
    corpus.tokenizer = TokenizerConfig(lowercase=True)


def two_classes(corpus: Corpus) -> None:
    corpus.classes = replace(corpus.classes, num_word_classes=2)


def head_of_two(corpus: Corpus) -> None:
    assert corpus.prepare().head == 0
    corpus.classes = replace(corpus.classes, head=2)


def skip_empty(corpus: Corpus) -> None:
    corpus.data = replace(corpus.data, keep_empty_lines=False)


@pytest.mark.parametrize(
    ("change", "said", "redone"),
    [
        (lowercase, "tokenizer.lowercase: False → True", FILES),
        (skip_empty, "data.keep_empty_lines: True → False", FILES),
        (edit("train.txt", "a b\n"), "train: train.txt changed", FILES),
        (edit("valid.txt", "the\n"), "valid: valid.txt changed", {"valid.npy"}),
        (two_classes, "classes.num_word_classes: None → 2", {"classes.npy"}),
        (head_of_two, "classes.head: 0 → 2", {"classes.npy"}),
        (files(["train.txt", "more.txt"], "valid.txt"), "train: more.txt added", FILES),
        (files("train.txt", "more.txt"), "valid: valid.txt removed", {"valid.npy"}),
        (files("train.txt", None), "valid: valid.txt removed", set()),
    ],
)
def test_a_change_is_named_and_only_what_depends_on_it_is_redone(
    corpus: Corpus,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Corpus], None],
    said: str,
    redone: set[str],
) -> None:
    corpus.prepare()
    change(corpus)
    caplog.clear()
    assert corpus.rewritten() == redone
    assert said in caplog.messages
    assert corpus.rewritten() == set()
    assert corpus.prepare().head == corpus.classes.head


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lowercase, "tokenizer.lowercase: False → True"),
        (edit("train.txt", "a b\n"), "train: train.txt changed"),
        (two_classes, "classes.num_word_classes: None → 2"),
        (files(["train.txt", "more.txt"], None), "train: more.txt added; valid: valid.txt removed"),
    ],
)
def test_what_a_run_goes_on_with_is_not_made_again(
    corpus: Corpus, change: Callable[[Corpus], None], said: str
) -> None:
    corpus.prepare()
    before = corpus.written()
    change(corpus)
    with pytest.raises(UserError) as refused:
        corpus.prepare(keep=True)
    assert str(refused.value) == (
        f"{corpus.folder / 'prepared'} was prepared from something else ({said}), and a run goes on"
        " with the data it began with"
    )
    assert corpus.written() == before


def test_what_is_absent_damaged_or_half_prepared_is_made_for_a_run_that_goes_on(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = corpus.prepare(keep=True).tokens("train").tolist()
    (corpus.folder / "prepared" / "train.npy").unlink()
    assert corpus.prepare(keep=True).tokens("train").tolist() == tokens
    corpus.write("train.txt", "another text\n")
    with monkeypatch.context() as patched:
        patched.setattr(module, "encode_split", None)
        with pytest.raises(TypeError):
            corpus.prepare()
    corpus.write("train.txt", "a text\n")
    prepared = corpus.prepare(keep=True)
    assert prepared.tokenizer().decode(prepared.tokens("train")) == "a text\n"


def test_only_the_settings_that_made_a_folder_open_it(corpus: Corpus) -> None:
    folder = corpus.prepare().folder
    opened = module.open_made_by(corpus.data, corpus.tokenizer, corpus.classes, folder)
    assert opened.meta == open_prepared(folder).meta
    lowercase(corpus)
    two_classes(corpus)
    with pytest.raises(UserError) as refused:
        module.open_made_by(corpus.data, corpus.tokenizer, corpus.classes, folder)
    assert str(refused.value) == (
        f"{folder} was prepared with tokenizer.lowercase = False, not True;"
        " classes.num_word_classes = None, not 2: run `lm prepare` first"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("vocab.txt", "mine\n"), ("meta.json", '{"version": 3}'), ("test.npy", "mine")],
)
def test_files_that_no_preparation_wrote_are_left_alone(
    corpus: Corpus, contents: Contents, name: str, content: str
) -> None:
    folder = corpus.folder / "prepared"
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
    (corpus.folder / "prepared" / module.LOCK).unlink()
    assert corpus.rewritten() == {module.LOCK}


@pytest.mark.parametrize("pattern", ["prepared/corpus.txt", "**/*.txt"])
def test_a_corpus_in_the_prepared_folder_is_refused(corpus: Corpus, pattern: str) -> None:
    (corpus.folder / "prepared").mkdir()
    corpus.write("prepared/corpus.txt", "the cat\n")
    corpus.data = replace(corpus.data, files=SplitFiles(train=pattern))
    with pytest.raises(UserError) as refused:
        corpus.prepare()
    assert str(refused.value) == (
        f"{corpus.folder}/prepared/corpus.txt is in the prepared folder: the corpus must be"
        " elsewhere"
    )


def test_a_dataset_on_the_hub_is_opened_only_to_be_prepared(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = IterableDataset.from_generator(lambda: iter([{"text": "the cat sat\n"}]))
    opened: list[str | None] = []

    def load(data: DataConfig) -> dict[str, IterableDataset]:
        opened.append(data.hub_config)
        return {"train": lines, "validation": lines}

    monkeypatch.setattr("data_prep.corpus.lines._load_hub", load)
    corpus.data = DataConfig(dir=str(corpus.folder), hub="some/corpus")
    assert list(corpus.prepare().splits) == ["train", "valid"]
    opened.clear()
    assert corpus.rewritten() == set()
    corpus.classes = ClassesConfig(method="uniform")
    assert corpus.rewritten() == {"classes.npy"}
    assert opened == []
    corpus.data = replace(corpus.data, hub_config="large")
    assert corpus.rewritten() == FILES
    assert set(opened) == {"large"}


def test_files_in_another_order_are_another_text(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    for order in (["train.txt", "valid.txt"], ["valid.txt", "train.txt"]):
        corpus.data = replace(corpus.data, files=SplitFiles(train=order))
        tokens = corpus.prepare().tokens("train").tolist()
    assert "train: order of the files changed" in caplog.messages
    assert corpus.prepare().tokenizer().decode(tokens).startswith("the zebra\n")


def test_a_split_that_is_no_longer_given_goes(corpus: Corpus) -> None:
    corpus.prepare()
    corpus.data = replace(corpus.data, files=SplitFiles(train="train.txt"))
    assert list(corpus.prepare().splits) == ["train"]
    assert not (corpus.folder / "prepared" / "valid.npy").exists()


def test_a_changed_class_file_changes_the_classes_alone(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    corpus.write("classes.txt", "the\t0\ncat\t1\nsat\t1\ndog\t1\nran\t1\n")
    corpus.classes = ClassesConfig(method="file", file="classes.txt")
    first = corpus.prepare().word_class().tolist()
    corpus.write("classes.txt", "the\t0\ncat\t0\nsat\t1\ndog\t1\nran\t1\n")
    assert corpus.rewritten() == {"classes.npy"}
    assert "classes: classes.txt changed" in caplog.messages
    assert corpus.prepare().word_class().tolist() != first


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
    path = corpus.folder / "prepared" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x07")
    assert corpus.rewritten() == redone
    path.unlink()
    assert corpus.rewritten() == redone
    assert corpus.prepare().tokens("train").tolist() == tokens
    assert corpus.prepare().word_class().tolist() == classes


def test_a_sound_tokenizer_of_another_text_is_made_again(corpus: Corpus) -> None:
    tokens = corpus.prepare().tokens("train").tolist()
    other = WordTokenizer(["<eos>", "<unk>", "the"])
    save_tokenizer(corpus.folder / "prepared", other, np.array([1, 1, 1], dtype=np.int64))
    assert corpus.rewritten() == FILES
    assert corpus.prepare().tokens("train").tolist() == tokens


@pytest.mark.parametrize("stage", ["save_tokenizer", "encode_split", "build_word_classes"])
def test_an_interrupted_preparation_goes_on_and_is_not_trusted_before(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    corpus.prepare()
    corpus.write("train.txt", "another text\n")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare()
    with pytest.raises(UserError, match="is half prepared"):
        open_prepared(corpus.folder / "prepared")
    done = {"save_tokenizer": set(), "encode_split": {"vocab.txt", "tokenizer.json"}}
    expected = FILES - done.get(stage, FILES - {"classes.npy"})
    assert corpus.rewritten() == expected
    assert corpus.prepare().tokens("train").tolist() == [1, 2, 0]


def test_a_file_that_is_trained_and_measured_on_is_pointed_out(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    corpus.data = replace(corpus.data, files=SplitFiles(train="train.txt", test="train.txt"))
    corpus.prepare()
    assert "test: train.txt is in the training split as well" in caplog.messages


def test_sentencepiece_is_prepared_the_same_way(corpus: Corpus) -> None:
    corpus.tokenizer = TokenizerConfig(kind="sentencepiece", vocab_size=15)
    prepared = corpus.prepare()
    assert prepared.tokenizer().decode(prepared.tokens("train")) == (
        "the cat sat\nthe dog ran <unk>\n"
    )
    assert (prepared.vocab_size, prepared.splits["train"].oov) == (15, 1)
    assert corpus.rewritten() == set()


def test_the_record_has_no_folder_of_the_machine(corpus: Corpus) -> None:
    corpus.prepare()
    text = (corpus.folder / "prepared" / "meta.json").read_text()
    assert str(corpus.folder) not in text
    assert json.loads(text)["inputs"]["valid"][0]["num_bytes"] == 10


def test_a_folder_that_cannot_be_made_is_refused(corpus: Corpus) -> None:
    corpus.write("prepared", "a file in the way")
    with pytest.raises(UserError, match=r"prepared cannot be written: File exists$"):
        corpus.prepare()


def test_a_mistake_in_the_corpus_leaves_no_token_file(corpus: Corpus) -> None:
    corpus.write("valid.txt", "nul \0\n")
    with pytest.raises(UserError, match=r"valid\.txt, line 1: a NUL character$"):
        corpus.prepare()
    assert set(corpus.written()) == FILES - {"valid.npy", "classes.npy"} | {".lock", "meta.json"}


def test_files_of_one_name_are_told_apart(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    for folder in ("n1", "n2"):
        (corpus.folder / folder).mkdir()
        corpus.write(f"{folder}/t.txt", f"the {folder} sat\n")
    corpus.data = replace(corpus.data, files=SplitFiles(train=["n1/t.txt", "n2/t.txt"]))
    corpus.prepare()
    corpus.write("n1/t.txt", "the cat sat\n")
    corpus.prepare()
    assert "train: t.txt changed" in caplog.messages
    corpus.data = replace(corpus.data, files=SplitFiles(train=["n2/t.txt", "n1/t.txt"]))
    caplog.clear()
    corpus.prepare()
    assert [m for m in caplog.messages if m.startswith("train: t.txt")] == [
        "train: t.txt changed",
        "train: t.txt (2) changed",
    ]


def test_a_file_of_several_splits_is_read_once_for_its_hash(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = corpus.folder / "hub"
    hub.mkdir()
    for split in ("train", "validation", "test"):
        (hub / f"{split}.txt").write_text("the cat\n")
    corpus.data = DataConfig(dir=str(corpus.folder), hub="hub")
    hashed: list[str] = []

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(module, "sha256_file", sha256)
    corpus.prepare()
    assert sorted(hashed) == ["test.txt", "train.txt", "validation.txt"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("words", {"vocab_size": 5}),
        ("words", {"min_count": 2}),
        ("words", {"lowercase": True}),
        ("words", {"split_punctuation": True}),
        ("sentencepiece", {"vocab_size": 16}),
        ("sentencepiece", {"model_type": "char"}),
        ("sentencepiece", {"byte_fallback": True}),
        ("sentencepiece", {"character_coverage": 0.9}),
        ("sentencepiece", {"max_sentences": 200}),
    ],
    ids=str,
)
def test_every_setting_of_a_tokenizer_that_matters_is_part_of_the_record(
    kind: Any, options: dict[str, Any]
) -> None:
    base = TokenizerConfig(kind=kind, vocab_size=15)
    data, classes = DataConfig(), ClassesConfig()
    before, after = (
        module._settings(data, settings, classes) for settings in (base, replace(base, **options))
    )
    (key,) = options
    assert [name for name, _ in module._setting_changes(before, after)] == [f"tokenizer.{key}"]


def test_another_column_is_another_text(tmp_path: Path) -> None:
    rows = [{"text": "the cat", "other": "a dog"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for field, text in (("text", "the cat\n"), ("other", "a dog\n")):
        data = DataConfig(
            dir=str(tmp_path),
            files=SplitFiles(train="train.jsonl"),
            format="json",
            text_field=field,
        )
        prepared = module.prepare(
            data, TokenizerConfig(), ClassesConfig(method="uniform"), tmp_path / "p", progress=False
        )
        assert prepared.tokenizer().decode(prepared.tokens("train")) == text
