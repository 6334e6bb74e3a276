"""`lm report`: a page of its own, with the figures of the run."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree

import pytest

from lm.run import TrainedRun


class Page(HTMLParser):
    """What a page shows, and which tags and sources it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown, self.tags, self.sources = "", set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run", "pieces_run", "items_run"])
def test_a_page_has_the_figures_of_a_run_and_no_other_file(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, printed: Callable[..., str]
) -> None:
    run = copytree(request.getfixturevalue(name), tmp_path / "a <b>")
    ranking = ["--ranking"] if name == "items_run" else []
    printed("evaluate", run, *ranking)
    path = Path(printed("report", run, "--samples=2").strip())
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not page.tags & {"script", "link", "b"}  # the name of the folder is escaped
    assert "a <b>" in page.shown
    description = TrainedRun(run, "cpu").description
    assert f"{description.valid_perplexity:,.4f}" in page.shown
    titles = ["Training", "Figures", "Classes", "Settings"]
    titles += [] if ranking else ["Where the loss is", "Samples"]
    if name == "pieces_run":
        titles.remove("Classes") if "output: {tree: full" in page.shown else None
    for title in titles:
        assert title in page.shown
    assert ("hit_rate" if ranking else "test") in page.shown
