"""Input vectors: of words, of the paths of words, of pieces of words; their gradients."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.model.input_pieces import InputPieces
from lm.output import ClassTree
from tests.models import new_model, words

N, P = 11, 9
PIECES_OF_WORD = [[0], [1, 2], [], [1, 3, 4], [5], [5, 2], [6, 6], [7, 0, 1], [2], [8, 3], [4]]
PIECES = torch.tensor([row + [-1] * (3 - len(row)) for row in PIECES_OF_WORD], dtype=torch.int32)
COUNTS = torch.arange(N) ** 2
TREES = {"full": ClassTree.full(N), "huffman": ClassTree.huffman(COUNTS)}
TREES["shortlist"] = ClassTree.two_level(torch.arange(N) % 3, shortlist=2)
CLASSES = ClassTree.two_level(torch.arange(N) % 3, shortlist=2, counts=COUNTS)
"""Classes whose vectors are summed where the output layer has none."""


def make(kind: str = "word", tree: str = "shortlist", **settings: Any) -> Any:
    """A small model with input vectors of words, of its tree's paths or of `CLASSES`."""
    parts: dict[str, Any] = {"pieces": PIECES, "counts": COUNTS}
    parts["input_tree"] = CLASSES if kind == "classes" else None
    embedding = "word" if kind == "word" else "path_sum"
    options = {"layers": 1, "input_pieces": P, "input_embedding": embedding, **settings}
    return new_model(TREES.get(tree), parts, **options)


def added(weight: Tensor) -> Tensor:
    """What the pieces add to the input vector of each word, by definition."""
    zero = weight.new_zeros(weight.shape[1])
    return torch.stack(
        [sum((weight[p] for p in row), zero) / max(1, len(row)) ** 0.5 for row in PIECES_OF_WORD]
    )


def word_vectors(model: Any, kind: str) -> tuple[Tensor, Tensor]:
    """The input vector of each word without pieces, by definition, and the word's own part."""
    output = model.output
    table = output.weight if model.embedding is None else model.embedding.weight
    paths = [(CLASSES if kind == "classes" else output.tree).path(word) for word in range(N)]
    others = [[row for _, row in path[:-1]] if kind != "word" else [] for path in paths]
    if kind == "word":
        own = table[output.tree.row_of_word] if model.embedding is None else table
    elif kind == "classes" and model.tied:  # each class has a vector, the word its row
        own = output.weight[output.tree.row_of_word]
        others = [[node for node, _ in path[1:]] for path in paths]
    else:
        own = table[[path[-1][1] for path in paths]]
    size = model.embedding_size
    above = torch.stack([table[each, :size].sum(0) for each in others])
    return own[:, :size] + above, own[:, :size]


@pytest.mark.parametrize(
    ("embedding", "tree"), [*product(("word", "path_sum"), TREES), ("classes", "full")]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_pieces", [None, P])
@pytest.mark.parametrize("row_wise", [False, True])
def test_input_vectors_and_all_gradients_are_those_of_the_definition(
    embedding: str, tied: bool, tree: str, num_pieces: int | None, row_wise: bool
) -> None:
    options: dict[str, Any] = {"tied": tied, "input_pieces": num_pieces}
    if not tied and embedding == "word":
        options["embedding"] = 6
    model, (tokens, targets) = make(embedding, tree, row_wise=row_wise, **options), words(N)
    truth = make(embedding, tree, **options)
    vectors, _ = word_vectors(truth, embedding)
    if num_pieces is not None:
        vectors = vectors + added(truth.input_pieces.weight)
    hidden, _ = truth.backbone(vectors[tokens])
    torch.testing.assert_close(model(tokens)[0], hidden, rtol=1e-12, atol=1e-14)
    truth.output.loss(hidden, targets).backward()
    model.loss(tokens, targets)[0].backward()
    for (name, ours), expected in zip(model.named_parameters(), truth.parameters(), strict=True):
        grad = ours.grad if type(ours.grad) is Tensor else ours.grad.to_dense()
        torch.testing.assert_close(grad, expected.grad, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    ("embedding", "tree", "tied", "num_pieces"),
    [
        ("word", "huffman", True, None),
        ("word", "shortlist", True, P),
        ("path_sum", "shortlist", True, None),
        ("path_sum", "huffman", False, P),
        ("classes", "full", True, None),
        ("classes", "adaptive", False, None),
    ],
)
def test_a_word_loses_its_own_vector_with_the_probability_of_its_count(
    embedding: str, tree: str, tied: bool, num_pieces: int | None
) -> None:
    """The vectors of its classes and pieces remain; a path of one vector loses none."""
    model = make(embedding, tree, tied=tied, input_pieces=num_pieces, count_word_dropout=2.0)
    every, read = torch.arange(N), list[Tensor]()
    model.backbone.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model.train()(every.expand(4000, N).T)
    whole, own = word_vectors(model, embedding)
    if num_pieces is not None:
        whole = whole + added(model.input_pieces.weight)
    dropped = (read[0] - (whole - own)[:, None]).abs().amax(2) < 1e-12
    torch.testing.assert_close(read[0][~dropped], whole[:, None].expand_as(read[0])[~dropped])
    paths = CLASSES if embedding == "classes" else TREES[tree]
    never = torch.tensor([embedding != "word" and len(paths.path(w)) == 1 for w in range(N)])
    expected = torch.where(never, 0, 2 / (2 + COUNTS.double()))
    torch.testing.assert_close(dropped.double().mean(1), expected, rtol=0, atol=0.04)
    assert not dropped[never].any()
    model.eval()(every[:, None])
    torch.testing.assert_close(read[1][:, 0], whole)


@pytest.mark.parametrize("size", [4, 300])
def test_the_sum_of_pieces_is_as_large_as_one_vector(size: int) -> None:
    module = InputPieces(torch.arange(4000, dtype=torch.int32).view(1000, 4), 4000, size)
    squares = module(torch.arange(1000)).detach().square().sum(1)
    assert float(squares.mean()) == pytest.approx(1, rel=0.1)
