"""One step after another: what is accumulated, clipped, scheduled, carried and validated."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import OptimConfig
from lm.model.language_model import LanguageModel
from lm.output.rowwise import RowGradient
from lm.training import loop
from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics
from lm.training.state import TrainingState
from lm.training.validation import Validation
from tests.conftest import Train, corpus_of, recipes
from tests.training.conftest import BeforeCall
from tests.training.tiny_runs import LAST

SGD = "optim.optimizer=sgd optim.lr=0.5 optim.momentum=0.9 optim.weight_decay=0.01"
ADAM = "train.precision=64-true optim.weight_decay=0.3 optim.betas=[0.5,0.25]"
STEPS = ["--model.dropout=0", "--train.batch_size=9", "--train.accumulate=5", "--optim.clip=0.5"]
STEPS += ["--train.max_epochs=2", "--train.max_steps=null", "--log.every_steps=2"]
STEPS += ["--optim.schedule=step", "--optim.decay=0.5"]
SEQUENCES = "data.sequences=independent data.prepared_dir=null"
RECIPES = recipes(f"""\
sgd | {SGD} train.precision=64-true
sgd, transformer | {SGD} train.precision=64-true model.backbone=transformer
sgd, sequences, fp32 | {SGD} {SEQUENCES}
adam, sequences | {ADAM} {SEQUENCES}
adam, transformer, sequences | {ADAM} model.backbone=transformer {SEQUENCES}
adam, the table without decay | {ADAM} word_table.optimizer=adam word_table.lr=0.005
""")
NUM_TOKENS, PER_EPOCH = 2297, 72  # of the corpus, and batches of `tiny`


@pytest.mark.parametrize("accumulate", [4, 7, 100])
def test_every_epoch_is_validated_with_accumulated_batches(
    accumulate: int, train: Train, tmp_path: Path
) -> None:
    options = [f"--train.accumulate={accumulate}", "--train.max_epochs=6", "--train.max_steps=null"]
    lines = read_metrics(train(tmp_path / "run", *options) / "metrics.csv")
    validated = [line for line in lines if line.valid_perplexity is not None]
    assert [line.epoch for line in validated] == [1, 2, 3, 4, 5, 6]
    per_epoch = -(-PER_EPOCH // accumulate)
    assert [line.step for line in validated] == [per_epoch * epoch for epoch in range(1, 7)]
    tokens = {line.tokens / line.epoch for line in validated}
    assert len(tokens) == 1
    assert NUM_TOKENS - 4 < tokens.pop() <= NUM_TOKENS


def stepped(
    weight: Tensor, moments: list[Tensor], gradient: Tensor, optim: OptimConfig, number: int
) -> Tensor:
    """A parameter after step `number`, by SGD with momentum or Adam (Kingma & Ba 2015)."""
    decay = optim.weight_decay if weight.dim() > 1 else 0.0
    if optim.optimizer == "sgd":
        moments[0] = optim.momentum * moments[0] + gradient + decay * weight
        return weight - optim.lr * moments[0]
    for k, beta in enumerate(optim.betas):
        moments[k] = beta * moments[k] + (1 - beta) * gradient ** (k + 1)
    mean, square = (m / (1 - beta**number) for m, beta in zip(moments, optim.betas, strict=True))
    return weight * (1 - optim.lr * decay) - optim.lr * mean / (square.sqrt() + 1e-8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_of_their_definition(
    recipe: str, train: Train, tmp_path: Path, before_call: BeforeCall
) -> None:
    """Weights, and perplexities since the line before or, of sequences, the validation."""
    began: list[tuple[TrainingState, LanguageModel]] = []
    before_call(loop, "_fit", lambda state, *_: began.append((state, deepcopy(state.model))))
    run = train(tmp_path / "run", *STEPS, *RECIPES[recipe])
    ((state, model),) = began
    batches, config, parameters = state.batches, state.config, [*model.parameters()]
    assert batches.per_epoch % batches.per_step
    lines = {line.step: line for line in read_metrics(run / "metrics.csv")}
    in_table = {id(each) for each in model.table if config.word_table.optimizer}
    moments = [[torch.zeros_like(each)] * 2 for each in parameters]
    near = {"64-true": 1e-11, "32-true": 1e-5}[config.train.precision]
    carried, done, seen = None, 0, list[Tensor]()
    for number in range(1, 1 + max(lines)):
        nll, rate = list[Tensor](), config.optim.lr * 0.5 ** (done // batches.per_epoch)
        for batch in map(batches.__getitem__, batches.of_step(done)):
            hidden, carried = model(batch.inputs, carried if batch.continues else None)
            carried = carried and tuple(part.detach() for part in carried)
            is_target = batch.targets >= 0
            log_prob = model.output.log_prob(hidden[is_target])
            nll.append(-log_prob.gather(1, batch.targets[is_target][:, None]))
        gradients = torch.autograd.grad(torch.cat(nll).mean(), parameters)
        scale = (0.5 / (torch.cat([g.flatten() for g in gradients]).norm() + 1e-6)).clamp(max=1)
        for parameter, gradient, each in zip(parameters, gradients, moments, strict=True):
            optim = replace(config.optim, lr=rate)
            if id(parameter) in in_table:
                optim = replace(optim, lr=rate / 2, weight_decay=0.0)
            parameter.data = stepped(parameter.data, each, scale * gradient, optim, number)
        done, seen = done + len(nll), [*seen, *(each.detach().double() for each in nll)]
        if line := lines.get(number):
            perplexity = math.exp(torch.cat(seen).mean())
            assert line.train_perplexity == pytest.approx(perplexity, rel=near)
            if line.valid_perplexity or config.data.sequences == "stream":
                seen = []
    weights = load_checkpoint(run / LAST)["model"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.data, rtol=near, atol=near)


def test_a_table_in_bf16_learns(train: Train, tmp_path: Path) -> None:
    options = ["--word_table.dtype=bf16", "--train.precision=bf16-mixed", "--word_table.tied=true"]
    options += ["--word_table.optimizer=adagrad", "--word_table.lr=0.1", "--train.max_steps=60"]
    run = train(tmp_path, *options)
    curve = [line.valid_perplexity for line in read_metrics(run / "metrics.csv")]
    assert [perplexity for perplexity in curve if perplexity is not None][-1] < 12  # of 27 words
    weights = load_file(run / "model.safetensors")
    assert weights["output.weight"].dtype == torch.bfloat16
    assert weights["backbone.layers.0.weight_hh_l0"].dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_weights_in_bf16_lose_small_updates_and_a_run_says_so(
    precision: str, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [f"--train.precision={precision}", "--train.max_steps=20", "--optim.lr=1e-6"]
    run = train(tmp_path, *options, "--optim.warmup_steps=1")
    weights = load_file(run / "model.safetensors")["backbone.layers.0.weight_hh_l0"]
    first = load_file(train(tmp_path / "b", *options, "--train.max_steps=1") / "model.safetensors")
    share = (weights == first["backbone.layers.0.weight_hh_l0"]).double().mean()
    assert (share > 0.9) == ("an update of less than" in caplog.text) == (precision == "bf16-true")


def test_the_precision_of_matrix_products_is_set_for_the_run_and_restored_after_it(
    train: Train, tmp_path: Path, before_call: BeforeCall
) -> None:
    seen: set[str] = set()
    before_call(LanguageModel, "loss", lambda *_: seen.add(torch.get_float32_matmul_precision()))
    train(tmp_path / "run", "--train.matmul_precision=medium", "--train.max_steps=1")
    assert seen == {"medium"}
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # now the function raises
    train(tmp_path / "other", "--train.max_steps=1")
    assert seen == {"medium", "highest"}
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.set_float32_matmul_precision("highest")


def test_a_plateau_lowers_the_rate_with_each_validation_that_did_not_improve(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validations = map(Validation, [9.0, 8.0, 8.0, 8.5, 7.0, 7.0])
    monkeypatch.setattr(TrainingState, "validate", lambda *_: next(validations))
    options = ["--optim.schedule=plateau", "--optim.decay=0.5", "--train.val_every_steps=1"]
    options += ["--log.every_steps=1", "--optim.lr=1", "--train.max_steps=6"]
    lines = read_metrics(train(tmp_path / "run", *options) / "metrics.csv")
    assert [line.learning_rate for line in lines] == [1, 1, 1, 0.5, 0.25, 0.25]


def test_a_plateau_without_a_validation_split_has_no_effect_and_says_so(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = corpus_of(tmp_path, "the cat sees a dog\n" * 20)
    options += ["--optim.schedule=plateau", "--train.max_steps=2", "--no-progress"]
    assert main(["train", str(tiny), *options]) == 0
    assert "plateau has no effect: there is no validation split" in caplog.text


def test_the_model_gets_the_counts_and_the_kind_of_gradient_of_the_configuration(
    train: Train, prepared_dir: Path, tmp_path: Path, before_call: BeforeCall
) -> None:
    models, gradients = list[LanguageModel](), list[Any]()
    before_call(LanguageModel, "loss", lambda model, *_: models.append(model))
    clipped = (torch.nn.utils, "clip_grads_with_norm_")
    before_call(*clipped, lambda *_: gradients.append(models[-1].table[0].grad))
    options = ["--model.count_word_dropout=3", "--optim.optimizer=sgd", "--train.max_steps=1"]
    train(tmp_path / "row_wise", *options, "--word_table.gradients=row_wise")
    counts = torch.tensor(open_prepared(prepared_dir).counts())
    torch.testing.assert_close(models[0].word_dropout, 3 / (3 + counts))
    train(tmp_path / "dense", *options, "--word_table.gradients=dense")
    assert [isinstance(gradient, RowGradient) for gradient in gradients] == [True, False]
