"""The tables of all pages are generated from the logs."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import UserError
from scripts.reproduction.benchmark_tables import SPEEDS, relative_speed, training_speed
from scripts.reproduction.pages import PAGES, generate_tables, update

SMALL = "ptb_lstm_small.yaml"


def test_the_tables_of_all_pages_are_current() -> None:
    tables = generate_tables()
    pages = [page for page in PAGES if page.exists()]
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert update(text, tables) == text, f"{page}: run `scripts/reproduce pages`"


def test_a_page_with_an_unknown_or_open_table_is_an_error() -> None:
    with pytest.raises(UserError, match="no table 'oak'; there are elm"):
        update("<!-- table: oak -->\n<!-- end -->", {"elm": ""})
    with pytest.raises(UserError, match="expected `<!-- end -->` after every"):
        update("<!-- table: elm -->\n| 1 |\n", {"elm": ""})


def speed(layer: str, tokens_per_second: float, precision: str, device: str) -> dict[str, Any]:
    """A row of the log of training speed."""
    return {
        "config": SMALL,
        "tree": layer,
        "tokens_per_second_median": tokens_per_second,
        "overrides": [f"--train.precision={precision}"],
        "device": device,
    }


def test_speeds_are_relative_to_a_layer_measured_last_on_the_same_processor(
    tmp_path: Path,
) -> None:
    path_sum = "two_level,model.input_embedding=path_sum,model.count_word_dropout=5"
    assert path_sum in SPEEDS[SMALL]
    rows = [
        speed("full", 100, "bf16-mixed", "A"),
        speed("two_level", 500, "bf16-mixed", "A"),
        speed("full", 200, "bf16-mixed", "B"),
        speed("two_level,model.input=path,model.count_word_dropout=5", 300, "bf16-mixed", "B"),
        speed("two_level,model.input=path,model.count_word_dropout=5", 600, "bf16-mixed", "B"),
        speed("full", 50, "32-true", "B"),
    ]
    (tmp_path / "training_speed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert relative_speed(tmp_path, SMALL, path_sum, "full") == "3.00"
    assert relative_speed(tmp_path, SMALL, "two_level", "full") == "5.00"
    assert relative_speed(tmp_path, SMALL, "adaptive", "full") == "–"
    assert relative_speed(tmp_path, SMALL, None, "full") == "–"


def test_the_first_row_of_a_table_of_speeds_is_1(tmp_path: Path) -> None:
    layers = list(SPEEDS[SMALL])
    rows = [speed(layer, 10.0 * (i + 1), "bf16-mixed", "A, x") for i, layer in enumerate(layers)]
    rows.append(speed(layers[0], 7, "32-true", "A, x"))  # incomplete: not a column
    (tmp_path / "training_speed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    header, _, first, second, *_ = training_speed(tmp_path, SMALL).splitlines()
    assert header == "| output layer | A, bf16-mixed |"
    assert first.endswith("| 1.00 (10 tokens/s) |")
    assert second.endswith("| 2.00 |")


def test_a_relative_speed_is_printed_with_its_full_softmax_at_1() -> None:
    lines = generate_tables()["overview"].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    corpora = [row for row in rows[2:] if len(row) == 4]
    assert len(corpora) == 2
    assert all(row[1] == "full softmax" and row[3] == "1.00" for row in corpora)
