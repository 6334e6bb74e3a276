"""The rules of CONTRIBUTING.md that ruff does not check: words, sizes of files and functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
PACKAGES = ("lm", "data_prep", "scripts", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 8
AVOIDED = re.compile(
    r"""\b(?:
    (?i: house | rooms? | guests? | whoever | wants? | wanted | wanting | besides? | trainings )
    | (?i: at\ hand | stands?\ in | stood\ in | hangs?\ on | (?:goes|go|going|went|gone)\ on )
    | (?i: none\ of\ ours | head\ words? | by\ rows | (?:input|reads?)\ by\ (?:path|word) )
    | input_backoff | run_keeper | RunKeeper | footprint | Footprint | tree_choice | Together
    | pulled | picked | arrived | stalls | ntoken | n_classes | tombstone
    )\b""",
    re.VERBOSE,
)
"""Dialect, images and former names, each with a plain word in its place."""
EXCEPT = {"test_style.py", "renamed.py", "test_renamed.py"}
"""Files that list former names or the words themselves."""


def files(*endings: str) -> list[Path]:
    found = [path for name in PACKAGES for path in sorted((TOP / name).rglob("*"))]
    found += [*TOP.glob("*.md"), *(TOP / "configs").rglob("*")]
    return [path for path in found if path.suffix in endings]


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(TOP)}:{node.lineno} {node.name}", node


def without_renaming_table(text: str) -> str:
    """A page without its table of former names, whose lines stay as empty lines."""
    return re.sub(
        r"<!-- former names -->.*?<!-- end -->",
        lambda table: "\n" * table.group().count("\n"),
        text,
        flags=re.DOTALL,
    )


@pytest.mark.parametrize(
    "path", files(".py", ".md", ".yaml"), ids=lambda p: str(p.relative_to(TOP))
)
def test_no_avoided_word_is_used(path: Path) -> None:
    if path.name in EXCEPT:
        return
    text = without_renaming_table(path.read_text(encoding="utf-8"))
    found = [
        f"line {number}: {match.group()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in AVOIDED.finditer(line)
    ]
    assert found == []


def test_files_are_short() -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in files(".py")}
    assert [str(path) for path, length in lengths.items() if length > MAX_FILE_LINES] == []


def test_functions_are_short_without_their_docstrings() -> None:
    long = []
    for name, node in functions():
        docstring = ast.get_docstring(node, clean=False)
        length = (node.end_lineno or 0) - node.lineno + 1
        length -= 0 if docstring is None else docstring.count("\n") + 1
        if length > MAX_FUNCTION_LINES:
            long.append(f"{name}: {length} lines")
    assert long == []


def test_no_call_has_many_positional_arguments() -> None:
    found = [
        f"{path.relative_to(TOP)}:{node.lineno}: {len(node.args)} positional arguments"
        for path in files(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL
    ]
    assert found == []
