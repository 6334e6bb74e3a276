"""What others would install, how scripts end, and the environment that they make."""

import re
import shutil
import signal
import subprocess
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

import lm
import scripts
from data_prep.errors import UserError
from lm.training.signals import Interrupted
from scripts import TOP
from scripts.installation import __main__ as installation
from tests.conftest import python

NO_INDEX = "error: Request failed\n  cause: error sending request for url"


@pytest.mark.parametrize(
    "case",
    [
        ("error: No solution found", False, 1, "Python 3.12, lower bounds:\nerror: No solution"),
        (NO_INDEX, False, None, "installation: not checked, as no package index can be reached"),
        (NO_INDEX, True, "installation: no package index can be reached", ""),
    ],
)
def test_the_check_fails_where_nothing_fits_and_in_ci_where_it_cannot_look(
    case: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (why, ci, code, printed), wrong = case, ("3.12", "lower bounds")
    monkeypatch.setattr(installation, "resolve", lambda given: why if given == wrong else None)
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", "true")
    found: object = None
    try:
        installation.main()
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert printed in "".join(capsys.readouterr())


def test_the_readme_installs_the_torch_of_the_constraints() -> None:
    page = (TOP / "README.md").read_text()
    (named,) = re.findall(r"pip install .*(torch==\S+)", page)
    assert named in (TOP / "constraints.txt").read_text().splitlines()


def test_hashed_requirements_are_ordinary_wheels_of_the_constraints() -> None:
    lines = installation.HASHED.read_text().splitlines()[installation.HEADER.count("\n") :]
    pin = re.compile(r"([a-z0-9.-]+)==([0-9a-z.]+)(?: --hash=sha256:[0-9a-f]{64})+")
    pins = {match[1]: match[2] for match in map(pin.fullmatch, lines) if match}
    assert len(pins) == len(lines)  # no local version, such as 2.13.0+cpu
    constraints = (TOP / "constraints.txt").read_text().lower().replace("_", "-")
    for name, version in (line.split("==") for line in constraints.split()):
        assert pins.get(name, version) == version
    assert pins.keys() >= {"torch", "triton", "lightning", "numpy", "numba", "wandb"}


def test_trained_models_are_used_in_a_small_installation(
    lstm_run: Path, pieces_run: Path, items_run: Path
) -> None:
    """Without a package that the page on exports does not name, nor those require."""
    page = (TOP / "lm" / "export" / "README.md").read_text()
    ((named, optional),) = re.findall(r"constraints.txt (torch .*)  # (\w+) for", page)
    needed, new = set[str](), {*named.split(), optional}
    while new:
        needed |= new
        lines = [line for name in new for line in requires(name) or [] if "extra ==" not in line]
        new = {_normalized(line) for line in lines} - needed
        new = {name for name in new if any(distributions(name=name))}
    packages, known = packages_distributions().items(), {*needed, "sqrtlm"}
    absent = [module for module, names in packages if not {*map(_normalized, names)} & known]
    assert {"lightning", "pyarrow", "pandas", "scipy"} < {*absent}
    figure = "model.score([text])[0].total if text else model.log_prob()[5].item()"
    code = f"import sys; sys.modules |= dict.fromkeys({absent})\nimport lm\n" + (
        "for run, text in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        f"    model = lm.load(run)\n    print({figure})\n"
        "from lm.cli import main\nsys.exit(main(['evaluate', run, '--ranking']))"
    )
    runs = {lstm_run: "the old cat", pieces_run: "the old cat", items_run: ""}
    done = python("-c", code, *(str(part) for pair in runs.items() for part in pair))
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last) == (2, "lm: this requires the package pyarrow")
    for (run, text), line in zip(runs.items(), done.stdout.splitlines(), strict=True):
        expected = eval(figure, {"model": lm.load(run), "text": text})
        assert float(line) == pytest.approx(expected)


def _normalized(requirement: str) -> str:
    """The name of a distribution at the beginning of a text."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[._-]+", "-", str(name)).lower()


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
