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

NAMES = ("README.md", "scripts/results/README.md", "lm/output/README.md", "data_prep/README.md")
PAGES = [TOP / name for name in NAMES]
"""The pages that may hold tables."""
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generate_tables(results: Path = RESULTS) -> dict[str, str]:
    """All tables that a page may hold, by name, from the logs in `results`."""
    tables = read_tables()
    generated = {
        name: training_tables.table_of_runs(table, table.runs(results))
        for name, table in tables.items()
    }
    for combine in (training_tables.overview, training_tables.summary):
        generated[combine.__name__] = combine(tables.values(), results)
    for recipe in benchmark_tables.SPEEDS:
        name = f"training_speed_{Path(recipe).stem}"
        generated[name] = benchmark_tables.training_speed(results, recipe)
    for pivot in (benchmark_tables.output_layer, benchmark_tables.scale):
        generated[pivot.__name__] = pivot(results)
    generated["ten_million"] = benchmark_tables.ten_million(results)
    for name in benchmark_tables.LOGS:
        generated[name] = benchmark_tables.table_of_log(results, name)
    return generated


def update(text: str, tables: Mapping[str, str]) -> str:
    r"""A page with the given tables, by name.

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
    """Write every page with its tables generated again; raises UserError as `update`."""
    tables = generate_tables()
    for page in filter(Path.exists, PAGES):
        page.write_text(update(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
