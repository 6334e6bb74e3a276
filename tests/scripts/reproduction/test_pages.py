"""The tables and figures of all pages are generated, from logs and recipes."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from data_prep.errors import UserError
from scripts.reproduction.pages import VOCABULARIES, all_tables, draw_vocabularies, pages, update
from scripts.reproduction.runs import RESULTS, TOP
from scripts.reproduction.tables import table_of_log


def cells(table: str) -> list[list[str]]:
    """The cells of a table without its header."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_tables_of_all_pages_are_current() -> None:
    tables = all_tables()
    assert len(pages()) >= 5
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert update(text, tables) == text, f"{page}: run `scripts/reproduce pages`"
    recipes = sorted(path.stem for path in (TOP / "configs").glob("*.yaml"))
    assert [row[0] for row in cells(tables["configs"])] == [f"[{r}]({r}.yaml)" for r in recipes]


def test_a_page_with_an_unknown_or_open_table_is_an_error() -> None:
    with pytest.raises(UserError, match="no table 'oak'; there are elm"):
        update("<!-- table: oak -->\n<!-- end -->", {"elm": ""})
    with pytest.raises(UserError, match="expected `<!-- end -->` after every"):
        update("<!-- table: elm -->\n| 1 |\n", {"elm": ""})


def test_the_last_row_of_a_log_with_the_same_names_counts(tmp_path: Path) -> None:
    rows = [("a", 1, 0.5), ("b", 1, 2.5), ("a", 2, 1.5), ("a", 1, 3.5), ("c", 9, 1), ("b", 2, None)]
    log = [{"method": m, "size": n, "ratio": r, "why": "memory"} for m, n, r in rows]
    (tmp_path / "oak.jsonl").write_text("\n".join(map(json.dumps, log)))
    table = table_of_log(
        tmp_path,
        log="oak",
        row="{method}",
        row_titles={"b": "B", "z": "Z", "a": "A"},
        column="N = {size}",
        cell="{ratio:.2f}",
        otherwise="{why}",
    )
    assert table.splitlines()[0] == "|  | N = 1 | N = 2 | N = 9 |"
    assert cells(table) == [["B", "2.50", "memory", "–"], ["A", "3.50", "1.50", "–"]]
    columns = {"method": "{method}", "ratio": "{ratio:.1f}"}
    where = {"size": 1}
    table = table_of_log(tmp_path, log="oak", where=where, key=["method"], columns=columns)
    assert cells(table) == [["a", "3.5"], ["b", "2.5"]]


def test_speeds_are_relative_to_the_full_softmax_of_the_corpus() -> None:
    tables = all_tables()
    for row in cells(tables["summary"]):
        *_, layer, _, ratio = row
        assert ratio == "1.00" or not layer.startswith("full softmax")
    sizes = cells(tables["vocabularies"])
    assert [row[0] for row in sizes] == ["10,000", "33,278", "203,887", "9,867,684"]
    assert [row[5] for row in sizes] == ["1.5", "2.3", "12", "–"]
    for row in sizes[:3]:
        full, ours, speedup = (float(text.replace(",", "")) for text in row[2:5])
        assert speedup == pytest.approx(ours / full, rel=0.05)
    declared = cells(tables["comparisons"])
    assert [row[3] == "–" for row in declared] == [False, False, False, False, True]
    assert sizes[0][6:] == declared[0][3:5]
    (of_gpu,) = (row for row in cells(tables["gpu_layer"]) if row[0].startswith("267,735"))
    ours, full, published = float(of_gpu[1]), float(of_gpu[2]), float(of_gpu[5])
    times = f"{ours} ms in a CUDA graph; full softmax: PyTorch {full:.0f}, "
    times += f"fastest published {published:.0f}, computed"
    assert times in (TOP / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved, by the name of their file."""
    found: dict[str, Figure] = {}

    def note(self: Figure, path: Path, **options: int) -> None:
        found[path.name] = self

    monkeypatch.setattr(Figure, "savefig", note)
    return found


def test_every_line_of_the_figure_goes_from_left_to_right(
    saved: dict[str, Figure], tmp_path: Path
) -> None:
    draw_vocabularies(RESULTS, tmp_path / VOCABULARIES.name)
    (figure,) = saved.values()
    for line in [line for axes in figure.axes for line in axes.lines]:
        places, heights = (np.asarray(each, float) for each in line.get_data())
        assert len(places) > 1, line.get_label()
        assert np.diff(places).min() > 0, (line.get_label(), places)
        assert np.isfinite(heights).all(), line.get_label()
