"""What others would install: the check and the README's pins."""

import re

import pytest

from scripts.installation import __main__ as installation

NO_INDEX = "error: Request failed\n  cause: error sending request for url"


@pytest.mark.parametrize(
    ("why", "ci", "code", "printed"),
    [
        ("error: No solution found", False, 1, "Python 3.12, lower bounds:\nerror: No solution"),
        (NO_INDEX, False, None, "installation: not checked, as no package index can be reached"),
        (NO_INDEX, True, "installation: no package index can be reached", ""),
    ],
)
def test_the_check_fails_where_nothing_fits_and_in_ci_where_it_cannot_look(
    why: str,
    ci: bool,
    code: int | str | None,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = ("3.12", "lower bounds")
    monkeypatch.setattr(installation, "resolve", lambda given: why if given == case else None)
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
    (named,) = re.findall(
        r"pip install .*(torch==\S+)", (installation.TOP / "README.md").read_text()
    )
    assert named in (installation.TOP / "constraints.txt").read_text().splitlines()


def test_hashed_requirements_are_ordinary_wheels_of_the_constraints() -> None:
    lines = installation.HASHED.read_text().splitlines()[installation.HEADER.count("\n") :]
    pin = re.compile(r"([a-z0-9.-]+)==([0-9a-z.]+)(?: --hash=sha256:[0-9a-f]{64})+")
    pins = {match[1]: match[2] for match in map(pin.fullmatch, lines) if match}
    assert len(pins) == len(lines)  # no local version, such as 2.13.0+cpu
    constraints = (installation.TOP / "constraints.txt").read_text().lower().replace("_", "-")
    for name, version in (line.split("==") for line in constraints.split()):
        assert pins.get(name, version) == version
    assert pins.keys() >= {"torch", "triton", "lightning", "numpy", "numba", "wandb"}
