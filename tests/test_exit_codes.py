"""Exit codes: each kind of failure has its own, and a single line that names what failed."""

import io
import re
import resource
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from data_prep.storage import locked
from lm.cli import main
from lm.training.metrics import Metrics
from tests.bad_files import BAD_FILES
from tests.bad_inputs import ARPA, BAD_INPUTS, FILES, WRONG_VALUES
from tests.conftest import Printed, Train, contents
from tests.scoring.arpa_files import write


@pytest.fixture
def code_of(copied_run: Path) -> Callable[..., int]:
    """`code_of(*options)`: the exit code of continuing the run with options of the command."""
    options = ["--no-progress", "--train.max_steps=26", "--resume=auto"]
    return lambda *more: main(["train", str(copied_run), *options, *more])


METRICS = (",".join(field.name for field in fields(Metrics)) + "\n1,2,\xff,4\n").encode("latin-1")
NAN = torch.tensor(float("nan"))
NO_MEMORY = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"))


@pytest.fixture
def problem(
    tiny: Path,
    lstm_run: Path,
    transformer_run: Path,
    pieces_run: Path,
    items_run: Path,
    letters: Train,
    prepared_dir: Path,
    copied_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Printed:
    """`problem(code, command, message)`: "" if the command ends so and changes nothing.

    The current folder has `FILES`, `empty/`, and a run with its data in `copy/`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    names = {name: name if "." in name else f"{name}.txt" for name in [*FILES, "absent"]}
    places: dict[str, object] = {name: tmp_path / file for name, file in names.items()}
    places |= {"tiny": tiny, "run": lstm_run, "pieces": pieces_run, "items": items_run}
    places |= {"transformer": transformer_run, "folder": tmp_path / "empty"}
    places |= {"letters": letters("letters"), "lower": "--tokenizer.lowercase=true"}
    places["ends"] = letters("ends", "--data.sequences=independent", "--data.predict_eos=true")
    places |= {"words": "--data.files.train=words.txt", "json": "--data.format=json"}
    places["data"] = f"--data.prepared_dir={prepared_dir}"
    Path("empty").mkdir()
    write(Path("arpa.txt"), ARPA, 2)
    for name, content in FILES.items():
        Path(names[name]).write_bytes(content)

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path().rglob("*")}

    def run(code: str, command: str, message: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"a"))))
        capsys.readouterr()
        before = stamps()
        arguments = shlex.split(command.format(**places))
        if command.split()[1:2] in (["{tiny}"], ["abc.txt"], ["shop.txt"]):
            arguments[2:2] = ["--run_dir=new"] * ("--run_dir" not in command)
        actual = main(arguments)
        if "{data}" not in command:  # part of a preparation may be done
            rmtree("new", ignore_errors=True)
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("lm: ")]
        named = message.format(**places) if "{nbest}" in message else message
        pattern = ".*".join(map(re.escape, named.split(" … "))).replace("\\$", "$")
        if (out, actual, len(lines)) == ("", int(code), 1) and re.search(pattern, lines[0]):
            return "" if stamps() == before else f"{command} changed files\n"
        return f"{command}: {actual}, {lines}, {out}, not {message}\n"

    return run


def test_bad_inputs_end_with_one_line_that_names_them_and_change_nothing(
    problem: Printed, lstm_run: Path
) -> None:
    before = contents(lstm_run)
    rows = [f"2 | train {{tiny}} {key} | {key[2:].split('=')[0]}" for key in WRONG_VALUES.split()]
    rows += BAD_INPUTS.splitlines()
    assert "".join(problem(*row.split(" | ")) for row in rows) == ""
    assert contents(lstm_run) == before


def changed(base: bytes | None, change: str) -> bytes:
    """A content, or a base with edits `old=>new;;old=>new`; both with escapes."""
    text = change.encode("latin-1", "backslashreplace").decode("unicode_escape")
    content = text.encode(errors="surrogateescape")
    if base is None or b"=>" not in content:
        return content
    for edit in content.split(b";;"):
        old, new = edit.split(b"=>")
        assert old in base
        base = base.replace(old, new)
    return base


def test_bad_files_end_with_one_line_that_says_what_is_wrong_in_them(problem: Printed) -> None:
    found = []
    for line in BAD_FILES.replace("\\\n", "").splitlines():
        if not line.startswith("  "):
            code, command, name = line.split(" | ")
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            base = path.read_bytes() if path.exists() else None
            continue
        change, message = line[2:].rsplit(" | ", 1)
        path.write_bytes(changed(base, change))
        found.append(problem(code, command, message))
        path.unlink(missing_ok=True) if base is None else path.write_bytes(base)
    assert "".join(found) == ""


@pytest.mark.parametrize(
    ("code", "option", "what", "value", "named"),
    [
        (2, "--model.hidden=16", "", b"", "model.hidden: 12 → 16"),
        (3, "--train.max_steps=26", "tokenizer.json", b"step\n1\n", "tokenizer.json"),
        (3, "--train.max_steps=26", "metrics.csv", b"step\n1\n", "metrics.csv, line 1, is damaged"),
        (3, "--train.max_steps=26", "metrics.csv", METRICS, "metrics.csv, line 2, is damaged"),
        (4, "--train.max_steps=26", "checkpoints/*.ckpt", b"step\n1\n", ".ckpt"),
        (5, "--optim.lr=0.01", "lm.training.loop.clip_gradients", lambda *_: NAN, "step 25"),
        (7, "--train.batch_size=4", "lm.training.loop.update", NO_MEMORY, "out of memory"),
        (7, "--train.max_steps=26", "lm.run.Run.available_bytes", 1000, ""),
    ],
)
def test_a_run_that_cannot_continue_says_why(
    code: int,
    option: str,
    what: str,
    value: Any,
    named: str,
    copied_run: Path,
    code_of: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`what` is a name that is patched, or files that are overwritten."""
    if what.startswith("lm."):
        monkeypatch.setattr(what, value)
    for path in copied_run.glob(what or "-"):
        path.write_bytes(value)
    assert code_of(option) == code
    err = capsys.readouterr().err
    assert named in err.splitlines()[-1]
    assert err.count("lm: ") == 1


def test_full_disks(code_of: Callable[..., int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert code_of() == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_busy_folders(copied_run: Path, code_of: Callable[..., int]) -> None:
    with locked(copied_run / ".lock"):
        assert code_of() == 8


def test_mistakes_of_the_program_have_a_traceback(
    code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = Mock(side_effect=RuntimeError("a mistake"))
    monkeypatch.setattr("lm.training.loop.update", mistake)
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        code_of()
