"""The generated tables and figures of Markdown pages.

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`.
`scripts/reproduce pages` writes all of them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from data_prep.errors import UserError
from lm.config.reference import sections
from scripts import TOP
from scripts.reproduction import markdown
from scripts.reproduction.runs import RESULTS
from scripts.reproduction.tables import Row, generate_tables, last_rows, read_log

PAGES = ("README.md", "*/README.md", "lm/output/sharded/README.md", "scripts/results/*.md")
PICTURE = RESULTS / "vocabularies.png"
RECIPE_LABELS = ("Purpose", "Hardware", "Minutes", "Expected")
"""Labels in the header comment of every recipe."""
LAYERS = {
    "full": ("full softmax", "C3"),
    "adaptive": ("adaptive softmax", "C1"),
    "random": ("class-based softmax (ours)", "C0"),
}
"""Method in the log `output_layer` → label and color."""
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
    draw_vocabularies(RESULTS, PICTURE)
    with Image.open(PICTURE) as picture:  # a palette takes about a third of the bytes
        plain = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    plain.save(PICTURE, optimize=True)


def draw_vocabularies(results: Path, path: Path) -> None:
    """Draw seconds and memory of one step of the output layer against the vocabulary size.

    Solid lines are forward and backward, from the log `output_layer`, with layer memory. The
    dashed line is a step of our layer with row-wise gradients and the optimizer's update, from the
    log `scale`, with process memory.
    """
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (label, color) in LAYERS.items():
        rows = read_log(
            results, "output_layer", {"method": method, "refused": None, "dtype": "fp32"}
        )
        for row in rows:
            # Weights take as much memory as their gradients.
            row["memory"] = row["gradient_bytes"] + row["peak_bytes"]
        _line(left, rows, "vocab_size", "seconds_median", color=color, label=label)
        _line(right, rows, "vocab_size", "memory", 1e9, color=color, label=label)
    steps = read_log(results, "scale", {"method": "layer", "outcome": "done", "dtype": "fp32"})
    dashed: dict[str, Any] = {"fmt": "o--", "color": "C0", "mfc": "white"}
    dashed["label"] = "ours, with row-wise update"
    _line(left, steps, "vocab_size", "cpu_seconds", **dashed)
    _line(right, steps, "vocab_size", "process_peak_bytes", 1e9, **dashed)
    for axes, title in ((left, "seconds per step"), (right, "memory, GB")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="words in the vocabulary, N")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(True, alpha=0.3)
    kinds = [Line2D([], [], color="gray", label="layer memory")]
    kinds += [Line2D([], [], color="gray", label="process memory", linestyle="--")]
    right.legend(handles=kinds, loc="lower right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def _line(
    axes: Axes, rows: list[Row], x: str, y: str, unit: float = 1, fmt: str = "o-", **style: Any
) -> None:
    """Draw the field `y` against `x`, of the last row for each `x`."""
    points = sorted(last_rows(rows, lambda row: row[x]).items())
    axes.plot([at for at, _ in points], [row[y] / unit for _, row in points], fmt, **style)
