"""The language model: how its parts are joined, tied weights, word dropout, torch.compile."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.nn import functional as F

from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model.adaptive import AdaptiveSoftmax
from lm.model.build import build_model
from lm.model.language_model import LanguageModel
from lm.model.lstm import LSTM
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.rowwise import RowAdam

N, H, T, B = 11, 12, 5, 3  # rows of the output layer are 12 numbers and 4 zeros
BACKBONES = pytest.mark.parametrize("backbone", ["lstm", "transformer"])
COUNTS = torch.arange(N) ** 2


def make(
    backbone: str,
    tree: ClassTree | None = None,
    *,
    tied: bool = False,
    pieces: Tensor | None = None,
    **settings: Any,
) -> LanguageModel:
    """A small model in fp64."""
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, hidden=H, heads=2, layers=2, **settings)  # type: ignore[arg-type]
    if tree is None:
        tree = ClassTree.two_level(torch.arange(N) % 3)
    table = WordTable(tied=tied)
    sections = config, OutputConfig(), table, tree
    return build_model(*sections, T, pieces=pieces, counts=COUNTS).double()


def softmax_of(model: LanguageModel) -> HierarchicalSoftmax:
    """The output layer, whose tree and rows the test uses."""
    assert isinstance(model.output, HierarchicalSoftmax)
    return model.output


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
    logits = F.linear(hidden, softmax_of(model).weight[:, :H], softmax_of(model).bias)
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


@pytest.mark.parametrize("num_pieces", [None, 8])
@BACKBONES
def test_word_by_word_with_the_state_equals_all_at_once(
    backbone: str, num_pieces: int | None
) -> None:
    pieces = torch.arange(2 * N, dtype=torch.int32).view(N, 2) % 8
    model = make(backbone, pieces=pieces, input_pieces=num_pieces).eval()
    tokens, _ = text()
    state, parts = model.init_state(B), []
    for t in range(T):
        hidden, new_state = model(tokens[t : t + 1], state)
        assert new_state is not None
        state = new_state
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts), model(tokens)[0], rtol=1e-10, atol=1e-12)


@BACKBONES
def test_selected_sequences_continue_unchanged(backbone: str) -> None:
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
    weight, tree = softmax_of(model).weight, softmax_of(model).tree
    rows = [name for name, p in model.named_parameters() if len(p) == tree.num_rows]
    assert rows == ["output.weight", "output.bias"]
    vectors = weight[tree.row_of_word, :H]
    hidden, _ = model.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)


@BACKBONES
def test_the_gradient_of_tied_weights_is_the_sum_of_both_uses(backbone: str) -> None:
    tied, (tokens, targets) = make(backbone, tied=True), text()
    apart = make(backbone)
    assert apart.embedding is not None
    row_of_word = softmax_of(tied).tree.row_of_word
    apart.backbone.load_state_dict(tied.backbone.state_dict())  # type: ignore[attr-defined]
    softmax_of(apart).load_state_dict(softmax_of(tied).state_dict())
    with torch.no_grad():
        apart.embedding.weight.copy_(softmax_of(tied).weight[row_of_word, :H])
    separate = gradients(apart, apart.loss(tokens, targets)[0])
    expected = separate["output.weight"].clone()
    expected[row_of_word, :H] += separate["embedding.weight"]
    together = gradients(tied, tied.loss(tokens, targets)[0])
    assert separate["embedding.weight"].norm() > 1e-3
    torch.testing.assert_close(together["output.weight"], expected, rtol=1e-10, atol=1e-14)


def input_vectors(model: LanguageModel) -> Tensor:
    """The table of input vectors."""
    table = softmax_of(model).weight if model.embedding is None else model.embedding.weight
    return table.detach()[:, :H]


PATHS = pytest.mark.parametrize(
    "tree",
    [
        ClassTree.full(N),
        ClassTree.two_level(torch.arange(N) % 3, shortlist=4),
        ClassTree.huffman(COUNTS),
    ],
    ids=["full", "shortlist", "huffman"],
)


@PATHS
@pytest.mark.parametrize("tied", [True, False])
def test_path_sum_input_vectors_are_the_sums_on_the_paths(tree: ClassTree, tied: bool) -> None:
    model, (tokens, _) = make("lstm", tree, tied=tied, input_embedding="path_sum"), text()
    table = input_vectors(model)
    assert table.shape == (tree.num_rows, H)
    vectors = torch.stack([table[[row for _, row in tree.path(w)]].sum(0) for w in range(N)])
    hidden, _ = model.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shortlist", [2, N])
@pytest.mark.parametrize(
    ("tree", "tied"),
    [(ClassTree.full(N), False), (ClassTree.full(N), True), (None, False)],
    ids=["full", "full tied", "adaptive"],
)
def test_input_vectors_are_sums_on_the_paths_of_another_tree(
    tree: ClassTree | None, tied: bool, shortlist: int
) -> None:
    classes = ClassTree.two_level(torch.arange(N) % 3, shortlist, counts=COUNTS)
    config = ModelConfig(hidden=H, layers=1, input_embedding="path_sum", count_word_dropout=2.0)
    sections = config, OutputConfig(), WordTable(tied=tied), tree
    model = build_model(*sections, T, input_tree=classes, counts=COUNTS).double().eval()
    assert model.embedding is not None
    table, (tokens, _) = model.embedding.weight, text()
    if tied:
        words = softmax_of(model).weight[softmax_of(model).tree.row_of_word, :H]
        nodes = [[node for node, _ in classes.path(w)[1:]] for w in range(N)]
        vectors = words + torch.stack([table[node].sum(0) for node in nodes])
    else:
        vectors = torch.stack([table[[row for _, row in classes.path(w)]].sum(0) for w in range(N)])
    hidden, _ = model.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)
    is_short = torch.tensor([len(classes.path(w)) == 1 for w in range(N)])
    expected = (2 / (2 + COUNTS.double())).where(~is_short, 0)
    assert model.word_dropout is not None
    torch.testing.assert_close(model.word_dropout, expected.to(model.word_dropout.dtype))


@pytest.mark.parametrize("row_wise", [False, True])
def test_a_tied_word_that_loses_its_vector_keeps_those_of_its_classes(row_wise: bool) -> None:
    classes = ClassTree.two_level(torch.arange(N) % 3, shortlist=2, counts=COUNTS)
    config = ModelConfig(hidden=H, layers=1, input_embedding="path_sum", count_word_dropout=2.0)
    sections = config, OutputConfig(), WordTable(tied=True, row_wise=row_wise), ClassTree.full(N)
    model = build_model(*sections, T, input_tree=classes, counts=COUNTS)
    assert model.embedding is not None
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    model.word_dropout = torch.ones(N)
    tokens, targets = text()
    loss, _ = model.train().loss(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    nodes = [[node for node, _ in classes.path(w)[1:]] for w in range(N)]
    vectors = torch.stack([model.embedding.weight[node].sum(0) for node in nodes])
    torch.testing.assert_close(read[0], vectors[tokens])
    gradient = model.embedding.weight.grad
    assert gradient is not None
    used = {node for word in tokens.flatten().tolist() for node in nodes[word]}
    assert set(gradient.to_dense().any(1).nonzero().flatten().tolist()) == used


@PATHS
@pytest.mark.parametrize("embedding", ["word", "path_sum"])
def test_a_word_loses_its_vector_with_the_probability_of_its_count(
    tree: ClassTree, embedding: str
) -> None:
    model = make("lstm", tree, tied=True, input_embedding=embedding, count_word_dropout=2.0)
    table, words = input_vectors(model), torch.arange(N)
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    model.train()(words.expand(4000, N).T)
    start = -1 if embedding == "word" else 0
    paths = [[row for _, row in tree.path(w)][start:] for w in range(N)]
    whole, without = (
        torch.stack([table[path[:stop]].sum(0) for path in paths]) for stop in (None, -1)
    )
    dropped = (read[0] - without[:, None]).abs().amax(2) < 1e-12
    torch.testing.assert_close(read[0][~dropped], whole[:, None].expand_as(read[0])[~dropped])
    share = dropped.double().mean(1)
    never = torch.tensor([embedding == "path_sum" and len(path) == 1 for path in paths])
    expected = torch.where(never, 0, 2 / (2 + COUNTS.double()))
    torch.testing.assert_close(share, expected, rtol=0, atol=0.04)
    assert not share[never].any()
    model.eval()(words[:, None])
    torch.testing.assert_close(read[1][:, 0], whole)


@pytest.mark.parametrize("embedding", ["word", "path_sum"])
def test_moments_and_row_of_a_dropped_word_do_not_change(embedding: Any) -> None:
    config = ModelConfig(hidden=H, input_embedding=embedding, count_word_dropout=2.0)
    tree = ClassTree.two_level(torch.arange(N) % 3)
    table = WordTable(row_wise=True)
    model = build_model(config, OutputConfig(), table, tree, T, counts=COUNTS).train()
    assert model.embedding is not None
    weight, (tokens, targets) = model.embedding.weight, text()
    word = int(tokens[0, 0])
    row = word if embedding == "word" else int(tree.row_of_word[word])
    optimizer, results = RowAdam([weight], lr=0.1), []
    for probability in (0.0, 1.0):
        model.word_dropout = torch.zeros(N)
        model.word_dropout[word] = probability
        optimizer.zero_grad()
        model.loss(tokens, targets)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean, square = (optimizer.state[weight][name] for name in ("mean", "square"))
        results.append([each.detach()[row].clone() for each in (weight, mean, square)])
    assert all(value.any() for value in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@BACKBONES
def test_input_vectors_can_have_another_size_than_hidden_vectors(backbone: str) -> None:
    model, (tokens, _) = make(backbone, embedding=6), text()
    assert model.embedding is not None
    hidden, _ = model.backbone(model.embedding(tokens))
    assert model.embedding.weight.shape == (N, 6)
    assert torch.equal(model(tokens)[0], hidden)


@BACKBONES
def test_init_range_bounds_embedding_and_output(backbone: str) -> None:
    model = make(backbone, init_range=0.01)
    assert model.embedding is not None
    assert not softmax_of(model).weight[:, H:].any()
    for weight in (model.embedding.weight, softmax_of(model).weight[:, :H]):
        assert 0.009 < float(weight.detach().abs().max()) <= 0.01


@pytest.mark.parametrize("init_range", [None, 0.1])
@BACKBONES
def test_a_seed_gives_the_same_backbone_whatever_the_output_layer_is(
    backbone: str, init_range: float | None
) -> None:
    trees = ClassTree.full(N), ClassTree.two_level(torch.arange(N) % 3)
    models = [make(backbone, tree, init_range=init_range) for tree in trees]
    states = [model.backbone.state_dict() for model in models]  # type: ignore[attr-defined]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@BACKBONES
def test_dropout_acts_only_while_training(backbone: str) -> None:
    model, (tokens, _) = make(backbone, dropout=0.5), text()
    plain = make(backbone)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens)[0], plain(tokens)[0])
    first, second = (model.train()(tokens)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert 0.2 < float((first == 0).double().mean()) < 0.8


@BACKBONES
@pytest.mark.parametrize("embedding", ["word", "path_sum"])
def test_compiled_loss_and_gradients_equal_eager_ones(backbone: str, embedding: str) -> None:
    model, (tokens, targets) = make(backbone, input_embedding=embedding), text()
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
    tokens = torch.randint(N, (1, 200)).expand(T, 200)  # the same word T times, in 200 sequences
    hidden, _ = model(tokens)
    for dropped in (seen[0], hidden):
        zero = dropped == 0
        assert 0.45 < float(zero.double().mean()) < 0.55
        assert bool((zero == zero[:1]).all()) == variational
    assert model.embedding is not None
    passed = seen[0] != 0
    torch.testing.assert_close(seen[0][passed], 2 * model.embedding(tokens)[passed])


def test_the_lstm_has_the_dropouts_of_the_configuration() -> None:
    model = make("lstm", dropout_weight=0.3, dropout=0.2, dropout_variational=True)
    backbone: Any = model.backbone
    assert (backbone.dropout_weight, backbone.dropout.p, backbone.dropout.variational) == (
        0.3,
        0.2,
        True,
    )


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_word_dropout_is_the_same_with_row_wise_gradients(tied: bool, row_wise: bool) -> None:
    tree = ClassTree.two_level(torch.arange(N) % 3, shortlist=4)
    config = ModelConfig(hidden=H, layers=1, input_embedding="path_sum", count_word_dropout=2.0)
    table = WordTable(tied=tied, row_wise=row_wise)
    model = build_model(config, OutputConfig(), table, tree, T, counts=COUNTS).double()
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    model.train()(torch.arange(N).expand(4000, N).T)
    vectors = input_vectors(model)
    without = torch.stack([vectors[[row for _, row in tree.path(w)[:-1]]].sum(0) for w in range(N)])
    share = ((read[0] - without[:, None]).abs().amax(2) < 1e-12).double().mean(1)
    in_shortlist = torch.tensor([len(tree.path(w)) == 1 for w in range(N)])
    expected = torch.where(in_shortlist, 0, 2 / (2 + COUNTS.double()))
    torch.testing.assert_close(share, expected, rtol=0, atol=0.04)


def test_word_dropout_is_drawn_in_single_precision() -> None:
    """In half precision about one draw in some hundred is 0, below every probability."""
    tree = ClassTree.two_level(torch.arange(N) % 3)
    model = make("lstm", tree, count_word_dropout=1e-4).train()
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
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
    adaptive = AdaptiveSoftmax(H, COUNTS, [3])
    with pytest.raises(ValueError, match="require a HierarchicalSoftmax, got AdaptiveSoftmax"):
        LanguageModel(LSTM(H, H, 1), adaptive, **options)
