"""The benchmark of the output layer: losses, gradients, floors, ratios, refusals."""

import json
from pathlib import Path

import pytest
import torch

from lm.device import process_bytes
from lm.output import ClassTree
from scripts.benchmarks import output_layer, peers
from scripts.benchmarks.measure import Work, least_work, make_row
from scripts.benchmarks.methods import Method, Problem
from tests.scripts.conftest import Parse, Run

GPU_ONLY = ["cce", "liger"]
TINY = ["--positions", "32", "--rounds", "1", "--backends", "reference"]


@pytest.fixture
def stepped(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> list[Method]:
    """All methods that run on a CPU, each after one step; `grouped` makes three products."""
    monkeypatch.setattr(peers, "GROUPS", 4)
    options = parse(output_layer, *TINY)
    methods = output_layer.make_methods(output_layer.make_problem(97, 8, options), options)
    methods = [method for method in methods if not method.refused]
    for method in methods:
        method.prepare()
        method.step()
    return methods


def test_ratios_of_each_method_are_those_of_its_figures(tmp_path: Path, run_benchmark: Run) -> None:
    trees, peers = ["random", "tree_full"], ["full", "cce", "adaptive"]
    problem = ["--rows", "131:7", "--positions", "32", "--rounds", "4", "--methods", *trees, *peers]
    done = run_benchmark("output_layer", *problem, "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["method"] for row in rows] == [*trees, *trees, *peers]
    for row in rows:
        assert f"\n| {row['label']} " in done.stdout
        if row["method"] in GPU_ONLY:
            assert (row["refused"], row["seconds_median"]) == ("CUDA only", None)
            continue
        seconds = row["seconds_median"]
        assert row["ours"] == "random/compiled"
        assert row["ratio_to_ours"] == pytest.approx(seconds / rows[0]["seconds_median"])
        assert 0 < row["seconds_min"] <= seconds
        assert row["rounds"] == (2 if row["method"] in ("tree_full", "full") else 4)
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
    methods = {method.name: method for method in stepped}
    grouped = methods["grouped"]
    for ours, peer in ((methods["random"], grouped), (methods["tree_full"], methods["full"])):
        truth = float(ours.last_loss)
        assert float(peer.last_loss) == pytest.approx(truth, rel=1e-6), peer.name
        torch.testing.assert_close(peer.hidden.grad, ours.hidden.grad)
    tree, d_weight = methods["random"].tree, methods["random"].parameters[0].grad
    assert tree is not None
    assert d_weight is not None
    torch.testing.assert_close(grouped.parameters[0].grad, d_weight[: int(tree.num_children[0])])
    assert len(grouped.parameters) == 2 + 3 + 1  # the root, 10 classes, their biases


def test_a_peer_with_another_loss_is_refused_and_ours_stops_the_run(stepped: list[Method]) -> None:
    for method in stepped:
        method.seconds.append(0.5)
    rows = [make_row(method, Work(1e9, 1e9)) | {"dtype": "fp32"} for method in stepped]
    output_layer.check_losses(rows)
    assert not any(row["refused"] for row in rows)
    (grouped,) = (row for row in rows if row["method"] == "grouped")
    grouped["loss"] += 0.001
    output_layer.check_losses(rows)
    assert [row["method"] for row in rows if row["refused"]] == ["grouped"]
    assert str(grouped["refused"]).startswith("loss of grouped is ")
    assert grouped["seconds_median"] is grouped["loss"] is None
    with pytest.raises(SystemExit, match=r"loss of random/reference is .*, of random/reference"):
        output_layer.check_losses([rows[0], rows[0] | {"loss": rows[0]["loss"] + 0.001}])


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
    assert least_work(problem, problem.trees["tree_full"]) == (3 * (6 + 4) * 5 * 2, 6 * 4 * 6 * 5)


def test_a_method_too_large_is_left_out(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = process_bytes("VmData") + 300e6  # less than the logits, 400 MB
    monkeypatch.setattr(output_layer, "available_bytes", lambda device: limit)
    names = ["random", "full", "grouped"]
    options = parse(output_layer, *TINY, "--positions", "1000", "--methods", *names)
    ours, full, grouped = output_layer.measured((100_000, 4), Work(1e10, 1e11), options)
    assert (full["refused"], full["seconds_median"]) == ("does not fit into memory", None)
    assert ours["rounds"] == grouped["rounds"] == 1
    assert grouped["loss"] == pytest.approx(ours["loss"], rel=1e-6)  # by one product


@pytest.mark.gpu
def test_a_graph_repeats_a_step_of_one_forward_launch(tmp_path: Path, run_benchmark: Run) -> None:
    problem = ["--device", "cuda", "--rows", "1000:64", "--positions", "64", "--rounds", "2"]
    problem += ["--backends", "triton", "--methods", "random", "graph"]
    done = run_benchmark("output_layer", *problem, "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    ours, graph = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (ours["refused"], graph["refused"]) == (None, None)
    assert graph["loss"] == ours["loss"]
    assert [row["launches"] for row in ours["kernels"] if row["kernel"] == "_forward"] == [1]
