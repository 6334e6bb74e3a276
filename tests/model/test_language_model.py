"""The language model: how its parts are joined, word dropout, torch.compile, bf16 on a CPU."""

import logging
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo

from lm.config import validate
from lm.model import language_model
from lm.model.adaptive import AdaptiveSoftmax
from lm.model.language_model import LanguageModel, backbone_autocast
from lm.model.lstm import LSTM
from lm.output import ClassTree
from lm.output.rowwise import RowAdam
from tests.conftest import python
from tests.models import new_model, words

N, H, T = 11, 12, 5
BACKBONES = pytest.mark.parametrize("backbone", ["lstm", "transformer"])
COUNTS = torch.arange(N) ** 2
TREE = ClassTree.two_level(torch.arange(N) % 3)
PIECES = torch.arange(2 * N, dtype=torch.int32).view(N, 2) % 8

BF16_TRAINING = """
import torch
from lm.model.lstm import LSTM
from lm.model.language_model import backbone_autocast, cpu_has_fast_bf16

assert not cpu_has_fast_bf16()
torch.manual_seed(0)
lstm, inputs = LSTM(8, 8, 2), torch.randn(5, 2, 8)
truth, _ = lstm(inputs)
with torch.autocast("cpu", torch.bfloat16), backbone_autocast(inputs.device):
    hidden, _ = lstm(inputs)
hidden.sum().backward()
assert torch.equal(hidden, truth)
"""


def make(backbone: str = "lstm", tree: ClassTree = TREE, **settings: Any) -> Any:
    parts = {"pieces": PIECES, "counts": COUNTS}
    return new_model(tree, parts, backbone=backbone, layers=2, **settings)


def read_by_backbone(model: Any) -> list[Tensor]:
    """The input vectors of each call from now on."""
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    return read


@pytest.mark.parametrize("embedding", ["word", "path_sum"])
def test_moments_and_row_of_a_dropped_word_do_not_change(embedding: Any) -> None:
    model = make(input_embedding=embedding, count_word_dropout=2.0, row_wise=True).train()
    weight, (tokens, targets) = model.embedding.weight, words(N)
    word = int(tokens[0, 0])
    row = word if embedding == "word" else int(TREE.row_of_word[word])
    optimizer, results = RowAdam([weight], lr=0.1), []
    for probability in (0.0, 1.0):
        model.word_dropout = torch.zeros(N)
        model.word_dropout[word] = probability
        optimizer.zero_grad()
        model.loss(tokens, targets)[0].backward()
        optimizer.step()
        mean, square = (optimizer.state[weight][name] for name in ("mean", "square"))
        results.append([each.detach()[row].clone() for each in (weight, mean, square)])
    assert all(value.any() for value in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@BACKBONES
def test_init_range_bounds_embedding_pieces_and_output(backbone: str) -> None:
    model = make(backbone, init_range=0.01, input_pieces=8)
    rows = model.output.weight
    assert not rows[:, H:].any()
    for weight in (model.embedding.weight, model.input_pieces.weight, rows[:, :H]):
        assert 0.009 < float(weight.detach().abs().max()) <= 0.01


@pytest.mark.parametrize("init_range", [None, 0.1])
@BACKBONES
def test_a_seed_gives_the_same_backbone_whatever_the_output_layer_is(
    backbone: str, init_range: float | None
) -> None:
    models = [make(backbone, tree, init_range=init_range) for tree in (ClassTree.full(N), TREE)]
    states = [model.backbone.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("hidden", "heads"), [(200, 5), (300, 6), (256, 8), (650, 5), (6, 3)])
def test_the_default_number_of_heads_fits_the_hidden_size(hidden: int, heads: int) -> None:
    """The largest number up to 8 of an even size; of H = 200, the default, 8 heads are odd."""
    model = make("transformer", hidden=hidden, heads=None)
    assert {block.attention.heads for block in model.backbone.blocks} == {heads}
    values = {"name": "a", "model": {"backbone": "transformer", "hidden": hidden}}
    assert validate(values | {"train": {"max_steps": 1}}, "a").model.heads is None


@BACKBONES
@pytest.mark.parametrize("settings", [{"input_pieces": 8}, {"input_embedding": "path_sum"}])
def test_compiled_loss_and_gradients_equal_eager_ones(backbone: str, settings: Any) -> None:
    model, (tokens, targets) = make(backbone, **settings), words(N)
    expected, _ = model.loss(tokens, targets)
    compiled: Any = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    with dynamo.patch(allow_rnn=True):  # nn.LSTM breaks the graph without
        loss, _ = compiled(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    parameters = [*model.parameters()]
    found, truth = (torch.autograd.grad(each, parameters) for each in (loss, expected))
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("backbone", "variational"), [("lstm", False), ("lstm", True), ("transformer", False)]
)
def test_dropout_acts_on_input_and_on_hidden_vectors(backbone: str, variational: bool) -> None:
    model = make(backbone, dropout=0.5, dropout_variational=variational).train()
    seen = read_by_backbone(model)
    tokens = torch.randint(N, (1, 200)).expand(T, 200)  # the same word T times, in 200 sequences
    hidden, _ = model(tokens)
    for dropped in (seen[0], hidden):
        zero = dropped == 0
        assert 0.45 < float(zero.double().mean()) < 0.55
        assert bool((zero == zero[:1]).all()) == variational
        assert not bool((zero == zero[:, :1]).all())  # sequences have masks of their own
    passed = seen[0] != 0
    torch.testing.assert_close(seen[0][passed], 2 * model.embedding(tokens)[passed])


def test_a_residual_connection_adds_the_input_vectors_to_the_hidden_vectors() -> None:
    model, (tokens, _) = make(residual=True), words(N)
    read, (hidden, _) = read_by_backbone(model), model(tokens)
    model.residual = False
    torch.testing.assert_close(hidden, model(tokens)[0] + read[0])


def test_word_dropout_is_drawn_in_single_precision() -> None:
    """In half precision about one draw in some hundred is 0, below every probability."""
    model = make(count_word_dropout=1e-4).train()
    read = read_by_backbone(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model(torch.full((1000, 100), N - 1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (read[0] != 0).all()


@pytest.mark.parametrize(
    "options", [{"embedding_size": None}, {"embedding_size": H, "path_sum": True}]
)
def test_shared_rows_and_path_sums_require_a_tree(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="require a HierarchicalSoftmax, got AdaptiveSoftmax"):
        LanguageModel(LSTM(H, H, 1), AdaptiveSoftmax(H, COUNTS, [3]), **options)


@pytest.mark.parametrize(("fast", "autocast"), [(True, True), (False, True), (False, False)])
def test_a_cpu_without_fast_bf16_computes_in_fp32_and_reports_it_once(
    fast: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    language_model._report_fp32.cache_clear()
    monkeypatch.setattr(language_model, "cpu_has_fast_bf16", lambda: fast)
    left, right = torch.randn(2, 16, 16).unbind()
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            with backbone_autocast(left.device):
                product = left @ right
    assert product.dtype == (torch.bfloat16 if fast else torch.float32)
    assert fast or torch.equal(product, left @ right)
    assert len(caplog.records) == (autocast and not fast)


def test_an_lstm_trains_under_bf16_autocast_without_avx512() -> None:
    avx2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = python("-c", BF16_TRAINING, env=os.environ | avx2)
    assert done.returncode == 0, done.stderr
