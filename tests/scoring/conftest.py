"""A run on the items of users."""

from pathlib import Path

import numpy as np
import pytest

from lm.cli import main

ITEMS = """\
name: items
data: {{dir: {folder}, files: {{train: events.csv}}, format: csv, sequences: independent,
  user_field: user, split: leave_one_out}}
model: {{hidden: 12, layers: 1}}
optim: {{lr: 0.01}}
train: {{max_steps: 30, batch_size: 4, seq_len: 8, threads: 1}}
"""


@pytest.fixture(scope="session")
def items_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on users who go through 20 items, from a place of their own on."""
    folder = tmp_path_factory.mktemp("items")
    rows = ["user,item,time"]
    rng = np.random.default_rng(7)
    for user in range(60):
        start = rng.integers(20)
        for time in range(rng.integers(1, 9)):
            rows.append(f"u{user},item {(start + time) % 20},{time}")
    rows += ["u61,item 3,1", "u61,rare,2", "u61,item 4,3"]  # the second is in no event of training
    rows += ["u60,item 3,1", "u60,item 4,2", "u60,never seen before,3"]
    (folder / "events.csv").write_text("\n".join(rows))
    config = folder / "items.yaml"
    config.write_text(ITEMS.format(folder=folder))
    assert main(["train", str(config), f"--run_dir={folder / 'run'}", "--no-progress"]) == 0
    return folder / "run"
