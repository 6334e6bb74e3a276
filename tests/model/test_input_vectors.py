"""Input vectors: of words, of the paths of words, of pieces of words; their gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model.build import build_model
from lm.model.input_pieces import InputPieces
from lm.model.language_model import LanguageModel
from lm.output import ClassTree, HierarchicalSoftmax

N, H, T, B, P = 11, 12, 5, 3, 9
PIECES_OF_WORD = [[0], [1, 2], [], [1, 3, 4], [5], [5, 2], [6, 6], [7, 0, 1], [2], [8, 3], [4]]
PIECES = torch.tensor([row + [-1] * (3 - len(row)) for row in PIECES_OF_WORD], dtype=torch.int32)
COUNTS = torch.arange(N) ** 2
TREES = {
    "full": ClassTree.full(N),
    "shortlist": ClassTree.two_level(torch.arange(N) % 3, shortlist=2),
    "huffman": ClassTree.huffman(COUNTS),
}
EMBEDDINGS = pytest.mark.parametrize("embedding", ["word", "path_sum"])
TIED = pytest.mark.parametrize("tied", [False, True])


def make(
    kind: str = "word",
    tree: str = "shortlist",
    *,
    tied: bool = False,
    row_wise: bool = False,
    **settings: Any,
) -> LanguageModel:
    """A small model in fp64."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"input_pieces": P, "input_embedding": kind} | settings
    config = ModelConfig(hidden=H, layers=1, **options)
    table = WordTable(tied=tied, row_wise=row_wise)
    sections = config, OutputConfig(), table, TREES[tree], T
    return build_model(*sections, pieces=PIECES, counts=COUNTS).double()


def text() -> tuple[Tensor, Tensor]:
    words = torch.randint(N, (T + 1, B), generator=torch.Generator().manual_seed(1))
    return words[:-1], words[1:]


def weight_of(model: LanguageModel) -> Tensor:
    """The vectors of the pieces."""
    assert model.input_pieces is not None
    return model.input_pieces.weight


def added(weight: Tensor) -> Tensor:
    """What the pieces add to the input vector of each word, by definition."""
    zero = weight.new_zeros(weight.shape[1])
    return torch.stack(
        [
            sum((weight[p] for p in row), zero) / math.sqrt(max(1, len(row)))
            for row in PIECES_OF_WORD
        ]
    )


def word_vectors(model: LanguageModel) -> Tensor:
    """The input vector of each word without pieces, by definition."""
    assert isinstance(model.output, HierarchicalSoftmax)
    tree, shared = model.output.tree, model.embedding is None
    table = model.output.weight if model.embedding is None else model.embedding.weight
    if model.path_sum:
        rows = [[row for _, row in tree.path(word)] for word in range(N)]
    else:
        rows = [[int(tree.row_of_word[word]) if shared else word] for word in range(N)]
    return torch.stack([table[row].sum(0) for row in rows])[:, : model.embedding_size]


@EMBEDDINGS
@TIED
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("num_pieces", [None, P])
@pytest.mark.parametrize("row_wise", [False, True])
def test_input_vectors_and_all_gradients_are_those_of_the_definition(
    embedding: str, tied: bool, tree: str, num_pieces: int | None, row_wise: bool
) -> None:
    options: dict[str, Any] = {"tied": tied, "input_pieces": num_pieces}
    if not tied and embedding == "word":
        options["embedding"] = 6
    model, (tokens, targets) = make(embedding, tree, row_wise=row_wise, **options), text()
    truth = make(embedding, tree, **options)
    vectors = word_vectors(truth)
    if num_pieces is not None:
        vectors = vectors + added(weight_of(truth))
    hidden, _ = truth.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)
    truth.output.loss(hidden, targets).backward()  # type: ignore[no-untyped-call]
    model.loss(tokens, targets)[0].backward()  # type: ignore[no-untyped-call]
    for (name, ours), expected in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert ours.grad is not None
        assert expected.grad is not None
        grad = ours.grad if type(ours.grad) is Tensor else ours.grad.to_dense()
        torch.testing.assert_close(grad, expected.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_a_word_that_loses_its_vector_keeps_its_pieces() -> None:
    model = make(tied=True, count_word_dropout=2.0)
    read: list[Tensor] = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))  # type: ignore[attr-defined]
    model.train()(torch.arange(N).expand(4000, N).T)
    pieces = added(weight_of(model))
    is_dropped = (read[0] - pieces[:, None]).abs().amax(2) < 1e-12
    expected = 2 / (2 + COUNTS.double())
    torch.testing.assert_close(is_dropped.double().mean(1), expected, rtol=0, atol=0.04)
    whole = (word_vectors(model) + pieces)[:, None].expand_as(read[0])
    torch.testing.assert_close(read[0][~is_dropped], whole[~is_dropped])


@pytest.mark.parametrize("size", [4, 300])
def test_the_sum_is_as_large_as_one_vector_and_init_range_bounds_them(size: int) -> None:
    module = InputPieces(torch.arange(4000, dtype=torch.int32).view(1000, 4), 4000, size)
    squares = module(torch.arange(1000)).detach().square().sum(1)
    assert float(squares.mean()) == pytest.approx(1, rel=0.1)
    largest = float(weight_of(make(init_range=0.01)).detach().abs().max())
    assert 0.009 < largest <= 0.01


def test_a_model_without_pieces_has_the_state_that_it_had() -> None:
    names = make().state_dict().keys() - make(input_pieces=None).state_dict().keys()
    assert names == {"input_pieces.pieces", "input_pieces.weight"}
