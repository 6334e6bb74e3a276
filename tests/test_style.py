"""Files and functions are short, and docstrings begin with what they describe."""

import ast
import re
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FILES = [
    path for name in ("lm", "data_prep", "scripts", "tests") for path in TOP.glob(f"{name}/**/*.py")
]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_files_are_short() -> None:
    lengths = {str(path): path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_functions_are_short_without_their_docstrings() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                length = (node.end_lineno or 0) - node.lineno + 1
                length -= 0 if docstring is None else docstring.count("\n") + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{path}:{node.lineno} {node.name}"] = length
    assert long == {}


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                if re.match(r"\s*(Of|The same|Those|That|Likewise)\b", text):
                    found.append(f"{path}:{node.lineno} {text}")
    assert found == []
