"""`lm new` for a table of events: a recipe for sequences of items, by the last item of each user.

The table is read where it is. The settings are those of `configs/items.yaml`, or with few events
per item `SPARSE_ITEMS`, and of small texts below 20,000 events; size, epochs and dropout depend on
the number of events as on that of tokens, a shortlist on that of items.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from data_prep.corpus.events import count_events
from data_prep.corpus.hints import AS_TABLE, find_columns
from data_prep.errors import UserError
from data_prep.settings import DataConfig, SplitFiles
from data_prep.storage import folder_to_fill
from lm.config import Config
from lm.recipe.texts import ITEMS, check_names, fit, write_recipe

COLUMNS = ("user", "item", "time")
"""Columns of a table that is one of events unless another option says otherwise."""


def has_events(path: Path) -> bool:
    """Whether there is a table with the columns `COLUMNS` and without a column `text`."""
    names = find_columns(path)[1] if path.is_file() else []
    return {*COLUMNS} <= {*names} and "text" not in names


def new_item_recipe(
    path: Path,
    table: Path,
    columns: Sequence[str] = COLUMNS,
    backbone: Literal["lstm", "transformer"] = "lstm",
) -> str:
    """Write a recipe; return a summary for the user.

    Args:
        path: the recipe to write; its name is that of the run.
        table: the events, a parquet, JSON or CSV file.
        columns: those of the user, the item and, if there is one, the time.
        backbone: network of the model.

    Raises:
        UserError: if the recipe or the run exists, the table cannot be read, has not these columns
            or not the values that they need, or no user has three events.
    """
    if len(columns) not in (2, 3):
        raise UserError(f"--items: expected USER ITEM [TIME], got {len(columns)} names")
    run = Config(name=path.stem).run_path
    check_names(path, run, [table])
    format, _ = find_columns(table, columns)
    if format == "text":
        raise UserError(f"{table}: plain text has no columns {', '.join(columns)}; {AS_TABLE}")
    user, item, *time = columns
    settings: dict[str, Any] = {
        "format": format,
        "sequences": "independent",
        "user_field": user,
        "item_field": item,
        "time_field": time[0] if time else None,
        "split": "leave_one_out",
    }
    counts = count_events(DataConfig(files=SplitFiles(train=str(table)), **settings))
    sizes = counts.events, counts.items + 2, ITEMS
    content, model = fit(path, {"train": table}, *sizes, backbone, events=settings)
    order = f"in the order of {time[0]}" if time else "in the order of the rows"
    held_out = f" ({counts.held_out:,} in valid and test alone)" * bool(counts.held_out)
    summary = (
        f"{path}: for {table}, {counts.events:,} events of {counts.users:,} users with"
        f" {counts.items:,} items{held_out}, {order}\n"
        f"split: the last item of each user is test, the one before it valid; {counts.short:,}"
        f" users with fewer than three events are in train alone\n"
        f"model: {model}\n"
    )
    with folder_to_fill(path.parent):
        write_recipe(path, summary, content)
    recipe, run_dir = shlex.quote(str(path)), shlex.quote(str(run))
    return (
        f"{summary}then: lm train {recipe}\n      lm evaluate {run_dir} --ranking\n"
        f"      lm recommend {run_dir} --events {shlex.quote(str(table))}"
    )
