"""Tables and numbers in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
        header: Title of each column.
        rows: Cells of each row, as many as the header has.

    Returns:
        Lines without a line break at the end.

    Example:
        >>> print(table(["N", "time"], [["10,000", "1.5 s"]]))
        | N | time |
        |---|---|
        | 10,000 | 1.5 s |
    """
    lines = [_line(header), "|---" * len(header) + "|", *map(_line, rows)]
    return "\n".join(lines)


def format_rows(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table of formatted rows.

    Args:
        columns: Title → format string of the cell, with the row's fields.
        rows: Fields and values.

    Returns:
        As `table`.

    Example:
        >>> print(format_rows({"N": "{size:,}"}, [{"size": 10000}]))
        | N |
        |---|
        | 10,000 |
    """
    return table(list(columns), ([text.format(**row) for text in columns.values()] for row in rows))


def short(value: float) -> str:
    """A number with about four digits.

    Example:
        >>> [short(x) for x in (6890.67, 109.374, 2.9531, 1.0)]
        ['6,891', '109.37', '2.953', '1']
    """
    if value >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
