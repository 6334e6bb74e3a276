"""Reports of a run: its sizes and its word classes, as JSON, as text and as a picture."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.font_manager import fontManager

from lm.cli import main
from tests.conftest import corpus_of

Reported = Callable[..., Any]


@pytest.fixture
def reported(lstm_run: Path, printed: Callable[..., str]) -> Reported:
    """`reported(verb, *options)`: what a command prints as JSON about a run, and as text."""

    def run(verb: str, *options: str) -> tuple[dict[str, Any], str]:
        values = json.loads(printed(verb, lstm_run, "--json", *options))
        return values, printed(verb, lstm_run, *options)

    return run


def test_info_counts_the_parameters_of_the_model(reported: Reported) -> None:
    info, table = reported("info")
    assert re.search(rf"^parameters +{info['parameters']:,}$", table, re.MULTILINE)
    vocab_size, nodes, hidden = info["vocab_size"], info["tree_nodes"], 12
    assert info["embedding_parameters"] == vocab_size * hidden
    assert info["backbone_parameters"] == 2 * 4 * (2 * hidden * hidden + 2 * hidden)
    assert info["output_parameters"] == (vocab_size + nodes - 1) * (hidden + 1)
    parts = ("embedding_parameters", "backbone_parameters", "output_parameters")
    assert info["parameters"] == sum(info[part] for part in parts)
    zeros = (vocab_size + nodes - 1) * 4  # rows of 12 numbers are followed by 4 zeros
    megabytes = (info["parameters"] + zeros) * 4 / 2**20
    sizes = [info[f"{part}_mib"] for part in ("weights", "gradients", "optimizer")]
    assert sizes == [round(times * megabytes, 1) for times in (1, 1, 2)]
    sizes += [info["batch_mib"], info["other_mib"]]
    assert info["memory_mib"] == pytest.approx(sum(sizes), abs=0.3)
    assert info["memory_available_mib"] > info["memory_mib"]


def test_the_class_report_of_a_run_sums_to_all_tokens(
    reported: Reported, prepared_dir: Path
) -> None:
    report, table = reported("classes", "--words=2")
    assert table.startswith(f"{report['num_word_classes']} classes of ")
    word_class = np.load(prepared_dir / "classes.npy")
    assert report["num_word_classes"] == len(np.unique(word_class))
    assert sum(report["token_mass"]) == pytest.approx(1, abs=1e-12)
    assert report["sizes"] == np.bincount(word_class).tolist()
    assert max(len(words) for words in report["top_words"]) == 2
    assert "the" in {word for words in report["top_words"] for word in words}


def test_the_classes_are_drawn(
    tiny: Path,
    lstm_run: Path,
    tmp_path: Path,
    printed: Callable[..., str],
    complaint: Callable[..., str],
) -> None:
    assert "classes of" in printed("classes", lstm_run, f"--plot={tmp_path / 'classes.svg'}")
    picture = (tmp_path / "classes.svg").read_text()
    assert "classes with the most tokens" in picture
    assert "shortlist" not in picture
    options = ["--classes.shortlist=3", f"--run_dir={tmp_path}"]
    assert main(["prepare", str(tiny), *options]) == 0
    assert main(["classes", str(tiny), *options, f"--plot={tmp_path / 'classes.svg'}"]) == 0
    assert "classes, shortlist of 3 words, " in (tmp_path / "classes.svg").read_text()
    for name in ("classes.oak", "classes"):
        message = complaint("classes", lstm_run, f"--plot={tmp_path / name}")
        assert message.startswith(f"--plot {tmp_path / name}: the name must end in one of .")
    message = complaint("classes", lstm_run, "--plot=/nowhere/classes.svg")
    assert message == "/nowhere/classes.svg cannot be written: No such file or directory"


def test_classes_whose_words_no_font_has_are_drawn_by_number(
    tiny: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fonts = [font for font in fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(fontManager, "ttflist", fonts)
    lines = [f"\u4e2d{a} \u4e2d the b{b}\n" for a in "aeiou" for b in "aeiou"]
    options = [*corpus_of(tmp_path, "".join(lines)), "--classes.num_word_classes=4"]
    assert main(["prepare", str(tiny), *options]) == 0
    caplog.clear()
    picture = tmp_path / "classes.svg"
    assert main(["classes", str(tiny), *options, f"--plot={picture}"]) == 0
    message = r"the picture has numbers of classes: no installed font has '\u4e2d'"
    assert caplog.messages[-1] == message
    labels = re.findall("<!-- (.*) -->", picture.read_text())
    assert [label for label in labels if label.startswith("class ")]
    assert not any("\u4e2d" in label for label in labels)
    assert any("the" in label.split() for label in labels)
