"""The benchmark of growing vocabularies: figures follow from their definitions, and failures are
reported with their cause.
"""

import argparse
import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from scripts.benchmarks import scale
from scripts.benchmarks.measure import DTYPES, is_out_of_memory
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.scale import METHODS, Task, measure, rank_classes, timed, visited_rows

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """`parse(*arguments)`: the options of a tiny problem, also for `main`."""

    def options_of(*arguments: str) -> argparse.Namespace:
        tiny = ["--positions=64", "--hidden=6", "--steps=2", "--time-limit=3600"]
        monkeypatch.setattr(sys, "argv", ["scale", *tiny, *arguments])
        return scale.parse_options()

    return options_of


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [97, 131])
def test_every_row_has_its_figures(parse: Parse, vocab_size: int, dtype: str) -> None:
    options = parse()
    rows = {name: measure(name, vocab_size, dtype, options) for name in METHODS}
    for row in rows.values():
        seconds = row["seconds"]
        assert row["outcome"] == "done"
        assert row["microseconds_per_position"] == pytest.approx(1e6 * seconds / 64)
        assert row["num_rows"] == vocab_size + round(vocab_size**0.5)
        assert row["table_bytes"] == row["num_rows"] * 6 * (4 if dtype == "fp32" else 2)
        assert row["peak_bytes"] > 50e6
        assert 0 < row["rows_visited"] <= row["num_rows"]


@pytest.mark.parametrize(
    ("device", "dtype", "mixed"),
    [("cpu", "fp32", False), ("cpu", "bf16", True), ("cuda", "fp32", True), ("cuda", "bf16", True)],
)
def test_a_gpu_and_a_bf16_table_have_bf16_hidden_vectors(
    parse: Parse, device: str, dtype: str, mixed: bool
) -> None:
    options, kind = parse(), DTYPES[dtype]
    options.device = torch.device(device)
    assert scale.is_mixed(options.device, kind) == mixed
    options.device = torch.device("cpu")
    task = Task(131, kind, options)
    task.is_mixed = mixed  # autocast of a CPU follows the same rules
    (weight, bias), target = task.table, task.words[0, 1]
    hidden = task.hidden.detach().to(torch.bfloat16 if mixed else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        exact = float(hierarchical_cross_entropy(hidden, weight, target, task.tree, bias))
    assert timed(task, METHODS["layer"](task), task.words[0], 3600.0).loss == exact


def test_a_recorded_step_is_replayed_with_the_words_of_each_step(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording is a function here, which runs the step."""
    replayed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recording: dict[str, Any] = {"captured": lambda step, _: SimpleNamespace(replay=step)}
    recording["make_step"] = lambda *arguments: replayed.append(arguments[-1].clone())
    for name, action in recording.items():
        monkeypatch.setattr(scale, name, action)
    task = Task(131, torch.float32, parse())
    method = METHODS["layer"](task)
    figures = scale.on_the_device(task, method, records=True)
    assert figures["graph_seconds"] > 0
    assert all(map(torch.equal, replayed[:2], task.words[1:]))
    assert len(replayed) == 2 + 3  # those that are profiled
    assert scale.on_the_device(task, method, records=False)["graph_seconds"] is None


def test_the_whole_step_has_the_loss_of_its_model_and_changes_visited_rows_alone(
    parse: Parse,
) -> None:
    task = Task(997, torch.float32, parse())
    model = scale.step_model(task)
    assert isinstance(model.output, HierarchicalSoftmax)
    method = scale.step(task, model)
    inputs, targets = task.words[0].view(2, 2, 32)
    with torch.no_grad():
        log_prob = model.output.log_prob(model(inputs)[0])
    truth = -float(log_prob.gather(2, targets[:, :, None]).mean())
    before = model.output.weight.detach().clone()
    assert timed(task, method, task.words[0], 3600.0).loss == pytest.approx(truth, rel=1e-5)
    changed = int((model.output.weight != before).any(1).sum())
    assert changed == visited_rows(task, task.words[0], reads_inputs=True)


def test_classes_have_equal_sums_of_roots_of_counts() -> None:
    _, counts = zipf(10_000, 1)
    word_class = rank_classes(counts)
    tree = ClassTree.two_level(word_class)
    assert all(map(torch.equal, scale.rank_tree(counts).arrays, tree.arrays))
    assert bool((word_class.diff() >= 0).all())
    mass = torch.zeros(100).double().index_add_(0, word_class, counts.double().sqrt())
    share, largest = float(mass.sum()) / 100, float(counts.double().sqrt().max())
    assert float((mass - share).abs().max()) <= largest
    assert int(torch.bincount(word_class).max()) == pytest.approx(200, rel=0.05)


def test_visited_rows_are_those_counted_by_hand(parse: Parse) -> None:
    task = Task(6, torch.float32, parse())
    task.tree = ClassTree.two_level([0, 0, 0, 1, 1, 2])
    words = torch.tensor([[0, 3, 4, 5, 5], [0, 2, 5, 5, 1]])
    # 3 classes and the 3 words of class 0, not the single word of class 2; of the words read, 3, 4
    # and 5 are none of these
    assert visited_rows(task, words, reads_inputs=False) == 6
    assert visited_rows(task, words, reads_inputs=True) == 9


def test_each_measurement_is_a_process_and_its_row_a_json_line(
    parse: Parse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows"
    parse("--sizes", "131", "97", "--methods", "layer", "--json", str(file))
    scale.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("vocab_size", "method", "dtype", "outcome", "threads", "torch")
    for row, size in zip(rows, (97, 131), strict=True):
        expected = (size, "layer", "fp32", "done", 1, torch.__version__)
        assert tuple(row[name] for name in names) == expected
        assert row["device"]
    printed = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert printed[1:6] == ["131", "layer", "fp32", "done", f"{rows[1]['seconds']:.4f}"]


def test_a_method_that_runs_out_of_memory_or_of_time_is_ended(parse: Parse) -> None:
    limit = ["--memory-limit-gb", "2", "--hidden", "50000"]
    options = parse("--sizes", "100", "10000", "20000", "--methods", "layer", *limit)
    rows = scale.measure_all(options)  # tables of 22 MB, 2.02 GB; the last is not tried
    assert [row["outcome"] for row in rows] == ["done", "memory"]
    assert 0.1e9 < rows[0]["peak_bytes"] < 2e9
    options = parse("--sizes", "97", "--methods", "step", "--time-limit", "1e-6")
    assert [row["outcome"] for row in scale.measure_all(options)] == ["time"]


def test_what_memory_running_out_looks_like() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "mmap"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "no file"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_options_out_of_range_are_refused(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, complaint in {
        "--positions=33": "--positions must be a multiple of 32, got 33",
        "--memory-limit-gb=0": "--memory-limit-gb must be positive, got 0.0",
        "--sizes=1": "--sizes must be at least 2, got 1",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)
        assert complaint in capsys.readouterr().err
