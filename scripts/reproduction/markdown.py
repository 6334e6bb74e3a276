"""Tables and numbers in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a line break at the end."""
    title, *lines = (f"| {' | '.join(cells)} |" for cells in [header, *rows])
    return "\n".join([title, "|---" * len(header) + "|", *lines])


def format_rows(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table from the columns' format strings, by title, and the fields of each row.

    Example:
        >>> print(format_rows({"N": "{size:,}"}, [{"size": 10000}]))
        | N |
        |---|
        | 10,000 |
    """
    return table(list(columns), ([text.format(**row) for text in columns.values()] for row in rows))


def pivot(
    corner: str,
    rows: Mapping[str, str],
    columns: Mapping[Key, str],
    cell: Callable[[str, Key], str],
) -> str:
    """A table of `cell(row, column)`, given the titles of rows and columns."""
    body = ([title, *(cell(row, column) for column in columns)] for row, title in rows.items())
    return table([corner, *columns.values()], body)


def short(value: float) -> str:
    """A number with about four digits.

    Example:
        >>> [short(x) for x in (6890.67, 109.374, 2.9531, 1.0)]
        ['6,891', '109.37', '2.953', '1']
    """
    if value >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.4g}"
