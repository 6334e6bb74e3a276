"""Generated tables in Markdown pages.

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`.
`scripts/reproduce pages` writes all of them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from data_prep.errors import UserError
from scripts.reproduction import benchmark_tables, training_tables
from scripts.reproduction.runs import RESULTS, TOP, read_tables

PAGES = [
    TOP / name
    for name in (
        "README.md",
        "scripts/results/README.md",
        "lm/output/README.md",
        "data_prep/README.md",
    )
]
"""The pages that may hold tables."""
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generate_tables(results: Path = RESULTS) -> dict[str, str]:
    """All tables that a page may hold.

    Args:
        results: Folder of the logs.

    Returns:
        Name → Markdown.
    """
    tables = read_tables()
    generated = {
        name: training_tables.table_of_runs(table, table.runs(results))
        for name, table in tables.items()
    }
    for combine in (training_tables.overview, training_tables.summary):
        generated[combine.__name__] = combine(tables, results)
    generated["wikitext2_curves"] = training_tables.validation_curves(
        tables["wikitext2_small"], results
    )
    for recipe in benchmark_tables.SPEEDS:
        name = f"training_speed_{Path(recipe).stem}"
        generated[name] = benchmark_tables.training_speed(results, recipe)
    for generate in (
        training_tables.single_runs,
        benchmark_tables.output_layer,
        benchmark_tables.scale,
        benchmark_tables.class_building,
        benchmark_tables.ten_million,
        benchmark_tables.kernel_report,
        benchmark_tables.kernel_bytes,
        benchmark_tables.step_bytes,
    ):
        generated[generate.__name__] = generate(results)
    return generated


def update(text: str, tables: Mapping[str, str]) -> str:
    r"""A page with the given tables.

    Args:
        text: The page.
        tables: Name → Markdown.

    Raises:
        UserError: If the page names an unknown table, or a table has no end.

    Example:
        >>> update("<!-- table: x -->\n<!-- end -->", {"x": "| 1 |"})
        '<!-- table: x -->\n| 1 |\n<!-- end -->'
    """
    if text.count("<!-- table:") != len(_TABLE.findall(text)):
        raise UserError("expected `<!-- end -->` after every `<!-- table: NAME -->`")
    for _, name, _ in _TABLE.findall(text):
        if name not in tables:
            raise UserError(f"no table {name!r}; there are {', '.join(tables)}")
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text)


def write_pages() -> None:
    """Write every page with its tables generated again.

    Raises:
        UserError: As `update`.
    """
    tables = generate_tables()
    for page in filter(Path.exists, PAGES):
        page.write_text(update(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
