"""The commands and examples of the README run, and its links exist."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.cli import main
from tests.data_prep.conftest import write_table

TOP = Path(__file__).resolve().parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
FOLDERS = ("lm", "data_prep", "configs", "scripts")
PAGES = [*TOP.glob("*.md"), *(page for name in FOLDERS for page in (TOP / name).glob("**/*.md"))]
VALUES = {"CONFIG": "mine.yaml", "RUN": "runs/mine", "[KEY]": "model.hidden", "TEXT": "my.txt"}
VALUES |= {"NBEST": "list.nbest", "FILE": "names.txt", "DIR": "exported"}
"""Arguments for the placeholders in the table of commands."""
SMALL = {"train": ["--model.hidden=8", "--train.max_steps=2", "--no-progress"]}
SMALL["rescore"] = ["--lm-weight=1"]


def blocks(language: str, page: str = README) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def tabled(title: str) -> list[list[str]]:
    """The commands of the table with the title, but for those of the examples."""
    (table,) = re.findall(rf"^\| {title} \| purpose \|\n((?:\|.*\n)+)", README, re.MULTILINE)
    found = [command.split() for command in re.findall(r"^\| `lm ([^`]+)`", table, re.MULTILINE)]
    return [command for command in found if command[0] not in ("new", "train")]


def commands(block: str) -> list[str]:
    return [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]


def test_the_scripts_exist() -> None:
    (block,) = (block for block in blocks("sh") if "scripts/" in block)
    assert commands(block) == ["scripts/demo", "scripts/test"]
    assert all((TOP / command).stat().st_mode & 0o111 for command in commands(block))


@pytest.mark.filterwarnings("ignore:.* the probability of all unknown words")
def test_the_example_of_training_on_your_own_text_and_all_commands_run(
    corpus: Path, current_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(corpus / "train.txt", "my.txt")
    found = (block for block in blocks("sh") if "lm train" in block)
    example, items = ([shlex.split(each)[1:] for each in commands(block)] for block in found)
    assert [verb for verb, *_ in example] == ["new", "train", "generate"]
    assert [verb for verb, *_ in items] == ["new", "train"]
    events = [{"user": n % 9, "item": n % 12, "time": n} for n in range(120)]
    write_table(Path("events.parquet"), events)
    later = [{"user": n, "item": 12, "time": 200 + place} for n in range(9) for place in range(4)]
    write_table(Path("newer.parquet"), events + later)
    Path("names.txt").write_text("the zebra sees a gnu\n")
    Path("list.nbest").write_text("a-1 the cat\na-2 a cat\n")
    of_text, of_items = tabled("text"), tabled("items")
    assert len(of_text) >= 5
    assert len(of_items) >= 3
    of_items = [[verb, run.replace("RUN", "runs/shop"), *rest] for verb, run, *rest in of_items]
    for verb, *arguments in example + items + of_text + of_items:
        values = [VALUES.get(each, each.replace("TABLE", "newer.parquet")) for each in arguments]
        assert main([verb, *values, *SMALL.get(verb, [])]) == 0, verb
    assert "tokens predicted" in capsys.readouterr().out
    names: dict[str, object] = {}
    exec(blocks("python")[1], names)
    assert len(names["steps"]) == 2  # type: ignore[arg-type]


def test_the_python_example_runs() -> None:
    block, _ = blocks("python")
    names: dict[str, object] = {}
    exec(block.replace("100_000", "1_000"), names)
    layer = names["layer"]
    assert getattr(layer, "weight").grad.abs().sum() > 0  # noqa: B009


LAYER = (TOP / "lm" / "output" / "README.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in blocks("python", LAYER) if "cuda" not in block]


@pytest.mark.filterwarnings("default")  # transformers has some
@pytest.mark.parametrize("block", EXAMPLES, ids=["transformers", "shared"])
def test_the_examples_of_the_layer_run(block: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block.replace("20_000", "2_000"), names)
    if "model" not in names:
        return
    model, words = names["model"].eval(), names["words"]
    with torch.no_grad():
        log_prob = model(words).logits
        nll = -log_prob[:, :-1].gather(2, words[:, 1:, None]).mean()
        torch.testing.assert_close(model(words, labels=words).loss, nll)
        model.save_pretrained(tmp_path)
        assert torch.equal(type(model).from_pretrained(tmp_path)(words).logits, log_prob)
        found = model.generate(words[:, :9], max_new_tokens=1, do_sample=False)
        assert torch.equal(found[:, 9], log_prob[:, 8].argmax(-1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_the_links_of_pages_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    for link, anchor in links:
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            kept = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in kept, f"{link}#{anchor}"


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900
