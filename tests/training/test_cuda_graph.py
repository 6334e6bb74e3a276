"""Steps as a CUDA graph. On a CPU they read the same buffers and tensors, but are not recorded."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm.config import TrainConfig, load_config
from lm.output import ClassTree
from lm.output.backends.triton.launch import instrumented
from lm.output.rowwise import RowGradient
from lm.run import Run
from lm.training import cuda_graph
from lm.training.batches import Batch, Batches
from lm.training.checkpoint import load_checkpoint
from lm.training.cuda_graph import InputBuffers, StepGraph, why_eager
from lm.training.devices import build_fabric
from lm.training.loop import train_step
from lm.training.optimizers import learning_rate
from lm.training.state import TrainingState
from tests.conftest import recipes

N, STEPS, STOP = 60, 60, 27
CONFIG = """\
name: steps
model: {hidden: 16, layers: 2, dropout: 0.2}
optim: {lr: 0.01}
train: {max_steps: 60, batch_size: 4, seq_len: 8, threads: 1}
"""
ROW_WISE = "word_table.gradients=row_wise word_table.lr=0.05 word_table.optimizer"
WORD_DROPOUT = "model.input_embedding=path_sum model.count_word_dropout=9"
RECIPES = recipes(f"""\
lstm | model.dropout_weight=0.3 model.dropout_variational=true {WORD_DROPOUT}
lstm, sgd, accumulate | optim.optimizer=sgd optim.lr=0.5 optim.momentum=0.9 optim.decay=0.9 \
train.accumulate=3 optim.schedule=step optim.warmup_steps=9
transformer | model.backbone=transformer optim.schedule=cosine optim.warmup_steps=5 \
word_table.tied=true {WORD_DROPOUT} optim.weight_decay=0.1
row-wise adagrad, bf16 | {ROW_WISE}=adagrad word_table.dtype=bf16 train.precision=bf16-mixed
row-wise sgd | {ROW_WISE}=sgd optim.schedule=cosine
row-wise adagrad | {ROW_WISE}=adagrad {WORD_DROPOUT}
row-wise adam | {ROW_WISE}=adam optim.warmup_steps=50
one table for both | {ROW_WISE}=adam word_table.tied=true
""")
WAITING = recipes(f"""\
adaptive | output.tree=adaptive
row-wise, accumulate | {ROW_WISE}=sgd train.accumulate=2
""")
BF16 = ["--train.precision=bf16-mixed"]
ON_GPU = RECIPES | {f"{each}, bf16": [*RECIPES[each], *BF16] for each in ("lstm", "transformer")}


def random_words() -> Any:
    """What training reads of `Prepared`: words whose streams end with a shorter batch."""
    words = (N ** np.random.default_rng(1).random(4 * 155)).astype(np.uint16) - 1
    splits = {"train": SimpleNamespace(tokens=len(words), sha256="")}
    read: Any = {"tokens": lambda _: words, "counts": lambda: np.bincount(words, minlength=N)}
    return SimpleNamespace(eos_id=0, vocab_size=N, splits=splits, **read)


def start(folder: Path, options: list[str], saved: Any = None, gpu: bool = False) -> TrainingState:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    device = "--train.accelerator=gpu" if gpu else "--train.accelerator=cpu"
    config = load_config(folder / "config.yaml", [f"--run_dir={folder}", device, *options])
    adaptive = config.output.tree == "adaptive"
    tree = None if adaptive else ClassTree.two_level(torch.arange(N) % 7)
    run = Run.of(config, prepared=random_words(), tree=tree)
    fabric = build_fabric(run)
    fabric.launch()
    return TrainingState(fabric, run, Batches(config, run.prepared), saved)


def after(state: TrainingState, nll: float) -> dict[str, Any]:
    """What a checkpoint contains of training, and the sum of all losses, which is passed."""
    state.save(None, is_best=False)
    checkpoint = load_checkpoint(state.run.folder / "checkpoints" / "last.ckpt")
    return {name: checkpoint[name] for name in ("model", "optimizer", "devices")} | {"nll": nll}


def trained(folder: Path, options: list[str], steps: int, stop: int, gpu: bool = False) -> Any:
    """The outcome of steps of the loop, which stops after some of them and is continued."""
    state = start(folder, options, gpu=gpu)
    for step in range(steps):
        if step == stop:
            state.gather_losses()
            state.save(None, is_best=False)
            saved = load_checkpoint(folder / "checkpoints" / "last.ckpt")
            state = start(folder, options, saved, gpu)
        train_step(state)
    state.gather_losses()
    assert state.graph.records == isinstance(state.optimizer.param_groups[0]["lr"], torch.Tensor)
    return after(state, state.progress.nll)


def trained_plainly(folder: Path, options: list[str]) -> dict[str, Any]:
    """The outcome of the same steps in plain PyTorch."""
    state = start(folder, options)
    model, config, optimizer = state.model, state.config, state.optimizer.optimizer
    carried, sums = None, [0.0, 0.0]
    done, settings = 0, {"total_steps": STEPS, "num_bad_validations": 0}
    for step in range(STEPS):
        numbers = state.batches.of_step(done)
        done, epoch = numbers[-1] + 1, done // state.batches.per_epoch
        num_tokens = sum(state.batches[number].num_tokens for number in numbers)
        for group in optimizer.param_groups:
            rate = learning_rate(config.optim, step=step, epoch=epoch, **settings)
            group["lr"] = rate * group["scale"]
        for number in numbers:
            inputs, targets, continues, *_ = state.batches[number]
            with state.fabric.autocast():
                loss, new = model.loss(inputs, targets, carried if continues else None)
            carried = None if new is None else tuple(part.detach() for part in new)
            torch.autograd.backward(loss * (targets.numel() / num_tokens))
            sums[step >= STOP] += loss.item() * targets.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
    state.carried_loss.carried = carried
    return after(state, sum(sums))


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`records(True)`: from now on, steps are prepared as on a GPU, but run as they are."""

    def set_reason(value: bool) -> None:
        monkeypatch.setattr(cuda_graph, "why_eager", lambda *_, **__: None if value else "")

    monkeypatch.setattr(StepGraph, "run", lambda _, step, **__: step())
    set_reason(True)
    return set_reason


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_from_fixed_buffers_with_a_stop_equal_plain_ones_bit_for_bit(
    recipe: str, tmp_path: Path, records: Callable[[bool], None]
) -> None:
    options = RECIPES[recipe]
    ours = trained(tmp_path / "fixed", options, STEPS, STOP)
    records(False)
    as_usual = trained(tmp_path / "usual", options, STEPS, STOP)
    truth = trained_plainly(tmp_path / "plain", options)
    torch.testing.assert_close(ours, truth, rtol=0, atol=0)
    torch.testing.assert_close(as_usual, truth, rtol=0, atol=0)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations for which the host waits: those whose results depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, RowGradient) for kind in types):
            return NotImplemented  # its operations on ordinary tensors follow
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("index"):  # dynamic with masks only
            tags = {each for each in args[1] or () if each is not None and each.dtype == torch.bool}
        if tags or name == "equal":
            raise RuntimeError(f"the host reads: {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES | WAITING)
def test_a_step_of_the_fused_kernels_reads_nothing_from_the_device(
    recipe: str, tmp_path: Path, records: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not launched. What depends on the device is set as on a GPU."""
    for module in ("factors", "row_gradient", "optimizers"):
        monkeypatch.setattr(f"lm.output.rowwise.{module}.on_host", lambda _: False)
    monkeypatch.setattr("lm.output.backends.triton.backend.check_words", lambda *_: None)
    monkeypatch.setattr("lm.output.functional.eager", lambda *_: True)
    backend = "auto" if recipe == "adaptive" else "triton"
    state = start(tmp_path, [*(RECIPES | WAITING)[recipe], f"--output.backend={backend}"])
    launches: list[object] = []
    waits = pytest.raises(RuntimeError, match="the host reads")
    with instrumented(run=launches.append), waits if recipe in WAITING else nullcontext():
        train_step(state)
        before = len(launches)
        with HostReads():  # type: ignore[no-untyped-call]
            train_step(state)
        assert len(launches) == 2 * before >= 14


def test_runs_that_record_no_step_say_why(caplog: pytest.LogCaptureFixture) -> None:
    assert why_eager(TrainConfig(), 1, on_gpu=True) is None
    assert why_eager(TrainConfig(), 1, on_gpu=False) == ""
    assert why_eager(TrainConfig(cuda_graph="off"), 1, on_gpu=True) == ""
    several = "several devices communicate"
    assert why_eager(TrainConfig(), 2, on_gpu=True) == several
    assert why_eager(TrainConfig(strategy="ddp"), 1, on_gpu=True) == several
    for config, reason in (
        (TrainConfig(precision="16-mixed"), "gradients in fp16 are finite"),
        (TrainConfig(skip_nonfinite_steps=1), "gradients are finite (train.skip_nonfinite_steps)"),
    ):
        assert why_eager(config, 1, on_gpu=True) == f"the host reads whether {reason}"
    caplog.set_level(logging.INFO)
    place = {"device": torch.device("cuda"), "world_size": 2, "is_global_zero": True}
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert not StepGraph(cast(Any, SimpleNamespace(**place)), TrainConfig(), optimizer).records
    assert caplog.messages == [f"training steps run without a CUDA graph: {several}"]


def test_pinned_memory_is_written_after_it_was_copied() -> None:
    done: list[str] = []

    def event(name: str) -> Any:
        wait, copy = (partial(done.append, f"{verb} {name}") for verb in ("wait", "copy"))
        return SimpleNamespace(synchronize=wait, record=copy)

    inputs = InputBuffers(2, (3, 4), torch.device("cpu"))
    pinned = [(torch.zeros_like(inputs.tokens), event(name)) for name in "ab"]
    inputs._pinned = cast(Any, list(pinned))
    for step, length in enumerate((3, 3, 2)):
        given = [torch.full((length, 4), 10 * step + k) for k in range(2)]
        batches = [Batch(each, -each, continues=True, num_tokens=4) for each in given]
        loaded = inputs.load(batches)
        torch.testing.assert_close(loaded, batches, rtol=0, atol=0)
        assert loaded[1].targets.data_ptr() == inputs.tokens[1, 1].data_ptr()
    assert done == ["wait a", "copy a", "wait b", "copy b", "wait a", "copy a"]


def assert_equal_as_far_as_runs_repeat(actual: Any, first: Any, second: Any) -> None:
    """Bit for bit where two runs are: cuDNN does not always repeat its results. Else, the error is
    at most twice the difference of these runs, and some roundings of each step.
    """
    for ours, one, two in zip(*map(tree_leaves, (actual, first, second)), strict=True):
        if one is None:
            assert ours is None
            continue
        ours, one, two = map(torch.as_tensor, (ours, one, two))
        if not one.is_floating_point() or torch.equal(one, two):
            assert torch.equal(ours, one)
            continue
        usual, rounding = (one - two).abs().max(), 60 * torch.finfo(one.dtype).eps * one.abs().max()
        assert (ours - one).abs().max() <= 2 * usual + 8 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ON_GPU)
def test_recorded_steps_with_a_stop_equal_those_that_run_as_they_are(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Random numbers too: dropout, word dropout, and the rounding of rows in bf16."""
    caplog.set_level(logging.INFO)
    options, stop = ON_GPU[recipe], 31
    recorded = trained(tmp_path / "recorded", options, 60, stop, gpu=True)
    assert caplog.text.count("launched as a CUDA graph") == 2
    monkeypatch.setattr(StepGraph, "run", lambda _, step, **__: step())
    eager = [trained(tmp_path / name, options, 60, stop, gpu=True) for name in ("one", "two")]
    assert_equal_as_far_as_runs_repeat(recorded, *eager)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["lstm", "transformer, bf16", "row-wise adagrad"])
def test_the_host_never_waits_in_recorded_steps(recipe: str, tmp_path: Path) -> None:
    state = start(tmp_path, ON_GPU[recipe], gpu=True)
    for _ in range(5):
        train_step(state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):  # before the short batch
            train_step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.graph.records


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", WAITING)
def test_steps_that_wait_are_found_and_run_as_they_are(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = start(tmp_path, WAITING[recipe], gpu=True)
    before = state.parameters[0].detach().clone()
    for _ in range(6):
        train_step(state)
    assert caplog.text.count("without a CUDA graph: the host waits for the device") == 1
    assert not torch.equal(state.parameters[0], before)
