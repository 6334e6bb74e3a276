"""The comparison of output layers: equal points, a choice by validation, test figures once."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_prep.errors import UserError
from lm.config import load_config
from scripts.reproduction import search
from scripts.reproduction.protocol import PROTOCOL, PROTOCOLS, SEARCH, Protocol, log_of
from scripts.reproduction.runs import TOP, read_logs
from scripts.reproduction.search_tables import (
    LINES,
    NGRAMS,
    expected_lowest,
    final_logs,
    upper_bound,
)


@pytest.mark.parametrize("path", PROTOCOLS.values(), ids=lambda path: path.stem)
def test_every_method_has_the_same_points_and_valid_configurations(path: Path) -> None:
    protocol = Protocol.read(path)
    for trial in range(max(1, protocol.num_trials)):
        shared = []
        for method in protocol.methods:
            for stage in ("trial", "final"):
                options = protocol.options(method, trial, stage)
                config = load_config(TOP / protocol.config, [f"--{each}" for each in options])
            optim = config.optim
            shared.append(
                (optim.lr, optim.clip, optim.weight_decay, optim.schedule, config.model.dropout)
            )
        assert len(set(shared)) == 1


OWN = TOP / "scripts" / "reproduction" / "PROTOCOL.md"


def own_protocol(tmp_path: Path, **changes: Any) -> Path:
    """The protocol of PROTOCOL.md, "A comparison of your own", with other keys; None for none."""
    text = OWN.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    fields = yaml.safe_load(text) | {"config": "configs/ptb_lstm_small.yaml"} | changes
    path = tmp_path / "protocol.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in fields.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_trial": 3}, "unknown key num_trial; did you mean num_trials?"),
        ({"ngram_order": None}, "ngram_order is missing"),
        ({"baseline": "ful"}, "baseline: 'ful' is not one of the methods; did you mean full?"),
        (
            {"space": {"optim.lr": {"log_uniform": [0, 40]}}},
            r"space.optim.lr: log_uniform takes two numbers \[low, high\], got \[0, 40\]",
        ),
        ({"space": {"optim.lr": {}}}, "space.optim.lr: expected one of choice, .*, got 0"),
        ({"space": {"schedule": {"choice": ["cosin"]}}}, "'cosin' is not one of the schedules"),
        ({"methods": {"full": {"options": ["output.trees=full"]}}}, "unknown key output.trees"),
    ],
)
def test_a_mistake_in_a_protocol_is_one_line_that_names_it(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = own_protocol(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        Protocol.read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("corpus", PROTOCOLS)
def test_logs_are_of_declared_runs(corpus: str) -> None:
    protocol, results = Protocol.read(PROTOCOLS[corpus]), SEARCH.with_name(f"search{corpus}")
    runs = [*protocol.trials(results), *protocol.finals(results)]
    declared = {(run.row, run.seed): run.command for run in runs}
    logs = dict(read_logs(results))
    ngrams = logs.pop(NGRAMS, None)
    assert logs
    for key, log in logs.items():
        assert log["command"] == declared[key]
    evaluated = {f"{row}-{seed}" for (row, seed), log in logs.items() if "test" in log}
    with np.load(results / LINES) as lines:
        assert set(lines) == evaluated | {"tokens"} | ({NGRAMS[0]} if ngrams else set())


def test_the_expected_lowest_is_the_mean_over_all_choices() -> None:
    values = [5.0, 3.5, 8.0, 3.0, 4.0]
    for num in range(1, 6):
        choices = itertools.combinations(values, num)
        assert expected_lowest(values, num) == pytest.approx(statistics.fmean(map(min, choices)))


def test_the_bound_is_exceeded_by_one_mean_in_twenty() -> None:
    drawn = np.random.default_rng(1).normal(0.3, 2.0, (4000, 5))
    share = np.mean([upper_bound(row.tolist()) < 0.3 for row in drawn])
    assert share == pytest.approx(0.05, abs=0.012)
    assert upper_bound([1.0]) == math.inf


def first_mean(tests: list[dict[str, Any]], which: str) -> float:
    """Nats per token of the first bin, the mean over runs."""
    bins = [test["by_frequency"][which][0] for test in tests]
    return statistics.fmean(each["nll_nats"] / each["tokens"] for each in bins)


def test_trials_choose_a_point_and_the_test_is_evaluated_once(
    tiny: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = yaml.safe_load(PROTOCOL.read_text())
    fields |= {"config": str(tiny), "num_trials": 2, "final_seeds": [1, 2]}
    fields["shared"] = ["train.max_epochs=null", "classes.dimensions=4", "optim.optimizer=sgd"]
    fields["stages"] = {"trial": ["train.max_steps=2"], "final": ["train.max_steps=3"]}
    fields["methods"] = {
        "full": {"options": ["output.tree=full"]},
        "classes": {
            "options": ["classes.method=random"],
            "space": {"classes.shortlist": {"choice": [0, 3]}},
        },
    }
    path, results = tmp_path / "protocol.yaml", tmp_path / "logs" / "search"
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    options = [f"--protocol={path}", f"--runs={tmp_path}", f"--results={results}", "--no-progress"]
    data = f"--data-dir={corpus}"
    with pytest.raises(UserError, match="--data-dir is required"):
        search.main(["trials", *options])
    search.main(["trials", *options, data])
    protocol = Protocol.read(path)
    for method in protocol.methods:
        trials = [run for run in protocol.trials(results) if run.row.startswith(method)]
        logs = [log_of(run) or {} for run in trials]
        lowest = [min(row.valid_perplexity for row in run.curve) for run in trials]
        assert [log["valid_perplexity"] for log in logs] == lowest
        assert "test" not in logs[0]
        assert protocol.chosen(method, results) == lowest.index(min(lowest))
    search.main(["finals", *options, data])
    search.main(["test", *options])
    *_, table, _, targets, _, previous = capsys.readouterr().out.strip().split("\n\n")
    finals = list(protocol.finals(results))
    assert [(run.row, run.seed) for run in finals] == [
        *(("full", 1), ("classes", 1), ("full", 2), ("classes", 2))
    ]
    by_method = final_logs(protocol, results)
    tests = [by_method[run.row][run.seed]["test"] for run in finals]
    (ngrams,) = {id(log): log["test"] for log in by_method["Kneser–Ney 5-gram"].values()}.values()
    for test in [*tests, ngrams]:
        assert test["lines"].tokens.sum() == test["tokens"]
        mean = test["lines"].nats.sum() / test["tokens"]
        assert math.exp(mean) == pytest.approx(test["perplexity"], rel=1e-3)
    one, two = (tests[i + 1]["perplexity"] - tests[i]["perplexity"] for i in (0, 2))
    assert f"| {(one + two) / 2:+.2f} | {upper_bound([one, two]):+.2f} |" in table
    assert "| Kneser–Ney 5-gram |" in table
    assert f"| {ngrams['perplexity']:.2f} |" in table
    for which, shown in (("target", targets), ("previous", previous)):
        for row, logs in (("classes", tests[1::2]), ("Kneser–Ney 5-gram", [ngrams])):
            difference = first_mean(logs, which) - first_mean(tests[::2], which)
            assert f"| {row} | {difference:+.4f} |" in shown
    with pytest.raises(UserError, match="all 4 final runs with a log have been evaluated, once"):
        search.main(["test", *options])
    with pytest.raises(UserError, match="no method 'oak'; there are full, classes"):
        search.main(["trials", *options, "--methods", "oak"])
