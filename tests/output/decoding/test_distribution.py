"""Decoding as functions: log-probabilities of all words and of candidates, dtypes, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.backends import BACKENDS, nodes
from lm.output.decoding import compiled, distribution, draws, search
from lm.output.decoding.distribution import candidate_log_prob, log_prob, topk

from ..definition import TWO_LEVEL, N, layer_of, problem
from .truth import OPTIONS, H, P, converted, draw_many, random_layer, sample, ways, word_log_prob

FP32 = torch.float32
DTYPES = [(FP32, FP32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float64)]
TWICE = torch.tensor([[3, 3, 4, -1]]).expand(P, -1)


@pytest.fixture(autouse=True)
def _loss_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["compiled"], "automatic_on", frozenset())


@pytest.mark.parametrize("shape", ["full", "shortlist", "paths"])
def test_gradients_of_log_prob_match_finite_differences(shape: str) -> None:
    hidden, weight, tree, bias = random_layer(shape, 7, num_positions=2)
    inputs = tuple(tensor.requires_grad_() for tensor in (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w, b: log_prob(h, w, tree, b), inputs)
    assert torch.autograd.gradcheck(lambda h, w: log_prob(h, w, tree), inputs[:2])


def test_half_precision_log_prob_is_of_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "CAST_ELEMENTS", 4 * H)  # chunks of four rows
    half = converted(random_layer("two_level"), torch.bfloat16)
    single = converted(half, torch.float32)
    upstream = torch.randn(P, N, generator=torch.Generator().manual_seed(2))
    grads = []
    for layer in (half, single):
        leaves = [leaf.requires_grad_() for leaf in (layer[0], layer[1], layer[3])]
        grads.append(torch.autograd.grad(log_prob(*layer), leaves, upstream))
    torch.testing.assert_close(log_prob(*half), log_prob(*single), rtol=0, atol=1e-5)
    for rounded, exact in zip(*grads, strict=True):
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=1e-5)


@ways
@pytest.mark.parametrize(("dtype", "of_bias"), DTYPES)
@pytest.mark.parametrize("shape", ["shortlist", "paths"])
def test_rows_are_summed_in_fp32_or_the_precision_of_the_bias(
    shape: str, dtype: torch.dtype, of_bias: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tree, _ = converted(random_layer(shape, scale=0.5), dtype)
    layer = hidden, weight, tree, random_layer(shape, scale=0.5)[3].to(of_bias)
    expected = word_log_prob(*converted(layer, torch.float64)).topk(5)
    best = topk(*layer, k=5)
    assert torch.equal(best.word, expected.indices)
    found, is_double = [best.log_prob], of_bias == torch.float64
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(distribution, "_LOSS_DEVICES", devices)
        found.append(candidate_log_prob(hidden, weight, best.word, *layer[2:]))
    values = expected.values.to(of_bias if is_double else FP32)
    for each in found:
        torch.testing.assert_close(each, values, rtol=0, atol=1e-12 if is_double else 1e-5)
    assert torch.equal(draw_many(layer, 10, top_k=1), expected.indices[:, :1].expand(-1, 10))


@ways
def test_autocast_changes_nothing() -> None:
    layer = converted(random_layer("two_level"), torch.float32)
    outside = (log_prob(*layer), *topk(*layer, k=4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (log_prob(*layer), *topk(*layer, k=4))
        candidates = candidate_log_prob(*layer[:2], torch.arange(N).expand(P, N), *layer[2:])
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(candidates, inside[0], rtol=0, atol=1e-6)


def test_a_compiled_model_decodes_as_an_eager_one() -> None:
    layer, hidden = HierarchicalSoftmax(H, TWO_LEVEL), torch.randn(P, H)

    def decoded(hidden: Tensor) -> tuple[Tensor, ...]:
        hidden = hidden.tanh() * 2
        seeds = torch.arange(len(hidden))
        return *layer.topk(hidden, 3), layer.sample(hidden, top_p=0.9, seeds=seeds)

    assert all(map(torch.equal, torch.compile(decoded, backend="eager")(hidden), decoded(hidden)))
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"function topk .*compile without fullgraph=True"):
        torch.compile(decoded, fullgraph=True, backend="eager")(hidden)
    word = torch.randint(N, (P, 4))
    candidates = torch.compile(layer.candidate_log_prob, fullgraph=True, backend="eager")
    torch.testing.assert_close(candidates(hidden, word), layer.candidate_log_prob(hidden, word))
    for wrong in (N, -1, -100):
        with pytest.raises(IndexError, match=f"{wrong} is out of bounds for {N} words"):
            candidates(hidden, torch.full_like(word, wrong))


@ways
def test_any_leading_shape_and_strides_give_the_same_words() -> None:
    hidden, weight, tree, bias = random_layer("balanced", num_positions=12)
    block = hidden.view(3, 4, H).transpose(0, 1)
    weight = weight.T.contiguous().T
    assert not any(each.is_contiguous() for each in (block, weight))
    one_by_one = word_log_prob(hidden, weight, tree, bias).view(3, 4, N).transpose(0, 1)
    torch.testing.assert_close(log_prob(block, weight, tree, bias), one_by_one, rtol=0, atol=1e-12)
    best = topk(block, weight, tree, bias, k=3)
    assert torch.equal(best.word, one_by_one.topk(3).indices)
    assert torch.equal(sample(block, weight, tree, bias, temperature=0), best.word[..., 0])
    assert torch.equal(topk(hidden[5], weight, tree, bias, k=3).word, best.word[1, 1])
    assert sample(hidden[5], weight, tree, bias, top_k=1) == best.word[1, 1, 0]
    penalty = {"repetition_penalty": 1e300, "previous": best.word[1, 1, :1]}
    assert sample(hidden[5], weight, tree, bias, temperature=0, **penalty) == best.word[1, 1, 1]


@ways
def test_blocks_of_positions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer("two_level", num_positions=7)
    whole = topk(*layer, k=4)
    drawn = [draw_many(layer, 9, **options) for options in OPTIONS]
    for module in (draws, search, compiled):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 3 * layer[2].max_path_columns)
    in_blocks = topk(*layer, k=4)
    assert torch.equal(in_blocks.word, whole.word)
    torch.testing.assert_close(in_blocks.log_prob, whole.log_prob, rtol=0, atol=1e-13)
    for options, expected in zip(OPTIONS, drawn, strict=True):
        assert torch.equal(draw_many(layer, 9, **options), expected)
    layer[0][5] = torch.nan
    with pytest.raises(ValueError, match="of position 5 are not finite"):
        topk(*layer, k=4)


@ways
def test_empty_batch_gives_no_words() -> None:
    _, weight, tree, bias = random_layer("two_level")
    hidden = torch.zeros(2, 0, H, dtype=torch.float64)
    assert log_prob(hidden, weight, tree, bias).tolist() == [[], []]
    assert topk(hidden, weight, tree, bias, k=3).word.tolist() == [[], []]
    layer = (torch.zeros(2, H, dtype=torch.float64), weight, tree, bias)
    for options in [*OPTIONS, {"temperature": 0}]:
        assert draw_many(layer, 0, **options).tolist() == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"k": k}, f"k must be within 1 … {N} words, got {k}") for k in (0, N + 1, 2.5, "3")),
        ({"k": N - 1, "excluded": TWICE}, f"k must be within 1 … {N - 2} words, got {N - 1}"),
        ({"k": 1, "excluded": TWICE[1:]}, rf"excluded must be \[{P}, L\] int64, got"),
        ({"k": 1, "excluded": N + 0 * TWICE}, f"excluded must be words 0 … {N - 1}, or -1"),
    ],
)
def test_wrong_numbers_of_words_and_wrong_excluded_words_raise(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk(*random_layer("two_level"), **options)


def test_k_is_an_integer_and_wrong_shapes_raise() -> None:
    hidden, weight, tree, bias = random_layer("full")
    best = topk(hidden, weight, tree, bias, k=2)
    assert torch.equal(topk(hidden, weight, tree, bias, k=torch.tensor(2)).word, best.word)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"R = 23 and W ≥ H = 5, got \[22, 5\]"):
        topk(hidden, weight[1:], tree, bias, k=1)
    with pytest.raises(ValueError, match=r"hidden must be .* floating point, got torch.int64"):
        sample(hidden.long(), weight, tree, bias)


@pytest.mark.parametrize(
    "excluded", [[1, 2], {1, 2}, torch.tensor([1, 2]), torch.tensor([2, 1]).numpy(), range(1, 3)]
)
def test_excluded_words_are_any_collection_of_integers(excluded: Any) -> None:
    layer, hidden = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1, 1])), torch.ones(4)
    assert set(layer.topk(hidden, 2, excluded=excluded).word.tolist()) == {0, 3}
    assert int(layer.sample(hidden, excluded=excluded)) in (0, 3)
    mask = torch.tensor([False, True, True, False])
    wrongs: list[Any] = [0, "12", [1.5], mask, mask.numpy(), mask.tolist()]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="excluded must be a list of token ids, got"):
            layer.topk(hidden, 1, excluded=wrong)
    several = torch.tensor([[0, 1, 2], [3, 1, 2]])
    assert layer.sample(hidden.expand(2, -1), excluded=several).tolist() == [3, 0]
    with pytest.raises(ValueError, match=r"excluded must be \[L\] int64, got \[2, 3\] torch.int64"):
        layer.sample(hidden, excluded=several)
    with pytest.raises(ValueError, match="all words are excluded"):
        layer.sample(hidden[None], excluded=torch.arange(4)[None])


@pytest.mark.parametrize("way", ["by loss", "by node", "too many for the loss"])
@pytest.mark.parametrize("shape", [(40,), (3, 1), (2, 3, 0), (2, 3, 40), (0, 40)])
def test_candidates_equal_the_full_distribution(
    tree: ClassTree, shape: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a bias, and node by node, without one."""
    monkeypatch.setattr(distribution, "_LOSS_DEVICES", set() if way == "by node" else {"cpu"})
    hidden, weight, bias, _ = problem(tree, *shape[:-1])
    layer = layer_of(weight, tree, None if way == "by node" else bias)
    word = torch.randint(N, shape)  # 40 of 23 words: some repeat
    if way == "too many for the loss":
        monkeypatch.setattr(distribution, "_LOSS_ELEMENTS", word.numel() * weight.shape[1] - 1)
    if way != "by loss":
        monkeypatch.setattr(distribution, "hierarchical_cross_entropy", None)
    actual, expected = layer.candidate_log_prob(hidden, word), layer.log_prob(hidden)
    assert (actual.shape, actual.requires_grad) == (word.shape, True)
    torch.testing.assert_close(actual, expected.gather(-1, word))
    for most in (0, 1 << 20):
        monkeypatch.setattr(distribution, "_MAX_DENSE_LOGITS", most)
        with torch.no_grad():
            torch.testing.assert_close(layer.candidate_log_prob(hidden, word), actual.detach())
    if word.numel():
        upstream = torch.randn(word.shape, dtype=torch.float64)
        inputs = [hidden, *layer.parameters()]
        truth = torch.autograd.grad(expected.gather(-1, word), inputs, upstream)
        torch.testing.assert_close(torch.autograd.grad(actual, inputs, upstream), truth)


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        (torch.tensor([[0], [N]]), IndexError, "^candidate 23 is out of bounds for 23 words$"),
        (torch.tensor([[0], [-100]]), IndexError, "^candidate -100 is out of bounds for 23 words$"),
        (torch.zeros(3, 1).long(), ValueError, r"candidates \[..., K\], got \[2, 6\] and \[3, 1\]"),
        (torch.zeros(2, 1).int(), ValueError, "^candidates must be int64 on cpu, got torch.int32"),
    ],
)
def test_candidates_that_are_no_words_are_named(word: Tensor, error: Any, message: str) -> None:
    hidden, weight, *_ = problem(TWO_LEVEL, 2)
    with pytest.raises(error, match=message):
        layer_of(weight, TWO_LEVEL).candidate_log_prob(hidden, word)
