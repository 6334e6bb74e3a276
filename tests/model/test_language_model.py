"""The language model: its parts joined as said, tied weights really one, compiled as eager."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.nn import functional as F

from lm.config import ModelConfig, OutputConfig
from lm.model.language_model import LanguageModel, build_model
from lm.output import ClassTree

N, H, T, B = 11, 8, 5, 3
BACKBONES = pytest.mark.parametrize("backbone", ["lstm", "transformer"])


COUNTS = torch.arange(N) ** 2


def make(backbone: str, tree: ClassTree | None = None, **settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, hidden=H, heads=2, layers=2, **settings)  # type: ignore[arg-type]
    if tree is None:
        tree = ClassTree.two_level(torch.arange(N) % 3)
    return build_model(config, OutputConfig(), tree, context=T, counts=COUNTS).double()


def text(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(N, (T + 1, B), generator=generator)
    return words[:-1], words[1:]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@BACKBONES
def test_the_loss_is_the_mean_cross_entropy_of_the_next_words(backbone: str) -> None:
    model, (tokens, targets) = make(backbone, ClassTree.full(N)), text()
    assert model.embedding is not None
    hidden, _ = model.backbone(model.embedding(tokens))
    logits = F.linear(hidden, model.output.weight, model.output.bias)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss, _ = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@BACKBONES
def test_a_word_does_not_change_what_is_predicted_before_it(backbone: str) -> None:
    model, (tokens, _) = make(backbone).eval(), text()
    changed = tokens.clone()
    changed[3] = (changed[3] + 1) % N
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] - after[3:]).abs().amax(dim=2).min() > 1e-6


@BACKBONES
def test_word_by_word_with_the_state_equals_all_at_once(backbone: str) -> None:
    model, (tokens, _) = make(backbone).eval(), text()
    state, parts = model.init_state(B), []
    for t in range(T):
        hidden, new_state = model(tokens[t : t + 1], state)
        assert new_state is not None
        state = new_state
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts), model(tokens)[0], rtol=1e-10, atol=1e-12)


@BACKBONES
def test_selected_sequences_go_on_as_they_would_have(backbone: str) -> None:
    model, (tokens, _) = make(backbone).eval(), text()
    index = torch.tensor([2, 0, 2])
    _, state = model(tokens[:2], model.init_state(B))
    assert state is not None
    whole, _ = model(tokens[2:], state)
    chosen, _ = model(tokens[2:, index], model.backbone.select_state(state, index))
    torch.testing.assert_close(chosen, whole[:, index], rtol=1e-10, atol=1e-12)


@BACKBONES
def test_tied_weights_are_one_tensor_read_by_word(backbone: str) -> None:
    model, (tokens, _) = make(backbone, tied=True), text()
    assert model.embedding is None
    rows = [name for name, p in model.named_parameters() if len(p) == model.output.tree.num_rows]
    assert rows == ["output.weight", "output.bias"]
    vectors = model.output.weight[model.output.tree.row_of_word]
    hidden, _ = model.backbone(vectors[tokens])
    assert torch.equal(model(tokens)[0], hidden)


@BACKBONES
def test_the_gradient_of_tied_weights_is_the_sum_of_both_uses(backbone: str) -> None:
    tied, (tokens, targets) = make(backbone, tied=True), text()
    apart = make(backbone)
    assert apart.embedding is not None
    row_of_word = tied.output.tree.row_of_word
    apart.backbone.load_state_dict(tied.backbone.state_dict())  # type: ignore[attr-defined]
    apart.output.load_state_dict(tied.output.state_dict())
    with torch.no_grad():
        apart.embedding.weight.copy_(tied.output.weight[row_of_word])
    separate = gradients(apart, apart.loss(tokens, targets)[0])
    expected = separate["output.weight"].clone()
    expected[row_of_word] += separate["embedding.weight"]
    together = gradients(tied, tied.loss(tokens, targets)[0])
    assert separate["embedding.weight"].norm() > 1e-3
    torch.testing.assert_close(together["output.weight"], expected, rtol=1e-10, atol=1e-14)


PATHS = pytest.mark.parametrize(
    "tree",
    [
        ClassTree.full(N),
        ClassTree.two_level(torch.arange(N) % 3, head=4),
        ClassTree.huffman(COUNTS),
    ],
    ids=["full", "head", "huffman"],
)


@PATHS
@pytest.mark.parametrize("tied", [True, False])
def test_an_input_vector_may_be_the_sum_of_those_on_the_path(tree: ClassTree, tied: bool) -> None:
    model, (tokens, _) = make("lstm", tree, tied=tied, input="path"), text()
    table = model.output.weight if model.embedding is None else model.embedding.weight
    assert table.shape == (tree.num_rows, H)
    vectors = torch.stack([table[[row for _, row in tree.path(w)]].sum(0) for w in range(N)])
    hidden, _ = model.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)


@PATHS
@pytest.mark.parametrize("input", ["word", "path"])
def test_a_word_is_read_without_its_own_vector_with_the_probability_of_its_count(
    tree: ClassTree, input: str
) -> None:
    model = make("lstm", tree, tied=True, input=input, input_backoff=2.0)
    table, words = model.output.weight.detach(), torch.arange(N)
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    model.train()(words.expand(4000, N).T)
    paths = [[row for _, row in tree.path(w)][-1 if input == "word" else 0 :] for w in range(N)]
    whole, without = (
        torch.stack([table[path[:stop]].sum(0) for path in paths]) for stop in (None, -1)
    )
    alone = (read[0] - without[:, None]).abs().amax(2) < 1e-12
    torch.testing.assert_close(read[0][~alone], whole[:, None].expand_as(read[0])[~alone])
    share = alone.double().mean(1)
    always = torch.tensor([input == "path" and len(path) == 1 for path in paths])
    expected = torch.where(always, 0, 2 / (2 + COUNTS.double()))
    torch.testing.assert_close(share, expected, rtol=0, atol=0.04)
    assert not share[always].any()
    model.eval()(words[:, None])
    torch.testing.assert_close(read[1][:, 0], whole)


@BACKBONES
def test_input_vectors_may_have_another_size(backbone: str) -> None:
    model, (tokens, _) = make(backbone, embedding=6), text()
    assert model.embedding is not None
    hidden, _ = model.backbone(model.embedding(tokens))
    assert model.embedding.weight.shape == (N, 6)
    assert torch.equal(model(tokens)[0], hidden)


@BACKBONES
def test_init_range_bounds_embedding_and_output(backbone: str) -> None:
    model = make(backbone, init_range=0.01)
    assert model.embedding is not None
    for weight in (model.embedding.weight, model.output.weight):
        assert 0.009 < float(weight.detach().abs().max()) <= 0.01


@BACKBONES
def test_dropout_acts_while_training_alone(backbone: str) -> None:
    model, (tokens, _) = make(backbone, dropout=0.5), text()
    plain = make(backbone)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens)[0], plain(tokens)[0])
    first, second = (model.train()(tokens)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert 0.2 < float((first == 0).double().mean()) < 0.8


@BACKBONES
@pytest.mark.parametrize("read", ["word", "path"])
def test_compiled_whole_equals_eager_in_loss_and_gradients(backbone: str, read: str) -> None:
    model, (tokens, targets) = make(backbone, input=read), text()
    expected, _ = model.loss(tokens, targets)
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    with dynamo.patch(allow_rnn=True):  # nn.LSTM breaks the graph without
        loss, _ = compiled(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(model, loss), gradients(model, expected), rtol=1e-9, atol=1e-13
    )


@pytest.mark.parametrize(
    ("backbone", "variational"), [("lstm", False), ("lstm", True), ("transformer", False)]
)
def test_dropout_acts_on_input_vectors_and_on_hidden_vectors(
    backbone: str, variational: bool
) -> None:
    model = make(backbone, dropout=0.5, dropout_variational=variational).train()
    seen: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[attr-defined]
    tokens = torch.randint(N, (1, 200)).expand(T, 200)  # a word for ever, in 200 sequences
    hidden, _ = model(tokens)
    for dropped in (seen[0], hidden):
        zero = dropped == 0
        assert 0.45 < float(zero.double().mean()) < 0.55
        assert bool((zero == zero[:1]).all()) == variational
    assert model.embedding is not None
    kept = seen[0] != 0
    torch.testing.assert_close(seen[0][kept], 2 * model.embedding(tokens)[kept])


def test_the_lstm_has_the_dropouts_of_the_configuration() -> None:
    model = make("lstm", dropout_weight=0.3, dropout=0.2, dropout_variational=True)
    backbone: Any = model.backbone
    assert (backbone.dropout_weight, backbone.dropout.p, backbone.dropout.variational) == (
        0.3,
        0.2,
        True,
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_noise_by_count_is_the_same_with_sparse_gradients(tied: bool, sparse: bool) -> None:
    tree = ClassTree.two_level(torch.arange(N) % 3, head=4)
    config = ModelConfig(hidden=H, layers=1, tied=tied, input="path", input_backoff=2.0)
    model = build_model(config, OutputConfig(), tree, T, counts=COUNTS, sparse=sparse).double()
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    words = torch.arange(N)
    model.train()(words.expand(4000, N).T)
    table = model._vectors.detach()
    without = torch.stack([table[[row for _, row in tree.path(w)[:-1]]].sum(0) for w in range(N)])
    share = ((read[0] - without[:, None]).abs().amax(2) < 1e-12).double().mean(1)
    on_root = torch.tensor([len(tree.path(w)) == 1 for w in range(N)])
    expected = torch.where(on_root, 0, 2 / (2 + COUNTS.double()))
    torch.testing.assert_close(share, expected, rtol=0, atol=0.04)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_the_output_layer_is_that_of_the_configuration(backend: Any, bias: bool) -> None:
    output = build_model(
        ModelConfig(hidden=H), OutputConfig(backend=backend, bias=bias), ClassTree.full(N), T
    ).output
    assert (output.backend, output.bias is not None) == (backend, bias)


def test_noise_by_count_is_drawn_in_single_precision() -> None:
    """In half precision a draw is 0 once in some hundred times, below every probability."""
    tree = ClassTree.two_level(torch.arange(N) % 3)
    model = make("lstm", tree, input_backoff=1e-4).train()
    tokens = torch.full((1000, 100), N - 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        known = model._draw_known(tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert known is not None
    assert known.all()
