"""The benchmark of the output layer: losses, gradients, floors, ratios, refusals."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree
from scripts.benchmarks import measure, output_layer, peers
from scripts.benchmarks.measure import (
    PROCESS,
    Work,
    cpu_clock,
    in_new_process,
    least_work,
    make_row,
    proc_bytes,
)
from scripts.benchmarks.methods import Method, Problem, zipf
from scripts.benchmarks.output_layer import attempt

GPU_ONLY = ["cce", "liger"]
SAME_TREE = {"random": ["grouped"], "tree_full": ["full", "chunked"]}
Parse = Callable[..., argparse.Namespace]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """`parse(*arguments)`: the options of a tiny problem on the CPU."""

    def options_of(*arguments: str) -> argparse.Namespace:
        tiny = ["--positions", "32", "--rounds", "1", "--backends", "reference"]
        monkeypatch.setattr(sys, "argv", ["output_layer", *tiny, *arguments])
        return output_layer.parse_options()

    return options_of


@pytest.fixture
def stepped(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    """All methods that run on a CPU, each after one step; `grouped` makes three products."""
    monkeypatch.setattr(peers, "GROUPS", 4)
    options = parse()
    methods = output_layer.make_methods(output_layer.make_problem(97, 8, options), options)
    methods = [method for method in methods if not method.refused]
    for method in methods:
        method.prepare()
        method.step()
    return methods


def by_name(methods: list[Method]) -> dict[str, Method]:
    return {method.name: method for method in methods}


def test_every_method_is_measured_and_its_ratios_are_those_of_its_figures(
    tmp_path: Path, run_benchmark: Run
) -> None:
    trees, peers = ["random", "tree_full"], ["full", "cce", "adaptive"]
    problem = ["--rows", "131:7", "--positions", "32", "--rounds", "4", "--methods", *trees, *peers]
    done = run_benchmark("output_layer", *problem, "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    table = done.stdout
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["method"] for row in rows] == [*trees, *trees, *peers]
    for row in rows:
        assert f"\n| {row['label']} " in table
        if row["method"] in GPU_ONLY:
            assert (row["refused"], row["seconds_median"]) == ("CUDA only", None)
            continue
        seconds = row["seconds_median"]
        assert row["ours"] == "random/compiled"
        assert row["ratio_to_ours"] == pytest.approx(seconds / rows[0]["seconds_median"])
        assert 0 < row["seconds_min"] <= seconds
        assert row["page_faults"] >= 0
        slow = row["method"] in ("tree_full", "full")
        assert row["rounds"] == (2 if slow else 4)
        if row["method"] == "adaptive":
            assert row["ratio_to_floor"] is None
            continue
        by_bytes = row["floor_bytes"] / row["bytes_per_second"]
        by_flops = row["floor_flops"] / row["flops_per_second"]
        assert row["ratio_to_floor"] == pytest.approx(seconds / max(by_bytes, by_flops))
    where = {field: rows[0][field] for field in ("dtype", "positions", "threads", "torch")}
    assert where == {"dtype": "fp32", "positions": 32, "threads": 1, "torch": torch.__version__}
    assert rows[0]["device"]


def test_methods_of_a_tree_have_its_loss_and_its_gradients(stepped: list[Method]) -> None:
    methods = by_name(stepped)
    for name, same in SAME_TREE.items():
        ours = methods[name]
        for peer in (methods[other] for other in same):
            truth = float(ours.last_loss)
            assert float(peer.last_loss) == pytest.approx(truth, rel=1e-6), peer.name
            torch.testing.assert_close(peer.hidden.grad, ours.hidden.grad)
    tree, d_weight = methods["random"].tree, methods["random"].parameters[0].grad
    assert tree is not None
    assert d_weight is not None
    num_classes = int(tree.num_children[0])
    for peer in (methods[peer] for peer in SAME_TREE["random"]):
        torch.testing.assert_close(peer.parameters[0].grad, d_weight[:num_classes])
    assert len(methods["grouped"].parameters) == 2 + 3 + 1  # the root, 10 classes, their biases


def test_rows_in_fp32_are_multiplied_in_half_precision(parse: Parse) -> None:
    options = parse("--dtype", "bf16", "--rows-dtype", "fp32", "--methods", "random", "full")
    problem = output_layer.make_problem(97, 8, options)
    ours, full = output_layer.make_methods(problem, options)
    exact = F.cross_entropy(
        F.linear(problem.hidden, problem.rows[:97, :8].bfloat16()), problem.target
    )
    for method in (ours, full):
        method.prepare()
        method.step()
        assert {x.dtype for x in method.parameters} == {torch.float32}
        assert {x.grad.dtype for x in method.parameters if x.grad is not None} == {torch.float32}
    assert float(full.last_loss) == pytest.approx(float(exact), rel=0.02)
    vectors = (problem.trees["tree_full"].num_rows * 4 + 32 * 2) * 8
    assert least_work(problem, problem.trees["tree_full"]).bytes == 3 * vectors


def test_a_peer_with_another_loss_is_refused_and_one_of_ours_stops_the_run(
    stepped: list[Method], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in stepped:
        method.timings.append(lambda: 0.5)
    rows = [make_row(method, Work(1e9, 1e9)) | {"dtype": "fp32"} for method in stepped]
    output_layer.check_losses(rows)
    assert not any(row["refused"] for row in rows)
    (grouped,) = (row for row in rows if row["method"] == "grouped")
    grouped["loss"] += 0.001
    output_layer.check_losses(rows)
    assert [row["method"] for row in rows if row["refused"]] == ["grouped"]
    assert str(grouped["refused"]).startswith("loss of grouped is ")
    assert grouped["seconds_median"] is grouped["loss"] is None
    both = [rows[0], rows[0] | {"loss": rows[0]["loss"] + 0.001}]
    with pytest.raises(SystemExit, match=r"loss of random/reference is .*, of random/reference"):
        output_layer.check_losses(both)
    monkeypatch.setenv("SQRTLM_UNSAFE_TRITON", "1")  # for timing only
    capsys.readouterr()
    output_layer.check_losses(both)
    assert "loss of random/reference is" in capsys.readouterr().out


def test_the_floor_of_a_tiny_problem_is_the_count_by_hand() -> None:
    tree = ClassTree.two_level([0, 0, 0, 1, 1, 2])
    problem = Problem(
        hidden=torch.zeros(4, 5, dtype=torch.bfloat16),
        target=torch.tensor([0, 2, 5, 5]),
        trees={"random": tree, "tree_full": ClassTree.full(6)},
        rows=torch.zeros(9, 5, dtype=torch.bfloat16),
        bias=torch.zeros(9),
        cutoffs=[2],
    )
    # rows: 3 classes and the 3 words of class 0, while class 2, a single word, is not visited;
    # columns: the 3 classes for 4 positions, the 3 words for 2
    assert least_work(problem, tree) == (3 * (6 + 4) * 5 * 2, 6 * (4 * 3 + 2 * 3) * 5)
    full = least_work(problem, problem.trees["tree_full"])
    assert full == (3 * (6 + 4) * 5 * 2, 6 * 4 * 6 * 5)


def test_a_method_that_does_not_fit_is_left_out_and_the_others_run(parse: Parse) -> None:
    limit = proc_bytes(PROCESS / "status", "VmData") + 300e6  # less than the logits, 400 MB
    size = ["--positions", "1000", "--memory-limit", str(limit)]
    options = parse(*size, "--methods", "random", "full", "grouped")
    ours, full, grouped = output_layer.measured((100_000, 4), Work(1e10, 1e11), cpu_clock, options)
    assert (full["refused"], full["seconds_median"]) == ("does not fit into memory", None)
    assert ours["rounds"] == grouped["rounds"] == 1
    assert grouped["loss"] == pytest.approx(ours["loss"], rel=1e-6)  # by one product


def test_each_method_on_a_cpu_has_a_process_of_its_own(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def note(function: Callable[..., object], *arguments: object) -> tuple[object, int]:
        options: Any = arguments[-1]
        made.append((options.methods, options.backends))
        return in_new_process(function, *arguments)

    monkeypatch.setattr(measure, "in_new_process", note)
    options = parse("--methods", "random", "full", "--backends", "auto", "reference")
    rows = output_layer.compare((97, 8), Work(1e10, 1e11), cpu_clock, options)
    assert made == [(["random"], ["auto"]), (["random"], ["reference"]), (["full"], ["auto"])]
    assert [row["label"] for row in rows] == ["random/compiled", "random/reference", "full"]
    pids = [in_new_process(os.getpid)[0] for _ in range(2)]
    assert len({*pids, os.getpid()}) == 3
    assert in_new_process(os._exit, 3) == (None, 3)


def test_on_a_gpu_a_peer_of_a_package_has_a_process_whose_end_is_reported(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse("--methods", "random", "full", "cce")
    options.device = torch.device("cuda")
    together, separate = Mock(return_value=[]), Mock(return_value=(None, -6))
    monkeypatch.setattr(output_layer, "installed", lambda name: name == "cce")
    monkeypatch.setattr(measure, "in_new_process", separate)
    monkeypatch.setattr(output_layer, "measured", together)
    (row,) = output_layer.compare((97, 8), Work(1e10, 1e11), cpu_clock, options)
    assert (row["label"], row["refused"]) == ("cce", "its process ended with exit code -6")
    chosen = [call.call_args.args[-1].methods for call in (together, separate)]
    assert chosen == [["random", "full"], ["cce"]]
    with pytest.raises(SystemExit, match="random ended with exit code -6"):
        output_layer.alone((97, 8), Work(1e10, 1e11), "random", "reference", options)


def test_running_out_of_memory_and_a_peer_that_fails_are_reported(stepped: list[Method]) -> None:
    methods = by_name(stepped)

    fail = Mock(side_effect=RuntimeError("cannot\nat all"))
    attempt(methods["random"], Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    attempt(methods["full"], fail)
    attempt(methods["chunked"], Mock(side_effect=AssertionError("shape")))
    assert methods["random"].refused == "does not fit into memory"
    assert methods["full"].refused == "failed: RuntimeError: cannot"
    assert methods["chunked"].refused == "failed: AssertionError: shape"
    assert methods["random"].parameters == []
    with pytest.raises(RuntimeError, match="cannot"):
        attempt(methods["blocks"], fail)


def test_cut_cross_entropy_that_takes_no_bias_has_another_loss(
    stepped: list[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package is taken to be installed, and the hidden vectors to be on a GPU."""

    def linear_cross_entropy(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(e @ c.T, targets)

    package = ModuleType("cut_cross_entropy")
    package.__spec__ = ModuleSpec("cut_cross_entropy", None)
    package.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", package)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    method = peers.cce(stepped[0].problem)
    monkeypatch.undo()
    assert (method.refused, method.exact) == (None, False)
    method.prepare()
    method.step()
    assert float(method.last_loss) == pytest.approx(float(by_name(stepped)["full"].last_loss), 0.1)


def test_zipf_draws_words_by_inverse_rank() -> None:
    target: Tensor
    target, counts = zipf(10, 20_000)
    harmonic = sum(1 / rank for rank in range(1, 11))
    shares = torch.bincount(target, minlength=10) / 20_000
    for rank, (share, count) in enumerate(zip(shares.tolist(), counts.tolist(), strict=True), 1):
        assert share == pytest.approx(1 / rank / harmonic, abs=0.015)
        assert count == 100 // rank


def test_a_problem_is_written_as_words_and_hidden_size(
    parse: Parse, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse("--rows", "97:8", "10:1").rows == [(97, 8), (10, 1)]
    for wrong, complaint in (("97", "expected N:H"), ("9:8", "at least 10 words")):
        with pytest.raises(SystemExit, match="2"):
            parse("--rows", wrong)
        assert complaint in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_repeats_the_step_and_the_forward_is_one_launch(
    tmp_path: Path, run_benchmark: Run
) -> None:
    problem = ["--device", "cuda", "--rows", "1000:64", "--positions", "64", "--rounds", "2"]
    problem += ["--backends", "triton", "--methods", "random", "graph"]
    done = run_benchmark("output_layer", *problem, "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    ours, graph = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (ours["refused"], graph["refused"]) == (None, None)
    assert graph["loss"] == ours["loss"]
    assert sum(name.startswith("_forward") for name in ours["launches"]["forward"]) == 1
