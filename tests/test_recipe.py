"""`lm new` writes recipes that train at once, on texts of every size."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep.corpus.split import Sample
from data_prep.prepared import open_prepared
from lm import recipe
from lm.cli import main
from lm.config import Config, load_config
from lm.recipe import MAX_WORDS, TextSize, fit, measure
from tests.conftest import toy_sentences

Complaint = Callable[..., str]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def new(text: str, *options: str) -> Config:
    Path("my.txt").write_text(text, encoding="utf-8")
    assert main(["new", "my.yaml", "--text=my.txt", *options]) == 0
    return load_config("my.yaml")


@pytest.mark.parametrize(
    "text", ["word", "the quick brown fox jumps over the lazy dog\n", "a\na\n"]
)
def test_the_shortest_texts_train(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = new(text)
    assert config.data.files.train == "my.txt"
    assert config.data.files.valid is None
    assert "fewer than 20 lines: no valid and no test" in capsys.readouterr().out
    assert main(["train", "my.yaml", "--no-progress", "--train.max_steps=60"]) == 0
    capsys.readouterr()
    prompt, rest = text.split()[0], text.split()[1:]
    assert main(["generate", "runs/my", "--temperature=0", "--tokens=8", f"--prompt={prompt}"]) == 0
    if len(rest) == 8:
        assert capsys.readouterr().out == text


def test_a_recipe_with_splits_trains_and_is_better_than_the_unigram_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = new("\n".join(toy_sentences(1, 400)) + "\n")
    out = capsys.readouterr().out
    assert "by lines (train 360, valid 20, test 20): one of 20 for valid and one for test" in out
    assert out.endswith("then: lm train my.yaml\n      lm generate runs/my\n")
    assert f"# Split: {out.splitlines()[1].removeprefix('split: ')}." in Path("my.yaml").read_text()
    assert config.train.val_every_steps == 50
    assert main(["train", "my.yaml", "--no-progress", "--train.max_steps=100"]) == 0
    prepared = open_prepared(config.prepared_path)
    assert {split: info.lines for split, info in prepared.splits.items()} == {
        "train": 360,
        "valid": 20,
        "test": 20,
    }
    capsys.readouterr()
    assert main(["evaluate", "runs/my", "--json"]) == 0
    # Each sentence draws one of 3 · 8 · 5 · 3 · 8 · 5 combinations: 9.6 nats for 7 to 9 tokens.
    assert 2 < json.loads(capsys.readouterr().out)["perplexity"] < 6


def test_given_splits_are_used_as_they_are() -> None:
    Path("valid.txt").write_text("the cat\n")
    config = new("the dog\n" * 60, "--valid=valid.txt")
    files = config.data.files
    assert (files.train, files.valid) == ("runs/my/text/train.txt", "valid.txt")
    assert files.test == "runs/my/text/test.txt"
    assert Path("runs/my/text/test.txt").read_text() == "the dog\n" * 3
    assert not Path("runs/my/text/valid.txt").exists()


def test_documents_are_found_or_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    new("one two\nthree\n\n" * 40)
    assert "by documents (train 36, valid 2, test 2)" in capsys.readouterr().out
    Path("my.yaml").rename("other.yaml")
    assert main(["new", "lines.yaml", "--text=my.txt", "--split-by=lines"]) == 0
    assert "by lines (train 72, valid 4, test 4)" in capsys.readouterr().out


def test_nothing_is_overwritten(complaint: Complaint) -> None:
    new("the dog\n" * 40)
    before = Path("my.yaml").read_text()
    assert complaint("new", "my.yaml", "--text=my.txt") == (
        "my.yaml already exists: choose another name"
    )
    assert Path("my.yaml").read_text() == before
    Path("my.yaml").unlink()
    message = complaint("new", "my.yaml", "--text=my.txt")
    assert message.startswith("runs/my/text already exists")
    assert not Path("my.yaml").exists()


def test_mistakes_are_named_and_leave_no_files(complaint: Complaint) -> None:
    assert complaint("new", "my.yaml", "--text=none.txt") == "none.txt: no such file"
    assert complaint("new", "my.yaml", "--text=.") == ".: not a file"
    Path("my.txt").write_text("the dog\n" * 40)
    assert complaint("new", "my.yaml", "--text=my.txt", "--test=no.txt") == "no.txt: no such file"
    assert "name must be a plain file name" in complaint("new", ".yaml", "--text=my.txt")
    assert complaint("new", "my.yaml").endswith("the following arguments are required: --text")
    message = complaint("new", "my.txt/a.yaml", "--text=my.txt")
    assert message == "my.txt cannot be written: my.txt is a file, not a folder"
    assert [path.name for path in Path().iterdir()] == ["my.txt"]


def test_a_text_with_an_error_near_its_end_leaves_no_files(complaint: Complaint) -> None:
    Path("my.txt").write_bytes(b"the cat sat\n" * 500_000 + b"the \xff dog\n" + b"it\n" * 100_000)
    message = complaint("new", "a/b/my.yaml", "--text=my.txt")
    assert message.startswith("my.txt, line 500001: invalid UTF-8 at byte 5")
    assert list(Path().iterdir()) == [Path("my.txt")]


@pytest.mark.parametrize("num_lines", [1, 40], ids=["without splits", "with splits"])
def test_a_recipe_that_cannot_be_written_leaves_no_files(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch, num_lines: int
) -> None:
    Path("my.txt").write_text("the dog\n" * num_lines)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    message = complaint("new", "my.yaml", "--text=my.txt")
    assert message == "my.yaml cannot be written: No space left on device"
    assert list(Path().iterdir()) == [Path("my.txt")]


def test_names_of_files_with_special_characters_are_quoted() -> None:
    name = "a: {b} # 'c', \"d\" é.txt"
    Path(name).write_text("the dog\n")
    assert main(["new", "my.yaml", "--text", name]) == 0
    assert load_config("my.yaml").data.files.train == name


def size_of(tokens: int, words: int) -> TextSize:
    return TextSize(
        tokens=tokens, words=words, split_punctuation=False, has_spaces=True, min_count=2
    )


@pytest.mark.parametrize("tokens", [1, 300, 20_000, 200_000, 5_000_000, 40_000_000, 10**10])
def test_every_size_has_valid_settings(tokens: int) -> None:
    words = min(MAX_WORDS, 1 + tokens // 4)
    config = fit(Path("my.yaml"), size_of(tokens, words), {"train": "my.txt"})
    # Streams of an LSTM require a token for each sequence.
    assert config.train.batch_size <= tokens
    assert config.classes.shortlist < words


def test_the_model_fits_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(40_000_000, 150_000)
    monkeypatch.setattr(recipe, "available_bytes", lambda config: 8 << 30)
    assert fit(Path("my.yaml"), size, {"train": "my.txt"}).model.hidden == 300
    monkeypatch.setattr(recipe, "available_bytes", lambda config: 1150 << 20)
    assert 64 <= fit(Path("my.yaml"), size, {"train": "my.txt"}).model.hidden < 300


def test_attached_punctuation_becomes_words_of_its_own() -> None:
    raw = ["The cat sat, and the dog ran.", "It was late."]
    assert measure(Sample(raw, 1.0, 43)).split_punctuation
    tokenized = ["The cat sat , and the dog ran .", "It was late ."]
    assert not measure(Sample(tokenized, 1.0, 46)).split_punctuation


def test_the_vocabulary_of_a_sample_is_extrapolated() -> None:
    lines = [f"word{number} word{number}" for number in range(5_000)]
    size = measure(Sample(lines, 0.1, 10**6))
    assert size.tokens == 150_000
    assert size.words == pytest.approx(50_000, rel=0.01)  # every line has a new word
    same = measure(Sample(["the same words the same words"] * 5_000, 0.1, 10**6))
    assert same.words == 5  # with <unk> and <eos>


def test_text_without_spaces_is_cut_into_pieces() -> None:
    size = measure(
        Sample(["ある日の暮方の事である一人の下人が羅生門の下で雨やみを待っていた"] * 9, 0.1, 10**7)
    )
    assert not size.has_spaces
    config = fit(Path("my.yaml"), size, {"train": "my.txt"})
    assert (config.tokenizer.kind, config.tokenizer.vocab_size) == ("sentencepiece", 8_000)
