"""The generated tables and figures of Markdown pages.

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`.
`scripts/reproduce pages` writes all of them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from data_prep.errors import UserError
from lm.config.reference import sections
from scripts import markdown
from scripts.reproduction.figures import draw_vocabularies
from scripts.reproduction.runs import RESULTS, TOP
from scripts.reproduction.tables import generate_tables

PAGES = (
    "README.md",
    "*/README.md",
    "lm/output/*.md",
    "lm/output/sharded/README.md",
    "scripts/*/*.md",
)
VOCABULARIES = RESULTS / "vocabularies.png"
RECIPE_LABELS = ("Purpose", "Hardware", "Minutes", "Expected")
"""Labels in the header comment of every recipe."""
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def all_tables() -> dict[str, str]:
    """All tables that a page may hold, by name."""
    tables = {"configs": recipe_table(TOP / "configs"), "keys": key_tables()}
    return tables | generate_tables(RESULTS)


def recipe_table(folder: Path) -> str:
    """The recipes of a folder, described by their header comments."""
    rows = []
    for path in sorted(folder.glob("*.yaml")):
        header = path.read_text(encoding="utf-8").split("\nname:")[0]
        text = " ".join(line.removeprefix("#").strip() for line in header.splitlines())
        found = re.split(r"(?:^| )(Purpose|Hardware|Minutes|Expected|Corpus): ", text)
        labels = dict(zip(found[1::2], found[2::2], strict=True))
        if missing := [label for label in RECIPE_LABELS if label not in labels]:
            raise UserError(f"{path}: the header has no {missing[0]}:")
        cells = (labels[label].rstrip(".") for label in RECIPE_LABELS)
        rows.append((f"[{path.stem}]({path.name})", *cells))
    return markdown.table(("recipe", *map(str.lower, RECIPE_LABELS)), rows)


def key_tables() -> str:
    """A table of the configuration's keys for each section."""
    parts = []
    for section, (meaning, keys) in sections().items():
        rows = [
            (f"`{key.name}`", key.type, f"`{key.default}`" if key.default else "", key.meaning)
            for key in keys
        ]
        title = f"### {section}\n\n" if section else ""
        table = markdown.table(("key", "type", "default", "meaning"), rows)
        parts.append(f"{title}{meaning}\n\n{table}")
    return "\n\n".join(parts)


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


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [page for pattern in PAGES for page in TOP.glob(pattern)]


def write_pages() -> None:
    """Write every page with its tables, and the figure; raises UserError as `update`."""
    tables = all_tables()
    for page in pages():
        page.write_text(update(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    draw_vocabularies(RESULTS, VOCABULARIES)
    with Image.open(VOCABULARIES) as picture:  # a palette takes about a third of the bytes
        plain = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    plain.save(VOCABULARIES, optimize=True)
