"""Shared fixtures: repeatable random numbers, a tiny corpus, and runs trained on it."""

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from lm import limit_spinning

TINY = """\
name: tiny
data: {{dir: {corpus}, files: {{train: train.txt, valid: valid.txt, test: test.txt}}}}
model: {{hidden: 12, layers: 2, dropout: 0.2}}
optim: {{lr: 0.01}}
train: {{max_steps: 24, batch_size: 4, seq_len: 8, threads: 1}}
log: {{every_steps: 5}}
"""
ITEMS = ["--data.files={train: events.csv}", "--data.format=csv", "--data.sequences=independent"]
ITEMS += ["--data.user_field=user", "--data.split=leave_one_out", "--model.layers=1"]
ITEMS += ["--model.dropout=0", "--train.max_steps=30"]
LETTERS = ["ab b ba", "b aab ab", "", "ba b <unk> ab bé", "b bab abb b ab", "aab abaab"] * 4
LETTERS += ["abba baa bbab", "abab baab <unk>"]
OTHER_LETTERS = ["ab baba b", "bbb é <unk> aba", "", "b ab", "日本"]
"""Training and test lines of the runs of `letters`."""
PIECES = ["--tokenizer.kind=sentencepiece", "--output.tree=full"]
PIECES_WITH_BYTES = [*PIECES, "--tokenizer.byte_fallback=true", "--tokenizer.vocab_size=270"]
NOUNS = ("cat", "dog", "bird", "man", "woman", "child", "horse", "fish")
VERBS = ("sees", "hears", "likes", "follows", "finds")
ADVERBS = ("today", "now", "again", "often", "slowly")
Train = Callable[..., Path]
Printed = Callable[..., str]
"""Types of fixtures that run a command: they return the folder of a run, or what is printed."""


def main(arguments: list[str]) -> int:
    """Run the command `lm`, imported here because GPU tests run without its libraries."""
    from lm.cli import main as command

    return command(arguments)


def recipes(table: str) -> dict[str, list[str]]:
    """Options of the command, by name, of lines `name | key=value key=value …`."""
    rows = (line.split(" | ") for line in table.splitlines())
    return {name: [f"--{each}" for each in keys.split()] for name, keys in rows}


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The outcome of a process of Python, whose output is text."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def corpus_of(folder: Path, text: str) -> list[str]:
    """Options that train on a text, without a validation split, in `run`."""
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return [f"--data.dir={folder}", "--data.files={train: text.txt}", f"--run_dir={folder / 'run'}"]


def pytest_configure(config: pytest.Config) -> None:
    """Disable network access and output of libraries, and give them caches of this process alone.

    Kernels are interpreted unless on a GPU only. Generated examples are the same each time, and may
    take any time. All this is read when the libraries are imported, by the files of tests.
    """
    limit_spinning()  # of the processes that tests start
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
    cache = TemporaryDirectory(prefix="cache-")
    config.add_cleanup(cache.cleanup)
    os.environ |= {"HF_HOME": f"{cache.name}/hf", "WANDB_CACHE_DIR": f"{cache.name}/wandb"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "WANDB_ERROR_REPORTING": "false"}
    os.environ["WANDB_SILENT"] = "true"
    os.environ["NUMBA_CACHE_DIR"] = str(config.rootpath / ".pytest_cache" / "numba")
    if find_spec("hypothesis"):  # which GPU tests do without
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile(
            "tests", deadline=None, derandomize=True, suppress_health_check=slow
        )
        settings.load_profile("tests")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are not part of a test's name: compressed ones may differ from process to process.

    Dtypes have their names, by which GPU tests are chosen.
    """
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    return argname if isinstance(val, bytes) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _nan_filled_memory() -> None:
    """Uninitialized memory is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()


@pytest.fixture(autouse=True)
def _same_random_numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts from the same seeds and with one thread.

    GPU tests run as users do: deterministic algorithms fill memory, sort and wait for the device.
    """
    on_gpu = request.node.get_closest_marker("gpu") is not None
    torch.use_deterministic_algorithms(not on_gpu, warn_only=True)
    random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "a test has not left a block of autocast"


def toy_sentences(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)

    def phrase() -> str:
        return f"{rng.choice(('the', 'a', 'the old'))} {rng.choice(NOUNS)}"

    return [
        f"{phrase()} {rng.choice(VERBS)} {phrase()} {rng.choice(ADVERBS)}" for _ in range(count)
    ]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt, valid.txt, test.txt; the last two have an unknown word."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (split, count) in enumerate([("train", 300), ("valid", 20), ("test", 25)]):
        lines = toy_sentences(seed, count)
        if split != "train":
            lines[3] += " zebra"
            lines[5] = ""
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a tiny LSTM."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    path.write_text(TINY.format(corpus=corpus), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def prepared_dir(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared data of `tiny`, read-only."""
    folder = tmp_path_factory.mktemp("prepared")
    assert main(["prepare", str(tiny), f"--data.prepared_dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="session")
def train(tiny: Path, prepared_dir: Path) -> Callable[..., Path]:
    """`train(folder, *options)` trains `tiny` with options of the command, in `folder`."""

    def run(folder: Path, *options: str) -> Path:
        arguments = [f"--run_dir={folder}", f"--data.prepared_dir={prepared_dir}", *options]
        assert main(["train", str(tiny), "--no-progress", *arguments]) == 0
        return folder

    return run


@pytest.fixture(scope="session")
def lstm_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained LSTM, read-only."""
    return train(tmp_path_factory.mktemp("lstm_run"))


@pytest.fixture(scope="session")
def transformer_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained Transformer, read-only."""
    return train(tmp_path_factory.mktemp("transformer_run"), "--model.backbone=transformer")


@pytest.fixture(scope="session", params=["lstm_run", "transformer_run"])
def run(request: pytest.FixtureRequest) -> Path:
    """A trained model of each backbone, read-only."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture
def copied_run(lstm_run: Path, prepared_dir: Path, tmp_path: Path) -> Path:
    """A copy of a trained LSTM, with its data in its folder."""
    run = copytree(lstm_run, tmp_path / "copy")
    copytree(prepared_dir, run / "data")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"prepared_dir: {prepared_dir}", ""))
    return run


@pytest.fixture(scope="session")
def pieces_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LSTM that reads pieces of words, after one step, read-only."""
    options = ["--tokenizer={kind: sentencepiece, vocab_size: 34}", "--train.max_steps=1"]
    return train(tmp_path_factory.mktemp("pieces_run"), "--data.prepared_dir=null", *options)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`letters(name, *options)`: a run on `LETTERS`, words that occur once are `<unk>`."""
    corpus = tmp_path_factory.mktemp("letters")
    for split, lines in (("train", LETTERS), ("test", OTHER_LETTERS)):
        (corpus / f"{split}.txt").write_text("\n".join(lines) + "\n")
    config = corpus / "letters.yaml"
    config.write_text(
        f"name: letters\ndata: {{dir: {corpus}, files: {{train: train.txt, test: test.txt}}}}\n"
        "tokenizer: {min_count: 2}\nmodel: {hidden: 8, layers: 1}\n"
        "train: {seq_len: 4, threads: 1, max_steps: 9, batch_size: 2}\n"
    )

    def train(name: str, *options: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "run"
        assert main(["train", str(config), f"--run_dir={folder}", "--no-progress", *options]) == 0
        return folder

    return train


@pytest.fixture(scope="session")
def items_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on users who go through 20 items, from a place of their own on."""
    folder = tmp_path_factory.mktemp("items")
    rows = ["user,item,time"]
    rng = np.random.default_rng(7)
    for user in range(60):
        start = rng.integers(20)
        for time in range(rng.integers(1, 9)):
            rows.append(f"u{user},item {(start + time) % 20},{time}")
    rows += ["u61,item 3,1", "u61,rare,2", "u61,item 4,3"]  # the second is in no event of training
    rows += ["u60,item 3,1", "u60,item 4,2", "u60,never seen before,3"]
    (folder / "events.csv").write_text("\n".join(rows))
    return train(folder / "run", f"--data.dir={folder}", "--data.prepared_dir=null", *ITEMS)


@pytest.fixture
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`printed(*arguments)`: what a command prints on stdout."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`complaint(*arguments)` runs a command that must fail with a single-line error, which it
    returns without `lm: `, and with an exit code if `code` is given.
    """

    def run(*arguments: object, code: int | None = None) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) in ([code] if code else range(2, 9))
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lm: ")
        assert err.count("\n") == 1
        return err.removeprefix("lm: ").removesuffix("\n")

    return run


def flip_bit(path: Path) -> None:
    """Flip one in the middle of a file; in the largest tensor of a checkpoint, the middle of whose
    file may be padding between tensors.
    """
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            place = content.index(archive.read(largest))
    content[place] ^= 1
    path.write_bytes(content)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, by name; "" for a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def untouched(tmp_path: Path, complaint: Printed) -> Printed:
    """`complaint`, after which `tmp_path` must be unchanged."""

    def run(*arguments: object, code: int | None = None) -> str:
        before = contents(tmp_path)
        message = complaint(*arguments, code=code)
        assert contents(tmp_path) == before
        return message

    return run
