"""Ranks of single predictions, from which the figures follow; what `--ranking` announces."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.torch import load_file

import lm
from data_prep.prepared import Prepared
from data_prep.sequences import Sequences, find_sequences
from lm.model.files import read_description, save_model
from lm.run import TrainedRun
from lm.scoring import ranking
from tests.conftest import Printed
from tests.scoring.test_ranking import EOS, UNK, N, make


def evaluated(run: Path, printed: Printed, *options: str) -> Any:
    return json.loads(printed("evaluate", run, "--ranking", "--json", "--k=3", *options))


@pytest.mark.parametrize("exclude", ["nothing", "seen"])
def test_figures_follow_from_ranks_and_from_all_log_probabilities(
    exclude: str, items_run: Path, printed: Printed, tmp_path: Path
) -> None:
    path = tmp_path / "ranks.parquet"
    values = evaluated(items_run, printed, f"--exclude={exclude}", f"--ranks={path}")
    rows = parquet.read_table(path).to_pylist()
    rank = np.array([row["rank"] or np.inf for row in rows])
    truth = {"hit_rate": (rank <= 3).mean(), "ndcg": ((rank <= 3) / np.log2(1 + rank)).mean()}
    assert truth == pytest.approx({name: values["model"]["at"][0][name] for name in truth})
    assert values["model"]["mrr"] == pytest.approx((1 / rank).mean(), abs=1e-6)
    assert len(rows) == values["predictions"]
    assert rows[-1] == dict.fromkeys(rows[0]) | {"user": "u60", "position": 3}  # of a new item
    histories, model = dict[str, list[str]](), lm.load(items_run, device="cpu")
    for line in (items_run.parent / "events.csv").read_text().splitlines()[1:]:
        user, item, _ = line.split(",")
        histories.setdefault(user, []).append(item)
    for row in rows[:-1]:
        history = histories[row["user"]]
        before = [item for item in history[: row["position"] - 1] if item != "rare"]
        assert (history[-1], len(history)) == (row["item"], row["position"])
        p = model.log_prob(before).exp().double().numpy()
        p[[model.eos_id, model.unk_id, *(map(model.id, before) if exclude == "seen" else ())]] = 0
        p /= p.sum()
        target = model.id(row["item"])
        assert row["probability"] == pytest.approx(p[target], abs=1e-6)
        assert row["rank"] == 1 + np.argsort(-p, kind="stable").tolist().index(target)


def test_only_a_table_of_ranks_is_replaced(
    items_run: Path, printed: Printed, complaint: Printed, tmp_path: Path
) -> None:
    path, command = tmp_path / "ranks.parquet", ("evaluate", items_run, "--ranking", "--users=2")
    for _ in range(2):
        printed(*command, f"--ranks={path}")
    events = pa.table({"user": ["u"], "item": ["a"], "time": [1]})
    parquet.write_table(events, tmp_path / "events.parquet")
    (tmp_path / "text.parquet").write_text("user,item\n")
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "folder.parquet").mkdir()
    for name in ("events", "text", "empty", "folder"):
        found = complaint(*command, f"--ranks={tmp_path / name}.parquet")
        assert found.endswith(f"{name}.parquet: this is no table of ranks, and would be replaced")
    assert parquet.read_table(tmp_path / "events.parquet") == events


def test_targets_outside_the_catalogue_alone_are_missed(
    items_run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(found: Sequences, num_users: int) -> Sequences:
        assert num_users == 1
        keep = found.num_left_out > 0
        end = np.where(keep, found.end, found.begin)
        return found._replace(end=end, num_known=found.num_known * keep)

    monkeypatch.setattr(ranking, "_drawn", lost)
    path = tmp_path / "ranks.parquet"
    values = evaluated(items_run, printed, "--users=1", f"--ranks={path}")
    assert (values["predictions"], values["unknown_targets"], values["users"]) == (1, 1, 1)
    assert (values["model"]["at"][0]["hit_rate"], values["model"]["mrr"]) == (0, 0)
    (row,) = parquet.read_table(path).to_pylist()
    assert (row["user"], row["position"], row["item"], row["rank"]) == ("u60", 3, None, None)
    assert "1 not in the catalogue" in printed("evaluate", items_run, "--ranking", "--users=1")


def test_users_are_drawn_and_the_time_is_announced(
    items_run: Path,
    printed: Printed,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "ANNOUNCED_AFTER_SECONDS", -1)
    monkeypatch.setattr(ranking, "BLOCK_ELEMENTS", 1)
    draws = [evaluated(items_run, printed, "--users=9", "--no-progress") for _ in range(2)]
    assert draws[0] == draws[1]
    counts = ("users", "predictions", "excluded", "step", "num_steps", "checkpoint")
    assert [draws[0][name] for name in counts] == [9, 9, "seen", 30, 30, None]
    path = items_run / "evaluate-test-ranking-seen-9-users.json"
    assert draws[0] == json.loads(path.read_text())
    table = printed("evaluate", items_run, "--ranking", "--users=9")
    total = draws[0]["all_users"]
    assert table.startswith(
        f"test, the model of step 30 of 30: 9 items to predict of 9 users drawn from {total},"
        " among all 20 items of the training split\nitems that a user has had are left out (0.00 %"
        " of a user's training events repeat one; --exclude nothing ranks them too)\n"
    )
    method = "data.split: leave_one_out; seed: 1; model: best validation NDCG@10;"
    method += " intervals: 1,000 bootstrap draws of users, 2.5 % to 97.5 %"
    assert (table.splitlines()[-1], draws[0]["method"]) == (method, method)
    assert caplog.text.count("ranking test: about 0:00:0") == 3
    assert evaluated(items_run, printed, "--users=999")["users"] == total
    limits = evaluated(items_run, printed, "--users=1")["model"]["at"][0]["hit_rate_interval"]
    assert limits == [None, None]  # no interval of one user
    assert "… " not in printed("evaluate", items_run, "--ranking", "--users=1").splitlines()[4]


def test_repeats_in_training_decide_what_is_left_out(
    items_run: Path,
    printed: Printed,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Prepared, "repeated_share", 0.6)
    rule = "items that a user has had may come again (60.00 % of a user's training events repeat"
    assert rule in printed("evaluate", items_run, "--ranking")
    (tmp_path / "users.txt").write_text('["item 3"]\n')
    printed("recommend", items_run, f"--history={tmp_path / 'users.txt'}")
    assert rule in caplog.text


def test_a_long_history_leaves_out_its_distinct_items() -> None:
    tokens = np.append(np.random.default_rng(0).integers(2, N, size=5_000), EOS)
    sequences = find_sequences(tokens, eos_id=EOS, unk_id=UNK)
    (line,) = sequences.lines()
    for block, _, places in ranking._blocks(make("lstm"), sequences, EOS, "seen"):
        for place, excluded in zip(places.tolist(), block.excluded, strict=True):
            assert sorted(excluded) == sorted({*line[:place].tolist()})


def test_nan_scores_are_refused(items_run: Path, tmp_path: Path, complaint: Printed) -> None:
    run = shutil.copytree(items_run, tmp_path / "run")
    weights = load_file(run / "model.safetensors")
    weights["output.weight"][3] = np.nan
    save_model(run, weights, read_description(run))
    (tmp_path / "users.txt").write_text('["item 3"]\n')
    ranking = "evaluate", run, "--ranking"
    for command, problem in {
        ranking: r"run: [\d,]+ of [\d,]+ log-probabilities are not finite: we",
        ranking[:2]: "run: the log-probability of the text is nan: weights",
        ("recommend", run, f"--history={tmp_path / 'users.txt'}"): "run: log-probabilities of pos",
    }.items():
        assert re.search(problem, complaint(*command, code=5))
    file = run / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    recommend = ("recommend", run, f"--history={tmp_path / 'users.txt'}", "--k=5")
    assert complaint(*recommend, code=4).startswith(f"{file} is damaged")


def test_a_checkpoint_is_evaluated_in_place_of_the_model(
    items_run: Path, printed: Printed, tmp_path: Path
) -> None:
    run = shutil.copytree(items_run, tmp_path / "run")
    kept = evaluated(run, printed)
    weights = load_file(run / "model.safetensors")
    changed = weights | {"output.weight": 0 * weights["output.weight"]}
    save_model(run, changed, read_description(run))
    last = run / "checkpoints" / "last.ckpt"
    for name in ("last", str(last)):
        found = evaluated(run, printed, f"--checkpoint={name}")
        assert str(last) in found["method"]
        assert found == kept | {"checkpoint": str(last), "method": found["method"]}
    assert (run / "evaluate-test-ranking-seen-step-30.json").exists()
    assert f"the model of step 30 of 30 ({last})\n" in printed("evaluate", run, "--checkpoint=last")
    assert TrainedRun(run).description.step == 30
