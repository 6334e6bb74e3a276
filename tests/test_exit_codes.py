"""Exit codes: each kind of failure has its own, and a single line that names what failed."""

import resource
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from data_prep.storage import locked
from lm.cli import main


@pytest.fixture
def run(lstm_run: Path, tmp_path: Path) -> Path:
    return copytree(lstm_run, tmp_path / "run")


@pytest.fixture
def code_of(tiny: Path, prepared_dir: Path, run: Path) -> Callable[..., int]:
    """`code_of(*options)`: the exit code of continuing the run with options of the command."""
    options = [f"--run_dir={run}", f"--data.prepared_dir={prepared_dir}", "--no-progress"]
    length = ["--train.max_steps=26", "--resume=auto"]
    return lambda *more: main(["train", str(tiny), *options, *length, *more])


def fail(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize(
    ("code", "options", "named"),
    [
        (2, ["--frob"], "--frob"),
        (2, ["--train.max_step=3"], "train.max_steps"),
        (2, ["--model.hidden=16"], "model.hidden: 12 → 16"),
        (3, ["--data.dir=/nowhere"], "/nowhere"),
        (4, ["--resume=no.ckpt"], "no.ckpt"),
        (5, ["--optim.lr=0.01"], "step 25"),
        (7, ["--train.batch_size=4"], "out of memory"),
    ],
)
def test_settings(
    code: int,
    options: list[str],
    named: str,
    code_of: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code == 5:
        norm = torch.tensor(float("nan"))
        monkeypatch.setattr("lm.training.loop.clip_gradients", lambda *_: norm)
    if code == 7:
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")
        monkeypatch.setattr("lm.training.loop.update", fail(error))
    assert code_of(*options) == code
    err = capsys.readouterr().err
    assert named in err.splitlines()[-1]
    assert err.count("lm: ") == 1


@pytest.mark.parametrize(
    ("code", "what"), [(3, "tokenizer.json"), (3, "metrics.csv"), (4, "checkpoints/*.ckpt")]
)
def test_files(code: int, what: str, run: Path, code_of: Callable[..., int]) -> None:
    for path in run.glob(what):
        path.write_bytes(b"step\n1\n")
    assert code_of() == code


def test_models(run: Path) -> None:
    (run / "model.safetensors").write_bytes(b"")
    assert main(["evaluate", str(run)]) == 4
    (run / "model.json").unlink()
    assert main(["evaluate", str(run)]) == 4


def test_full_disks(code_of: Callable[..., int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert code_of() == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_too_little_memory(code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.run.Run.available_bytes", 1000)
    assert code_of() == 7


def test_busy_folders(run: Path, code_of: Callable[..., int]) -> None:
    with locked(run / ".lock"):
        assert code_of() == 8


def test_mistakes_of_the_program_have_a_traceback(
    code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.training.loop.update", fail(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        code_of()
