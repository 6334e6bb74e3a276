"""`lm report`: a page of its own, with the figures of the run."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from lm.run import TrainedRun


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run", "pieces_run", "items_run"])
def test_a_page_has_the_figures_of_a_run_and_no_other_file(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, printed: Callable[..., str]
) -> None:
    run = copytree(request.getfixturevalue(name), tmp_path / "a <b>")
    ranking = ["--ranking"] if name == "items_run" else []
    printed("evaluate", run, *ranking)
    path = Path(printed("report", run, "--samples=2").strip())
    assert path == run / "report.html"
    page = path.read_text(encoding="utf-8")
    assert {*re.findall(r"(?:src|href)=(.{23})", page)} <= {'"data:image/png;base64,'}
    assert not re.search("<(script|link|b)[ >]", page)  # the name of the folder is escaped
    shown = html.unescape(re.sub("<[^>]*>", "", page))
    assert "a <b>" in shown
    assert f"{json.loads(printed('info', run, '--json'))['parameters']:,} parameters" in shown
    description = TrainedRun(run, "cpu").description
    assert f"{description.valid_perplexity:,.4f}" in shown
    titles = ["Training", "Figures", "Classes", "Settings"]
    titles += [] if ranking else ["Where the loss is", "Samples"]
    if name == "pieces_run":
        titles.remove("Classes") if "output: {tree: full" in shown else None
    for title in titles:
        assert title in shown
    assert ("hit_rate" if ranking else "test") in shown
