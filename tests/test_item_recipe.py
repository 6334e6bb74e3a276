"""`lm new` of a table of events: from the table to a ranking without an edited file."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import lm
from lm.cli import main
from lm.config import load_config
from lm.recipe.texts import ITEMS, fit
from tests.conftest import Printed
from tests.data_prep.conftest import write_table

pytestmark = pytest.mark.usefixtures("current_folder")


def write(name: str, user: str, item: str, time: str, *, lengths: list[int]) -> None:
    """Users with so many events, of the items 1, 2, …, 11, 0, 1, …, the last event first."""
    rows = [
        {user: f"u{number}", item: place % 12, time: place}
        for number, length in enumerate(lengths)
        for place in reversed(range(1, length + 1))
    ]
    write_table(Path(name), rows)


@pytest.mark.parametrize(
    ("name", "columns", "options"),
    [
        ("shop.parquet", ("user", "item", "time"), []),
        ("shop.csv", ("who", "what", "when"), ["--items", "who", "what", "when"]),
    ],
)
def test_a_table_becomes_a_ranking_in_three_commands(
    name: str, columns: Any, options: Any, printed: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    write(name, *columns, lengths=[14] * 10 + [2, 1])
    name = str(Path(name).rename(name.replace("csv", "dat")))  # whose first line tells what it is
    out = printed("new", "my.yaml", f"--text={name}", *options)
    assert f"{name}, 143 events of 12 users with 12 items, in the order of {columns[2]}\n" in out
    assert "2 users with fewer than three events are in train alone\n" in out
    assert Path("my.yaml").read_text().startswith(f"# {out.splitlines()[0]}\n# split: ")
    train, evaluate = (line.removeprefix("then: ").split() for line in out.splitlines()[3:5])
    caplog.set_level("INFO")
    assert main([*train[1:], "--no-progress", "--train.max_steps=2"]) == 0
    assert "2 of 12 users have fewer than three events and are in training alone" in caplog.text
    assert "spelling" not in caplog.text
    assert not list(Path("runs/my").glob("**/speller.npz"))
    found = json.loads(printed(*evaluate[1:], "--json"))
    assert (found["predictions"], found["items"], found["excluded"]) == (10, 12, "seen")
    assert (found["unknown_targets"], found["excluded_targets"]) == (0, 10)  # all had item 2
    model = lm.load("runs/my", device="cpu")
    assert model.topk([3, 11], 5) == model.topk(["3", "11"], 5)  # as the table has them
    assert (model.id(11), model.word(model.id(11))) == (model.id("11"), "11")
    by_number = model.candidate_log_prob([3], [0, 7])
    torch.testing.assert_close(by_number, model.candidate_log_prob(["3"], ["0", "7"]))
    assert main(["prepare", "runs/my"]) == 0
    assert "runs/my/data is up to date" in caplog.text


def test_without_a_time_the_order_is_that_of_the_rows(printed: Printed) -> None:
    write("a.jsonl", "u", "i", "t", lengths=[3, 4])
    summary = printed("new", "my.yaml", "--text=a.jsonl", "--items", "u", "i")
    assert "with 4 items (2 in valid and test alone), in the order of the rows\n" in summary
    assert "runs/my --ranking\n" in summary
    data = load_config("my.yaml").data
    assert (data.format, data.user_field, data.item_field) == ("json", "u", "i")
    assert (data.time_field, data.split, data.sequences) == (None, "leave_one_out", "independent")


def test_lines_of_a_user_and_items_become_a_table_as_the_error_says(
    printed: Printed, complaint: Printed
) -> None:
    Path("toys.txt").write_text("7 1 2 3\n8 2 9 1\n8 4\n")
    new, columns = ("new", "my.yaml"), ("--items", "user", "item")
    problem = complaint(*new, "--text=toys.txt", *columns)
    command = problem[problem.index("awk") : problem.index(", --items")]
    subprocess.run(command.replace("FILE", "toys.txt"), shell=True, check=True)
    found = "7 events of 2 users with 5 items (2 in valid and test alone), in the order of the rows"
    assert f"{found}\n" in printed(*new, "--text=NEW.csv", *columns)


def test_more_events_have_the_settings_of_the_recipe_for_items() -> None:
    events = {"sequences": "independent"}
    content, _ = fit(Path("my.yaml"), {}, 190_000, 1_800, ITEMS, events=events)
    Path("my.yaml").write_text(content)
    shipped = load_config(Path(__file__).parents[1] / "configs/items.yaml")
    mine = load_config("my.yaml")
    assert (mine.model.hidden, mine.optim) == (shipped.model.hidden, shipped.optim)
    assert (mine.train.batch_size, mine.train.seq_len) == (64, 64)
    assert (mine.train.max_epochs, mine.model.input_pieces) == (24, None)
    assert (mine.tokenizer.min_count, mine.tokenizer.vocab_size) == (1, None)


@pytest.mark.parametrize(
    ("events", "items", "expected"),
    [
        (198_502, 12_103, (128, "adamw", 256, 24, 0.45, True, 0)),  # Amazon Beauty
        (198_502, 1_985, (200, "sgd", 64, 24, 0.45, False, 60)),  # 100 events per item
        (15_000, 1_000, (64, "adamw", 8, None, 0.0, False, 30)),  # too few
        (1_000_209, 3_708, (200, "sgd", 64, 12, 0.25, False, 112)),  # MovieLens 1M
        (2_000_000, 60_001, (200, "sgd", 64, 12, 0.2, False, 1_000)),  # steps of AdamW: too long
    ],
)
def test_tables_with_few_events_per_item_have_settings_of_their_own(
    events: int, items: int, expected: tuple[object, ...]
) -> None:
    content, _ = fit(Path("my.yaml"), {}, events, items, ITEMS, events={"sequences": "independent"})
    Path("my.yaml").write_text(content)
    config = load_config("my.yaml")
    model, train, shortlist = config.model, config.train, config.classes.shortlist
    found = (model.hidden, config.optim.optimizer, train.batch_size, train.max_epochs)
    assert (*found, model.dropout, model.residual, shortlist) == expected
