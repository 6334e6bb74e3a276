"""Decoding against the full distribution, which is written out word by word in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.decoding import functional as decoding_module
from lm.output.decoding.expansion import Opener
from lm.output.decoding.functional import log_prob, sample, topk
from lm.output.decoding.sampling import RejectionSampler, Uniforms
from lm.output.decoding.search import nuclei
from lm.output.decoding.search import topk as search_topk

N, H, P = 23, 5, 6
SIGNIFICANCE = 1e-4

Args = tuple[Tensor, Tensor, Tensor, ClassTree]
Options = dict[str, Any]
NO_CUT: Options = {}
CUTS: list[Options] = [
    {},
    {"temperature": 1.5},
    {"temperature": 0.6},
    {"top_k": 9},
    {"top_p": 0.9},
]


def random_paths(num_words: int, seed: int = 3) -> list[list[int]]:
    """Words of all depths, and nodes of a single child."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [[0]]
    while len(leaves) < num_words:
        path = leaves.pop(int(torch.randint(len(leaves), (), generator=generator)))
        width = int(torch.randint(1, 4, (), generator=generator))
        leaves += [[*path, child] for child in range(min(width, num_words - len(leaves)))]
    return leaves


def zipf(num_words: int) -> Tensor:
    return 1000 // torch.arange(1, num_words + 1)


def word_class(num_words: int, num_classes: int = 6) -> Tensor:
    """Shuffled classes of different sizes, the last of them a single word."""
    generator = torch.Generator().manual_seed(5)
    classes = torch.randint(num_classes - 1, (num_words,), generator=generator)
    classes[num_words // 2] = num_classes - 1
    return classes


TREES: dict[str, Callable[[int], ClassTree]] = {
    "full": ClassTree.full,
    "two_level": lambda n: ClassTree.two_level(word_class(n)),
    "head": lambda n: ClassTree.two_level(word_class(n), head=min(n, 4)),
    "one word a class": lambda n: ClassTree.two_level(torch.arange(n)),
    "balanced": lambda n: ClassTree.balanced(n, 3),
    "huffman 2": lambda n: ClassTree.huffman(zipf(n)),
    "huffman 3": lambda n: ClassTree.huffman(zipf(n), 3),
    "paths": lambda n: ClassTree.from_paths(random_paths(n)),
}
all_trees = pytest.mark.parametrize("shape", TREES)


def layer(tree: ClassTree, scale: float = 1.0, num_positions: int = P, seed: int = 0) -> Args:
    """hidden [P, H], weight [R, H], bias [R] and the tree, as the functions take them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_positions, H), (tree.num_rows, H), (tree.num_rows,))
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return hidden, weight * scale, bias * scale, tree


def converted(args: Args, dtype: torch.dtype) -> Args:
    hidden, weight, bias, tree = args
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), tree


def by_paths(hidden: Tensor, weight: Tensor, bias: Tensor, tree: ClassTree) -> Tensor:
    """Log-probabilities [P, N]: for each word the sum over its path, as the definition says."""
    columns = []
    for word in range(tree.vocab_size):
        total = hidden.new_zeros(hidden.shape[0])
        for node, row in tree.path(word):
            first, width = int(tree.first_row[node]), int(tree.num_children[node])
            logits = hidden @ weight[first : first + width].T + bias[first : first + width]
            total = total + logits[:, row - first] - logits.logsumexp(1)
        columns.append(total)
    return torch.stack(columns, dim=1)


def node_log_prob(hidden: Tensor, weight: Tensor, bias: Tensor, tree: ClassTree) -> Tensor:
    """Log-probabilities of the nodes [P, I], summed over the words below them."""
    of_words = by_paths(hidden, weight, bias, tree)
    below = torch.zeros(tree.num_nodes, tree.vocab_size, dtype=torch.bool)
    for word in range(tree.vocab_size):
        below[[node for node, _ in tree.path(word)], word] = True
    return torch.stack([of_words[:, words].logsumexp(1) for words in below], dim=1)


def filtered(
    of_words: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution [N] to sample from: temperature, then top-k, then top-p."""
    order = of_words.argsort(descending=True, stable=True)
    probs = (of_words[order] / temperature).softmax(0)
    if top_k is not None:
        probs[top_k:] = 0
        probs /= probs.sum()
    if top_p is not None:
        before = probs.cumsum(0) - probs
        probs[before >= top_p] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def assert_distributed(words: Tensor, probs: Tensor) -> None:
    """Pearson's test of draws [D] from probs [N]; words expected less than 5 times count as one."""
    counts = torch.bincount(words, minlength=probs.numel()).double()
    assert counts[probs == 0].sum() == 0
    expected = probs * words.numel()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = max(1, int(kept.sum()) - 1)
    assert chi2.sf(float(statistic), degrees) > SIGNIFICANCE, f"{statistic:.1f}, {degrees} degrees"


def draw_many(args: Args, num_draws: int, seed: int = 1, **options: Any) -> Tensor:
    """Draws [P, num_draws], all at once."""
    hidden, weight, bias, tree = args
    generator = torch.Generator().manual_seed(seed)
    repeated = hidden[:, None].expand(-1, num_draws, -1)
    return sample(repeated, weight, bias, tree, generator=generator, **options)


@all_trees
@pytest.mark.parametrize("num_words", [1, 2, N])
def test_log_prob_is_the_sum_over_the_path_and_sums_to_one(shape: str, num_words: int) -> None:
    args = layer(TREES[shape](num_words))
    actual = log_prob(*args)
    torch.testing.assert_close(actual, by_paths(*args), rtol=0, atol=1e-12)
    torch.testing.assert_close(actual.exp().sum(1), torch.ones(P).double(), rtol=0, atol=1e-12)


@all_trees
def test_log_prob_agrees_with_the_loss(shape: str) -> None:
    hidden, weight, bias, tree = layer(TREES[shape](N))
    target = torch.arange(P) * 4
    nll = hierarchical_cross_entropy(hidden, weight, target, tree, bias, reduction="none")
    picked = log_prob(hidden, weight, bias, tree).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(-picked, nll, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", ["full", "head", "paths"])
def test_gradients_of_log_prob_are_those_of_finite_differences(shape: str) -> None:
    hidden, weight, bias, tree = layer(TREES[shape](7), num_positions=2)
    inputs = tuple(tensor.requires_grad_() for tensor in (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w, b: log_prob(h, w, b, tree), inputs)
    assert torch.autograd.gradcheck(lambda h, w: log_prob(h, w, None, tree), inputs[:2])


def test_half_precision_log_prob_is_that_of_the_rounded_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lm.output.decoding.expansion._CAST_ELEMENTS", 4 * H
    )  # portions of four rows
    half = converted(layer(TREES["two_level"](N)), torch.bfloat16)
    single = converted(half, torch.float32)
    upstream = torch.randn(P, N, generator=torch.Generator().manual_seed(2))
    grads = []
    for args in (half, single):
        leaves = [leaf.requires_grad_() for leaf in args[:3]]
        grads.append(torch.autograd.grad(log_prob(*args), leaves, upstream))
    torch.testing.assert_close(log_prob(*half), log_prob(*single), rtol=0, atol=1e-5)
    for rounded, exact in zip(*grads, strict=True):
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=1e-5)


@all_trees
@pytest.mark.parametrize("num_words", [1, 2, N])
def test_topk_is_the_head_of_the_sorted_distribution(shape: str, num_words: int) -> None:
    args = layer(TREES[shape](num_words))
    of_words = by_paths(*args)
    order = of_words.argsort(dim=1, descending=True, stable=True)
    for k in {1, min(5, num_words), num_words}:
        best = topk(*args, k)
        assert torch.equal(best.word, order[:, :k])
        expected = of_words.gather(1, order[:, :k])
        torch.testing.assert_close(best.log_prob, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "tree",
    [
        ClassTree.full(12),
        ClassTree.two_level([2, 0, 1, 1, 0, 2, 0, 1, 2, 2, 1, 0]),
        ClassTree.from_paths([[3 - w // 3, 2 - w % 3] for w in range(12)]),
        ClassTree.two_level(torch.arange(12).flip(0)),
    ],
)
@pytest.mark.parametrize("k", [1, 5, 12])
def test_ties_go_to_the_lowest_word(tree: ClassTree, k: int) -> None:
    hidden, weight = torch.randn(2, H), torch.zeros(tree.num_rows, H)
    assert topk(hidden, weight, None, tree, k).word.tolist() == [list(range(k))] * 2


def test_a_node_as_probable_as_the_last_word_is_opened_for_a_lower_word() -> None:
    tree = ClassTree.from_paths([[1, 0], [0]])
    best = topk(torch.zeros(1, H), torch.zeros(tree.num_rows, H), None, tree, 1)
    assert best.word.tolist() == [[0]]


@all_trees
@pytest.mark.parametrize("k", [1, 4])
def test_topk_opens_the_nodes_that_reach_the_last_word_and_no_others(shape: str, k: int) -> None:
    args = layer(TREES[shape](N), scale=2.0)
    last = by_paths(*args).topk(k).values[:, -1:]
    opener = Opener(*args)
    search_topk(opener, k)
    assert opener.num_opened == int((node_log_prob(*args) >= last - 1e-12).sum())


def test_a_peaked_distribution_opens_one_class() -> None:
    tree = ClassTree.two_level(torch.arange(400) % 20)
    hidden, weight = torch.zeros(3, H), torch.zeros(tree.num_rows, H)
    bias = torch.zeros(tree.num_rows)
    bias[7] = 20.0
    opener = Opener(hidden, weight, bias, tree)
    assert search_topk(opener, 5).word.tolist() == [[7, 27, 47, 67, 87]] * 3
    assert opener.num_opened == 3 * 2
    opener = Opener(hidden, weight, bias, tree)
    ((position, nucleus),) = nuclei(opener, 1.0, 0.925)
    assert position.tolist() == [0, 1, 2]
    assert nucleus.word.tolist() == [[7 + 20 * i for i in range(19)]] * 3
    assert opener.num_opened == 3 * 2


@all_trees
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(shape: str, temperature: float) -> None:
    args = layer(TREES[shape](N))
    of_words = by_paths(*args)
    for top_p in (0.01, 0.6, 0.93, 0.9999):
        found = nucleus_words(args, temperature, top_p)
        for p in range(P):
            kept = filtered(of_words[p], temperature, None, top_p) > 0
            order = of_words[p].argsort(descending=True)
            assert found[p] == [word for word in order.tolist() if kept[word]]


def nucleus_words(args: Args, temperature: float, top_p: float) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for position, nucleus in nuclei(Opener(*args), 1 / temperature, top_p):
        for p, words, values in zip(position.tolist(), nucleus.word, nucleus.log_prob, strict=True):
            found[p] = words[values > -torch.inf].tolist()
    return [found[p] for p in range(P)]


@all_trees
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.7, "top_p": 0.8},
        {"temperature": 0.5, "top_p": 0.97},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.7},
    ],
    ids=str,
)
def test_frequencies_match_the_full_distribution(shape: str, options: Options) -> None:
    args = layer(TREES[shape](N), num_positions=3)
    words = draw_many(args, 7000, **options)
    of_words = by_paths(*args)
    temperature = options.get("temperature", 1.0)
    for drawn, own in zip(words, of_words, strict=True):
        probs = filtered(own, temperature, options.get("top_k"), options.get("top_p"))
        assert_distributed(drawn, probs)


@pytest.mark.parametrize("temperature", [0.25, 4.0, 1e9])
def test_frequencies_match_at_extreme_temperatures(temperature: float) -> None:
    for shape in ("two_level", "huffman 3"):
        args = layer(TREES[shape](N), num_positions=1)
        (drawn,) = draw_many(args, 20000, temperature=temperature)
        assert_distributed(drawn, filtered(by_paths(*args)[0], temperature))


@all_trees
def test_temperature_zero_and_nearly_zero_give_the_most_probable_word(shape: str) -> None:
    args = layer(TREES[shape](N))
    expected = by_paths(*args).argmax(1)
    for temperature in (0.0, 1e-300, 1e-100, 1e-9):
        for options in NO_CUT, {"top_k": 3}, {"top_p": 0.9}:
            assert torch.equal(sample(*args, temperature=temperature, **options), expected)


@all_trees
def test_a_cut_that_leaves_everything_changes_nothing(shape: str) -> None:
    args = layer(TREES[shape](N), num_positions=2)
    for temperature in (1.0, 1.7):
        plain = draw_many(args, 50, temperature=temperature)
        uncut = draw_many(args, 50, temperature=temperature, top_k=N + 1, top_p=1.0)
        assert torch.equal(uncut, plain)


@all_trees
def test_sampling_at_temperature_one_opens_the_path_of_the_word_alone(shape: str) -> None:
    args = layer(TREES[shape](N))
    opener = Opener(*args)
    uniforms = Uniforms(P, torch.device("cpu"), torch.Generator().manual_seed(0))
    words = RejectionSampler(opener, uniforms, 1.0).sample()
    assert opener.num_opened == sum(len(args[3].path(word)) for word in words.tolist())


def test_failed_trials_teach_the_sampler_where_not_to_look() -> None:
    """Class 0 is the more probable one and holds improbable words alone; class 1 is one word."""
    tree = ClassTree.two_level(torch.tensor([1] + [0] * 200))
    hidden, weight = torch.zeros(2000, H), torch.zeros(tree.num_rows, H)
    bias = torch.zeros(tree.num_rows)
    bias[0] = 2.0
    opener = Opener(hidden, weight, bias, tree)
    uniforms = Uniforms(2000, torch.device("cpu"), torch.Generator().manual_seed(0))
    words = RejectionSampler(opener, uniforms, 4.0).sample()
    assert (
        opener.num_opened < 2000 * 3.1
    )  # the root, class 0 at most once in vain, the class of the word
    of_words = log_prob(hidden[:1], weight, bias, tree)[0].double()
    assert_distributed(words, filtered(of_words, 0.25))


def test_the_same_generator_gives_the_same_words() -> None:
    args = layer(TREES["two_level"](N), num_positions=40)
    for options in CUTS:
        first, again, other = (
            sample(*args, generator=torch.Generator().manual_seed(seed), **options)
            for seed in (7, 7, 8)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    torch.manual_seed(7)
    assert torch.equal(sample(*args), sample(*args, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_the_word_of_a_position_does_not_depend_on_the_other_positions(options: Options) -> None:
    hidden, weight, bias, tree = layer(TREES["huffman 3"](N), num_positions=40)
    others = hidden.clone()
    others[::2] = torch.randn(20, H, dtype=torch.float64) * 3
    first, second = (
        sample(h, weight, bias, tree, generator=torch.Generator().manual_seed(3), **options)
        for h in (hidden, others)
    )
    assert torch.equal(first[1::2], second[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_means_rounded_inputs_and_sums_in_single(dtype: torch.dtype) -> None:
    rounded = converted(layer(TREES["head"](N), scale=0.5), dtype)
    expected = by_paths(*converted(rounded, torch.float64)).topk(5)
    best = topk(*rounded, 5)
    assert best.log_prob.dtype == torch.float32
    assert torch.equal(best.word, expected.indices)
    torch.testing.assert_close(best.log_prob.double(), expected.values, rtol=0, atol=1e-5)
    words = draw_many(rounded, 10, top_k=1)
    assert torch.equal(words, expected.indices[:, :1].expand(-1, 10))


def test_autocast_changes_nothing() -> None:
    args = converted(layer(TREES["two_level"](N)), torch.float32)
    outside = (log_prob(*args), *topk(*args, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (log_prob(*args), *topk(*args, 4))
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


def test_any_leading_shape_and_strides_give_the_words_of_single_positions() -> None:
    hidden, weight, bias, tree = layer(TREES["balanced"](N), num_positions=12)
    block = hidden.view(3, 4, H).transpose(0, 1)
    weight = weight.T.contiguous().T
    assert not block.is_contiguous()
    assert not weight.is_contiguous()
    one_by_one = by_paths(hidden, weight, bias, tree).view(3, 4, N).transpose(0, 1)
    actual = log_prob(block, weight, bias, tree)
    torch.testing.assert_close(actual, one_by_one, rtol=0, atol=1e-12)
    best = topk(block, weight, bias, tree, 3)
    assert torch.equal(best.word, one_by_one.topk(3).indices)
    assert torch.equal(sample(block, weight, bias, tree, temperature=0), best.word[..., 0])
    assert torch.equal(topk(hidden[5], weight, bias, tree, 3).word, best.word[1, 1])
    assert sample(hidden[5], weight, bias, tree, top_k=1) == best.word[1, 1, 0]


def test_blocks_of_positions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = layer(TREES["two_level"](N), num_positions=7)
    whole = topk(*args, 4)
    drawn = [draw_many(args, 9, **options) for options in CUTS]
    monkeypatch.setattr(decoding_module, "_BLOCK_ELEMENTS", 3 * args[3].max_path_columns)
    in_blocks = topk(*args, 4)
    assert torch.equal(in_blocks.word, whole.word)
    torch.testing.assert_close(in_blocks.log_prob, whole.log_prob, rtol=0, atol=1e-13)
    for options, expected in zip(CUTS, drawn, strict=True):
        assert torch.equal(draw_many(args, 9, **options), expected)
    args[0][5] = torch.nan
    with pytest.raises(ValueError, match="of position 5 are not finite"):
        topk(*args, 4)


def test_no_positions_give_no_words() -> None:
    _, weight, bias, tree = layer(TREES["two_level"](N))
    hidden = torch.zeros(2, 0, H, dtype=torch.float64)
    assert log_prob(hidden, weight, bias, tree).tolist() == [[], []]
    assert topk(hidden, weight, bias, tree, 3).word.tolist() == [[], []]
    for options in NO_CUT, {"temperature": 0}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}:
        assert sample(hidden, weight, bias, tree, **options).tolist() == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be within \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be within \(0, 1\], got 1.1"),
    ],
)
def test_options_out_of_range_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(*layer(TREES["full"](N)), **options)


def test_k_and_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, bias, tree = layer(TREES["full"](N))
    for k in (0, N + 1):
        with pytest.raises(ValueError, match=f"k must be within 1 … {N} words, got {k}"):
            topk(hidden, weight, bias, tree, k)
    with pytest.raises(ValueError, match=r"weight must be \[R, H\] = \[23, 5\], got \[22, 5\]"):
        topk(hidden, weight[1:], bias, tree, 1)
    with pytest.raises(ValueError, match=r"bias must be \[R\] = \[23\], got \[22\]"):
        log_prob(hidden, weight, bias[1:], tree)
    with pytest.raises(ValueError, match=r"hidden must be .* floating point, got torch.int64"):
        sample(hidden.long(), weight, bias, tree)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", CUTS, ids=str)
def test_what_is_not_finite_is_refused_by_position(value: float, options: Options) -> None:
    hidden, weight, bias, tree = layer(TREES["two_level"](N))
    weight[:, 0] = 1.0
    hidden[4, 0] = value
    with pytest.raises(ValueError, match="log-probabilities of position 4 are not finite"):
        sample(hidden, weight, bias, tree, **options)


@all_trees
def test_bounds_hold_for_every_node(shape: str) -> None:
    """Σ q^β over the words below a node is at most its bound, and is it where all q are equal."""
    args = layer(TREES[shape](N))
    tree = args[3]
    of_words, of_nodes = by_paths(*args), node_log_prob(*args)
    opener = Opener(*args)
    for node in range(tree.num_nodes):
        below = [word for word in range(N) if node in dict(tree.path(word))]
        q = of_words[:, below] - of_nodes[:, node, None]
        for power in (0.4, 1.0, 2.5):
            bound = opener.log_bound(power)[node]
            assert bool(((power * q).logsumexp(1) <= bound + 1e-12).all())
        equal = torch.full((len(below),), 1 / len(below), dtype=torch.float64)
        torch.testing.assert_close(opener.log_bound(0.4)[node], equal.pow(0.4).sum().log())
