"""`lm new` writes recipes that train at once, on texts of every size."""

import errno
import gzip
import json
import os
import re
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import yaml

from data_prep.errors import UserError
from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import Config, OptimConfig, load_config, validate
from lm.recipe.texts import MAX_WORDS, fit
from lm.run import Run
from tests.conftest import Printed, toy_sentences
from tests.data_prep.conftest import write_table

Backbone = Literal["lstm", "transformer"]
pytestmark = pytest.mark.usefixtures("current_folder")


def new(text: str, *options: str) -> Config:
    Path("my.txt").write_text(text, encoding="utf-8")
    assert main(["new", "my.yaml", "--text=my.txt", *options]) == 0
    return load_config("my.yaml")


@pytest.mark.parametrize("text", ["word", "the quick brown fox jumps over a lazy dog\n", "a\na\n"])
def test_the_shortest_texts_train(text: str, printed: Printed) -> None:
    Path("my.txt").write_text(text)
    assert "fewer than 20 lines: no valid and no test" in printed("new", "my.yaml", "--text=my.txt")
    files = load_config("my.yaml").data.files
    assert (files.train, files.valid) == ("my.txt", None)
    assert main(["train", "my.yaml", "--no-progress", "--train.max_steps=60"]) == 0
    prompt, *rest = text.split()
    options = ["--temperature=0", "--tokens=8", f"--prompt={prompt}"]
    assert (printed("generate", "runs/my", *options) == text) == (len(rest) == 8)


def test_a_recipe_with_splits_trains_and_is_better_than_the_unigram_model(printed: Printed) -> None:
    Path("my.txt").write_text("\n".join(toy_sentences(1, 400)) + "\n")
    out = printed("new", "my.yaml", "--text=my.txt")
    config = load_config("my.yaml")
    assert re.search(
        r"by lines, train 360 lines \(about 2,[67]\d\d tokens\), "
        r"valid 20 lines \(about 1\d\d tokens\), test 20 lines \(about 1\d\d tokens\): "
        r"one of 20 for valid and one for test, in runs/my/text\n",
        out,
    )
    assert out.endswith("then: lm train my.yaml\n      lm generate runs/my\n")
    header = "".join(f"# {line}\n" for line in out.splitlines()[:3])
    assert Path("my.yaml").read_text().startswith(header)
    assert config.train.val_every_steps == 50
    assert main(["train", "my.yaml", "--no-progress", "--train.max_steps=100"]) == 0
    prepared = open_prepared(config.prepared_path)
    sizes = {split: info.lines for split, info in prepared.splits.items()}
    assert sizes == {"train": 360, "valid": 20, "test": 20}
    # Each sentence draws one of 3 · 8 · 5 · 3 · 8 · 5 combinations: 9.6 nats for 7 to 9 tokens.
    assert 2 < json.loads(printed("evaluate", "runs/my", "--json"))["perplexity"] < 6


def test_given_splits_are_used_as_they_are() -> None:
    Path("valid.txt").write_text("the cat\n")
    files = new("the dog\n" * 60, "--valid=valid.txt").data.files
    assert (files.train, files.valid) == ("runs/my/text/train.txt", "valid.txt")
    assert files.test == "runs/my/text/test.txt"
    assert Path("runs/my/text/test.txt").read_text() == "the dog\n" * 3
    assert not Path("runs/my/text/valid.txt").exists()


@pytest.mark.parametrize("given", [False, True], ids=["splits", "given splits"])
def test_the_text_of_a_column_is_copied(given: bool) -> None:
    rows = [{"id": number, "text": f"line {number}\nthe cat"} for number in range(40)]
    Path("a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("b.csv").write_text("text,n\nthe dog,1\n")
    options = ["--valid=b.csv", "--test=b.csv"] if given else []
    assert main(["new", "null.yaml", "--text=a.jsonl", *options]) == 0
    splits = ("train", "valid", "test")
    files = [str(getattr(load_config("null.yaml").data.files, split)) for split in splits]
    assert files == [f"runs/null/text/{split}.txt" for split in splits]
    texts = [Path(file).read_text() for file in files]
    if given:
        assert texts[1:] == ["the dog\n"] * 2
    written = "".join(texts[:1] if given else texts).splitlines()
    assert sorted(written) == sorted([f"line {i}" for i in range(40)] + ["the cat"] * 40)
    if not given:
        assert texts[1:] == [f"line {n}\nthe cat\nline {n + 20}\nthe cat\n" for n in (9, 19)]
    assert main(["prepare", "null.yaml", "--no-progress"]) == 0


TABLES, TEXTS = ("a.csv", "a.jsonl", "a.parquet"), ("my.txt", "my.txt.gz")
CELL, LINE = "the cat\nthe cat\nthe cat", "the cat sat on the mat " * 12
FEW_ROWS = "none, the text has fewer than 20 rows: no valid and no test"
DOCUMENTS = ["--split-by=documents"]
SPLITS: list[Any] = [
    (TABLES, [CELL] * 40, [], "by rows, train 38 rows (about"),
    (TABLES, [CELL] * 40, [*DOCUMENTS, "--text-field=text"], "by rows, train 38 rows (about"),
    (TABLES, [CELL] * 40, ["--split-by=lines"], "by lines, train 114 lines (about"),
    (TABLES, [CELL] * 19, [], f"{FEW_ROWS}, unless --split-"),
    (TABLES, ["the cat"] * 19, [], f"{FEW_ROWS}\n"),
    (TEXTS, [LINE] * 40, [], "by lines, train 38 lines"),
    (TEXTS, [f"{LINE}\n"] * 40, DOCUMENTS, "by documents, train 38 documents"),
    (TEXTS, [LINE] * 19, [], "none, the text has fewer than 20 lines"),
]
CASES = [(name, *case) for names, *case in SPLITS for name in names]


@pytest.mark.parametrize(("name", "units", "options", "split"), CASES)
def test_long_units_stay_whole_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    printed: Printed,
    name: str,
    units: Any,
    options: Any,
    split: str,
) -> None:
    monkeypatch.setattr("data_prep.corpus.split.HELD_OUT_BYTES", 4)  # 1/20 are more units
    monkeypatch.setattr(SAMPLE_BYTES, 1600)
    if name in TABLES:
        write_table(Path(name), [{"n": row, "text": cell} for row, cell in enumerate(units)])
    else:
        text = "\n".join(units).encode()
        Path(name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert f"split: {split}" in printed("new", "my.yaml", f"--text={name}", *options)
    for path in Path("runs/my/text").glob("*.txt"):
        assert path.read_text().strip()


def test_names_with_control_characters_are_refused(untouched: Printed) -> None:
    Path("my.txt").write_text("the dog\n" * 40)
    for name in ("a\nb.yaml", "a\u2028b.yaml", "a\x1b.yaml", "a\udcff.yaml"):
        message = untouched("new", name, "--text=my.txt")
        assert message == f"{name!a}: a name must not have control characters"


def grow(*_: object) -> tuple[str, dict[str, tuple[int, int]]]:
    os.utime("my.txt", (1, 1))
    return "lines", {}


ERROR = b"the cat sat\n" * 5000 + b"the \xff dog\n" + b"it\n" * 1000  # not in the sample
FULL = ("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
SAMPLE_BYTES = "data_prep.corpus.split.SAMPLE_BYTES"
NO_SPACE = ".* cannot be written: No space left on device"
CHANGED = r"my\.txt changed while it was read: try again"


@pytest.mark.parametrize(
    ("text", "patch", "message"),
    [
        (ERROR, (SAMPLE_BYTES, 4096), r"my\.txt, line 5001: invalid UTF-8 at byte 5.*"),
        (b"the dog\n", FULL, NO_SPACE),
        (b"the dog\n" * 40, FULL, NO_SPACE),
        (b"the dog\n" * 40, ("lm.recipe.texts.split_text", grow), CHANGED),
    ],
)
def test_a_recipe_that_cannot_be_made_leaves_no_files(
    untouched: Printed, monkeypatch: pytest.MonkeyPatch, text: bytes, patch: Any, message: str
) -> None:
    monkeypatch.setattr(*patch)
    Path("my.txt").write_bytes(text)
    assert re.fullmatch(message, untouched("new", "a/b/my.yaml", "--text=my.txt"))


def test_names_of_files_with_special_characters_are_quoted(printed: Printed) -> None:
    name = "a: {b} # 'c', \"d\" $e é.txt"
    Path(name).write_text("the dog\n")
    then = "then: lm train 'my dog.yaml'\n      lm generate 'runs/my dog'\n"
    assert printed("new", "my dog.yaml", "--text", name).endswith(then)
    assert load_config("my dog.yaml").data.files.train == name


@pytest.mark.parametrize("punctuated", [False, True])
def test_the_vocabulary_announced_is_that_of_the_prepared_data(
    punctuated: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is much larger than the sample, and its rare words are <unk>."""
    monkeypatch.setattr(SAMPLE_BYTES, 4096)
    random = Random(1)
    mark = "," if punctuated else ""
    letters = str.maketrans("0123456789", "abcdefghij")
    numbers = [f"{int(20_000 * random.random() ** 4)}{mark}" for _ in range(60_000)]
    words = [number.translate(letters) for number in numbers]
    new("\n".join(" ".join(words[i : i + 12]) for i in range(0, len(words), 12)))
    printed = r"a vocabulary of ([\d,]+) \(([\d.]+) % of the training tokens are other words"
    ((announced, share),) = re.findall(printed, capsys.readouterr().out)
    assert main(["prepare", "my.yaml", "--no-progress"]) == 0
    config = load_config("my.yaml")
    assert config.tokenizer.split_punctuation == punctuated
    prepared = open_prepared(config.prepared_path)
    assert prepared.vocab_size == int(announced.replace(",", "")) > 1000
    counts = prepared.counts()
    assert float(share) == round(100 * counts[prepared.unk_id] / counts.sum(), 1) > 0.5


def fitted(num_tokens: int, num_words: int, backbone: Backbone = "lstm") -> Config:
    sizes = num_tokens, num_words, "kind: words"
    content, line = fit(Path("my.yaml"), {"train": Path("a")}, *sizes, backbone)
    config = validate(yaml.safe_load(content), "")
    name = {"lstm": "LSTM", "transformer": "Transformer"}[backbone]
    assert line.startswith(f"{name} {config.model.layers} × {config.model.hidden}, ")
    return config


def test_a_large_text_is_validated_ten_times_an_epoch() -> None:
    for tokens, steps in {5_000_000: 500, 65_000_000: 1_586}.items():
        assert fitted(tokens, 100_000).train.val_every_steps == steps


def test_words_of_an_lstm_have_pieces_from_20_000_tokens_on() -> None:
    words = {10_000: None, 30_000: 1_000, 400_000: 4_000, 40_000_000: 4_000}
    for tokens, pieces in words.items():
        assert fitted(tokens, min(MAX_WORDS, 4_000 * tokens // 30_000)).model.input_pieces == pieces
    content, _ = fit(Path("my.yaml"), {}, 400_000, 8_000, "kind: sentencepiece, vocab_size: 8000")
    assert validate(yaml.safe_load(content), "").model.input_pieces is None


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize("tokens", [1, 300, 20_000, 200_000, 5_000_000, 40_000_000, 10**10])
def test_every_size_has_valid_settings(tokens: int, backbone: Backbone) -> None:
    words = min(MAX_WORDS, 1 + tokens // 4)
    config = fitted(tokens, words, backbone)
    assert config.classes.clustered_words == (60_000 if words > 60_000 else None)
    optim = config.optim
    if backbone == "transformer":
        assert (optim.optimizer, optim.schedule) == ("adamw", "cosine")
        assert optim.warmup_steps <= 400
    # Streams of an LSTM require a token for each sequence, windows one more than they have.
    train = config.train
    shortest = 1 if backbone == "lstm" else train.seq_len + 1
    assert train.batch_size * shortest <= max(3, tokens)
    assert config.classes.shortlist < words


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize("tokens", [2_000, 200_000, 40_000_000])
@pytest.mark.parametrize("tree", ["adaptive", "full"])
def test_another_tree_works_once_the_keys_of_the_message_are_set(
    tree: str, tokens: int, backbone: Backbone
) -> None:
    content, _ = fit(Path("my.yaml"), {"train": Path("a")}, tokens, 1000, "kind: words", backbone)
    for other in ("input_embedding", "input_tree"):  # the message names two ways
        values = yaml.safe_load(content)
        values["output"]["tree"] = tree
        with pytest.raises(UserError) as caught:
            validate(values, "")
        for section, key, value in re.findall(r"(\w+)\.(\w+): (\w+)", str(caught.value)):
            if key != other:
                values[section][key] = yaml.safe_load(value)
        assert validate(values, "").output.tree == tree


def test_a_transformer_under_sgd_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    new("the dog sat on the mat\n" * 5_000)
    options = ["--no-progress", "--train.max_steps=1", "--model.hidden=8"]
    assert main(["train", "my.yaml", "--model.backbone=transformer", *options]) == 0
    added = re.findall(r"(--optim\S+?)[, ]", caplog.text)
    assert load_config("my.yaml", added).optim == OptimConfig(
        optimizer="adamw", lr=0.001, clip=1, weight_decay=0.1, warmup_steps=400, schedule="cosine"
    )


def test_the_model_fits_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr("torch.version.cuda", None)
    for available in (8 << 30, 1420 << 20, 1310 << 20):
        monkeypatch.setattr(Run, "available_bytes", available)
        sizes.append(fitted(40_000_000, 150_000).model.hidden)
    assert sizes[0] == 300 > sizes[1] > sizes[2] >= 64
    monkeypatch.setattr(Run, "available_bytes", 300 << 20)
    with pytest.raises(UserError, match=r"even the smallest model needs 0\.\d GB of mem"):
        fitted(40_000_000, 150_000)
