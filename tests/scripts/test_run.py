"""How scripts end, and the environment that they make."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import scripts
from data_prep.errors import UserError
from lm.training.signals import Interrupted
from scripts.reproduction.runs import TOP


@pytest.mark.parametrize(
    ("stop", "code", "message"),
    [
        (UserError("no such file"), "table: no such file", ""),
        (KeyboardInterrupt(), 130, "table: interrupted; the same command continues\n"),
        (Interrupted(signal.SIGTERM), 143, "table: interrupted; the same command continues\n"),
        (SystemExit(2), 2, ""),
    ],
)
def test_a_script_ends_with_one_line(
    stop: BaseException, code: int | str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise stop

    with pytest.raises(SystemExit) as end:
        scripts.run(main, "table")
    assert end.value.code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("is_link", [False, True])
def test_an_environment_of_the_user_is_not_deleted(tmp_path: Path, is_link: bool) -> None:
    folder = tmp_path / "scripts" / "installation"
    folder.mkdir(parents=True)
    shutil.copy(TOP / "scripts" / "installation" / "environment", folder)
    mine = tmp_path / ("other" if is_link else ".venv") / "pyvenv.cfg"
    mine.parent.mkdir()
    mine.write_text("mine")
    if is_link:  # to the environment that scripts have made for another folder
        (mine.parent / "place").write_text("other")
        (tmp_path / ".venv").symlink_to(mine.parent)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["bash", "-c", "set -eu; extras=''; . scripts/installation/environment"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "rename or remove it" in found.stderr
    assert mine.read_text() == "mine"
