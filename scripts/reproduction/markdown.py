"""Markdown tables, which benchmarks print and pages contain."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, str]
"""Title of a column → template of its cells: see `cell`."""


class _Templates(string.Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Row) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        spec, _, unit = format_spec.partition("/")
        return "–" if value is None else format(value / float(unit) if unit else value, spec)


def cell(template: str, row: Row) -> str:
    """Format a template as `str.format` does, with units to divide by; None or no value is a dash.

    Example:
        >>> cell("{size:.1f/1e9} GB, {seconds:.0f} s", {"size": 12.86e9})
        '12.9 GB, – s'
    """
    return _Templates().vformat(template, (), row)


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text, without a line break at the end."""
    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, rows)])


def table_of_rows(columns: Columns, rows: Iterable[Row]) -> str:
    """A table with a line for each row.

    Example:
        >>> print(table_of_rows({"N": "{size:,}"}, [{"size": 10000}]))
        | N |
        |---|
        | 10,000 |
    """
    return table(list(columns), ([cell(text, row) for text in columns.values()] for row in rows))
