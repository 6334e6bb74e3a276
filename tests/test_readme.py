"""The commands and examples of the README run, and its links exist."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from lm.cli import main

TOP = Path(__file__).resolve().parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", *TOP.glob("*/**/README.md")]
SMALL = {"train": ["--model.hidden=8", "--train.max_steps=2", "--no-progress"]}


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(block: str) -> list[str]:
    return [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]


def test_the_scripts_exist() -> None:
    (block,) = (block for block in blocks("sh") if "scripts/" in block)
    assert commands(block) == ["scripts/demo", "scripts/test"]
    assert all((TOP / command).stat().st_mode & 0o111 for command in commands(block))


def test_the_example_of_training_on_your_own_text_runs(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(corpus, tmp_path / "text")
    (config,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks("sh") if "lm train" in block)
    verbs = []
    for command in commands(block):
        _, verb, *arguments = shlex.split(command)
        assert main([verb, *arguments, *SMALL.get(verb, [])]) == 0, command
        verbs.append(verb)
    assert verbs == ["train", "evaluate", "generate"]
    assert "tokens predicted" in capsys.readouterr().out


def test_every_command_of_the_table_exists(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = re.findall(r"^\| `lm (\w+)", README, re.MULTILINE)
    assert len(verbs) >= 6
    for verb in verbs:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        assert f"usage: lm {verb}" in capsys.readouterr().out


def test_the_python_example_runs() -> None:
    (block,) = blocks("python")
    names: dict[str, object] = {}
    exec(block.replace("100_000", "1_000"), names)
    layer = names["layer"]
    assert getattr(layer, "weight").grad.abs().sum() > 0  # noqa: B009


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_the_links_of_pages_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
