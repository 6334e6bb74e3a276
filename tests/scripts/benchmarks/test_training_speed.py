"""The benchmarks of training steps and of growing vocabularies: rows, figures, peers."""

import json
from pathlib import Path

import pytest
import torch

from lm.output import HierarchicalSoftmax
from lm.training.batches import SequenceBatches
from scripts.benchmarks import scale
from scripts.benchmarks.scale import METHODS, Task, measure, timed, visited_rows
from scripts.benchmarks.training_speed import start_training, torch_loss
from tests.scripts.conftest import Parse, Run

TINY = ["--positions=64", "--hidden=6", "--steps=2"]


def test_steps_are_timed_side_by_side(tiny: Path, tmp_path: Path, run_benchmark: Run) -> None:
    rows = tmp_path / "rows"
    options = ["--rounds", "1", "--steps", "2", "--json", str(rows)]
    options += ["--trees", "two_level,classes.shortlist=3", "torch", "none", "full"]
    torch.set_num_threads(2)
    done = run_benchmark("training_speed", tiny, f"--run_dir={tmp_path / 'run'}", *options)
    assert done.returncode == 0, done.stderr
    two_level, *peers, full = (json.loads(line) for line in rows.read_text().splitlines())
    assert (two_level["tree"], full["tree"]) == ("two_level,classes.shortlist=3", "full")
    assert full["ratio"] == 1
    ratio = two_level["tokens_per_second_median"] / full["tokens_per_second_median"]
    assert two_level["ratio"] == pytest.approx(ratio)
    assert [peer["tree"] for peer in peers] == ["torch", "none"]
    names = ("batch_size", "seq_len", "threads", "graph")  # the recipe's
    assert [full[name] for name in names] == [4, 8, 1, False]
    assert full["step_seconds"] == pytest.approx(32 / full["tokens_per_second_median"])
    assert all(peer["tokens_per_second_median"] > 0 for peer in peers)
    assert str(tmp_path) not in full["command"]


def test_a_text_that_is_too_short_for_the_rounds_is_refused(
    lstm_run: Path, run_benchmark: Run
) -> None:
    done = run_benchmark("decode", "--runs", lstm_run, "--rounds=999")
    assert "the validation text has 149 tokens, 100 a round" in done.stderr


def test_a_recipe_on_independent_sequences_trains_on_these(tiny: Path, tmp_path: Path) -> None:
    options = [f"--run_dir={tmp_path}", "--data.sequences=independent"]
    state = start_training(str(tiny), options, "two_level", num_steps=1)
    assert isinstance(state.batches, SequenceBatches)
    assert not any(state.batches[number].continues for number in range(3))


def test_the_peer_of_training_steps_has_the_same_loss(tiny: Path, tmp_path: Path) -> None:
    model = start_training(str(tiny), [f"--run_dir={tmp_path}"], "torch", num_steps=1).model.eval()
    tokens, targets = torch.randint(model.vocab_size, (2, 4, 3))
    peer, _ = model.loss(tokens, targets)
    torch.testing.assert_close(peer, torch_loss(model.tree_softmax, model(tokens)[0], targets))
    ours = HierarchicalSoftmax.loss(model.tree_softmax, model(tokens)[0], targets)
    torch.testing.assert_close(peer, ours)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [97, 131])
def test_every_row_has_its_figures(parse: Parse, vocab_size: int, dtype: str) -> None:
    rows = {name: measure(name, vocab_size, dtype, parse(scale, *TINY)) for name in METHODS}
    for row in rows.values():
        assert row["outcome"] == "done"
        assert row["microseconds_per_position"] == pytest.approx(1e6 * row["seconds"] / 64)
        assert row["num_rows"] == vocab_size + round(vocab_size**0.5)
        assert row["table_bytes"] == row["num_rows"] * 6 * (4 if dtype == "fp32" else 2)
        assert row["process_peak_bytes"] > 50e6
        assert 0 < row["rows_visited"] <= row["num_rows"]


def test_a_step_has_the_loss_of_its_model_and_changes_visited_rows_alone(parse: Parse) -> None:
    task = Task(997, torch.float32, parse(scale, *TINY))
    model = scale.step_model(task)
    assert isinstance(model.output, HierarchicalSoftmax)
    method = scale.step(task, model)
    inputs, targets = task.words[0].view(2, 2, 32)
    with torch.no_grad():
        log_prob = model.output.log_prob(model(inputs)[0])
    truth = -float(log_prob.gather(2, targets[:, :, None]).mean())
    before = model.output.weight.detach().clone()
    assert timed(task, method, task.words[0]).loss == pytest.approx(truth, rel=1e-5)
    changed = int((model.output.weight != before).any(1).sum())
    assert changed == visited_rows(task, task.words[0], reads_inputs=True)


def test_each_measurement_is_a_process_and_its_row_a_json_line(
    parse: Parse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows"
    parse(scale, *TINY, "--sizes", "131", "97", "--methods", "layer", "--json", str(file))
    scale.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("vocab_size", "method", "dtype", "outcome", "threads", "torch")
    for row, size in zip(rows, (97, 131), strict=True):
        expected = (size, "layer", "fp32", "done", 1, torch.__version__)
        assert tuple(row[name] for name in names) == expected
        assert row["device"]
    printed = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert printed[1:5] == ["131", "layer", "fp32", f"{rows[1]['seconds']:.4f}"]


def test_a_method_that_does_not_fit_into_the_memory_limit_ends_the_benchmark(parse: Parse) -> None:
    options = ["--sizes=10000", "--methods=layer", "--memory-limit-gb=2", "--hidden=50000"]
    parse(scale, *TINY, *options)
    with pytest.raises(SystemExit, match="layer at 10,000 words ended with exit code 1"):
        scale.main()  # a table of 2.02 GB
