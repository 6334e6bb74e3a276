"""Sampling: draws, also of the kernel, follow the distribution, open few nodes, depend on seeds."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lm.output import ClassTree, Sampling
from lm.output.backends.triton.tile_shapes import Tile
from lm.output.decoding import compiled, draws, fused
from lm.output.decoding.distribution import finder, topk
from lm.output.decoding.draws import derive_seeds
from lm.output.decoding.positions import Penalty, Positions

from . import truth
from .truth import H, Options, P, all_shapes, flat_layer, random_layer, sample, ways, word_log_prob

PENALTY: Options = {"repetition_penalty": 1.5, "previous": [0, 2, 2, -1, 11, 22, *range(4, 9)]}
REPEATED: Options = {"repetition_penalty": 1.1}
EXCLUDED: Options = {"excluded": (0, 3, 11, 3)}
DISTRIBUTIONS: list[Options] = [
    {}, {"temperature": 0.5}, {"temperature": 1.7}, {"temperature": 1e9}, {"top_k": 7},
    {"top_p": 0.8}, {"temperature": 1.7, "top_p": 0.8}, {"temperature": 0.5, "top_p": 0.97},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "min_p": 0.1},
    {"temperature": 1.7, "min_p": 0.3}, {"temperature": 0.6, "top_p": 0.97, "min_p": 0.05},
    PENALTY, PENALTY | {"temperature": 1.7}, PENALTY | {"top_k": 7}, PENALTY | {"top_p": 0.8},
    PENALTY | {"repetition_penalty": 30.0, "temperature": 0.7}, PENALTY | {"min_p": 0.1},
    PENALTY | {"temperature": 1.7, "top_k": 15, "top_p": 0.9, "min_p": 0.2},
    EXCLUDED, EXCLUDED | {"temperature": 1.7}, EXCLUDED | {"top_k": 7}, EXCLUDED | {"top_p": 0.8},
    EXCLUDED | {"min_p": 0.1}, EXCLUDED | PENALTY,
]  # fmt: skip


OWN: list[Options] = [
    {}, {"temperature": 1.7}, {"top_k": 7}, {"min_p": 0.1}, PENALTY,
    {"top_p": 0.5}, {"top_p": 0.5, "temperature": 1.7},
]  # fmt: skip
"""With words excluded from each position."""
SHAPES = {"compiled": ["full", "shortlist", "paths"], "reference": ["paths"]}
"""Trees whose nodes are opened in different ways: operations evaluate all words of all of them."""
CASES = [
    (way, shape, is_own, options)
    for way, shapes in SHAPES.items()
    for is_own, table in ((False, DISTRIBUTIONS), (True, OWN))
    for options in table
    for shape in (shapes if options else truth.TREES)
]
by_kernel = pytest.mark.usefixtures("_kernel")


@ways
@pytest.mark.parametrize(("way", "shape", "is_own", "options"), CASES, indirect=["way"], ids=str)
def test_frequencies_match_the_full_distribution(
    shape: str, is_own: bool, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given, num = random_layer(shape, num_positions=3), dict(options), 7000
    full, left_out = word_log_prob(*layer), [set(options.get("excluded", ()))] * 3
    if is_own:
        monkeypatch.setattr(compiled, "NUM_DRAWS", 1)  # half of those outside a nucleus are left
        excluded = torch.tensor([[3, 3, int(full[0].argmax())], [0, 1, 11], [-1, -1, -1]])
        given["own_excluded"] = excluded[:, None].expand(-1, num, -1)
        left_out = [set(words) - {-1} for words in excluded.tolist()]
    drawn = truth.draw_many(layer, num, **given)
    for words, log_prob, out in zip(drawn, full, left_out, strict=True):
        truth.assert_distributed(words, truth.restricted(log_prob, **(options | {"excluded": out})))


@ways
def test_excluded_words_are_not_drawn_at_any_temperature() -> None:
    layer = random_layer("two_level", num_positions=1)
    num_words = word_log_prob(*layer).shape[1]
    penalty: Options = {"repetition_penalty": 1e300, "previous": range(num_words)}
    restrictions: tuple[Options, ...] = ({}, {"min_p": 0.5}, penalty)
    for options in restrictions:
        (drawn,) = truth.draw_many(layer, 2000, temperature=1e300, excluded=(0, 1), **options)
        assert drawn.unique().tolist() == list(range(2, num_words))


@ways
def test_only_excluded_words_are_less_probable_than_masked_ones() -> None:
    """Two words of a class have the least bias in fp32; a penalty overflows in it."""
    least, tree = float(torch.finfo(torch.float32).min), ClassTree.two_level([0, 0, 0, 1])
    bias = dict.fromkeys(tree.row_of_word[:2].tolist(), least)
    layer = truth.converted(flat_layer(tree, P, bias), torch.float32)
    assert topk(*layer, k=2, excluded=(2, 3)).word.tolist() == [[0, 1]] * P
    assert set(sample(*layer, excluded=(2, 3)).tolist()) <= {0, 1}
    penalty: Options = {"repetition_penalty": 1e39, "previous": [2]}
    assert sample(*layer, excluded=(3,), **penalty).tolist() == [2] * P


@ways
@pytest.mark.parametrize("num_words", [2, 23, 100])
@pytest.mark.parametrize("top_p", [1e-9, 0.305])
def test_the_nucleus_of_equal_words_is_the_first_of_them(num_words: int, top_p: float) -> None:
    layer = flat_layer(ClassTree.two_level(num_words=num_words), P)
    log_prob = word_log_prob(*layer)[0]
    possible = truth.restricted(log_prob, top_p=top_p, min_p=0.5).nonzero().flatten().tolist()
    words = sample(*layer, top_p=top_p, min_p=0.5, seeds=torch.arange(P))
    assert set(words.tolist()) <= set(possible)


@pytest.mark.parametrize("temperature", [Fraction(1, 2), np.float32(0.5)])
def test_options_are_any_real_numbers(temperature: Any) -> None:
    layer, seeds = random_layer("two_level"), torch.arange(P)
    assert type(Sampling(temperature=temperature).temperature) is float
    for options in ({}, {"top_k": 7}):
        given: Options = options | {"temperature": temperature, "top_p": Fraction(3, 4)}
        expected = sample(*layer, seeds=seeds, temperature=0.5, top_p=0.75, **options)
        assert torch.equal(sample(*layer, seeds=seeds, **given), expected)
    expected = sample(*layer, seeds=seeds, top_k=3)
    for top_k in (np.uint64(3), np.int8(3)):
        assert torch.equal(sample(*layer, seeds=seeds, top_k=top_k), expected)


@ways
@all_shapes
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_temperatures_near_zero_give_the_most_probable_word(shape: str, options: Options) -> None:
    layer = random_layer(shape)
    expected = word_log_prob(*layer).argmax(1)
    for temperature in (0.0, 1e-300, 1e-100, 1e-9):
        assert torch.equal(sample(*layer, temperature=temperature, **options), expected)


@ways
@all_shapes
def test_temperature_one_opens_only_the_path_of_the_word(shape: str) -> None:
    layer = random_layer(shape)
    positions = Positions(*layer)
    words = finder(positions).draw_words(positions, torch.arange(P), 1.0, 1.0)
    assert positions.num_opened == sum(len(layer[2].path(word)) for word in words.tolist())


@ways
def test_penalty_of_all_words_of_a_sure_class_is_exact_and_ends() -> None:
    """All the probability is in words that the penalty makes improbable."""
    layer = flat_layer(ClassTree.two_level(torch.arange(40) // 20), 3000, {0: 30.0})
    penalties = Penalty(50.0, layer[2].row_of_word[:20].expand(3000, -1))
    positions = Positions(*layer, penalty=penalties)
    words = finder(positions).draw_words(positions, torch.arange(3000), 1.0, 1.0)
    # The root, class 0 at most once without success, class 1.
    assert positions.num_opened <= 3000 * 3
    penalty: Options = {"repetition_penalty": 50.0, "previous": range(20)}
    truth.assert_distributed(words, truth.restricted(word_log_prob(*layer)[0], **penalty))


def test_penalty_opens_no_node_for_the_previous_words() -> None:
    """Class 0 is drawn almost always, and its words are never penalised."""
    layer = flat_layer(ClassTree.two_level(torch.arange(400) // 20), 50, {0: 40.0})
    penalties = Penalty(2.0, layer[2].row_of_word[20:].expand(50, -1))
    positions = Positions(*layer, penalty=penalties)
    finder(positions).draw_words(positions, torch.arange(50), 1.0, 1.0)
    assert positions.num_opened == 50 * 2


@ways
@pytest.mark.parametrize("options", truth.OPTIONS, ids=str)
def test_word_of_a_position_depends_on_its_seed_and_not_on_others(options: Options) -> None:
    hidden, weight, tree, bias = random_layer("huffman 3", num_positions=40)
    others, seeds, order = hidden.clone(), torch.arange(40), torch.randperm(40)[:25]
    others[::2] = torch.randn(20, H, dtype=torch.float64) * 3
    first, second = (
        sample(h, weight, tree, bias, generator=torch.Generator().manual_seed(3), **options)
        for h in (hidden, others)
    )
    assert torch.equal(first[1::2], second[1::2])
    generator = torch.Generator().manual_seed(4)
    other = sample(hidden, weight, tree, bias, generator=generator, **options)
    assert not torch.equal(first, other)
    seeded = sample(hidden, weight, tree, bias, seeds=seeds, **options)
    again = sample(hidden[order], weight, tree, bias, seeds=seeds[order], **options)
    assert torch.equal(again, seeded[order])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": "3"}, "top_k must be an integer, got '3'"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be within \(0, 1\], got 0.0"),
        ({"min_p": -0.1}, r"min_p must be within \[0, 1\], got -0.1"),
        ({"repetition_penalty": 0.9}, "repetition_penalty must be finite and at least 1, got 0.9"),
        (REPEATED, "repetition_penalty requires the previous words"),
        (REPEATED | {"previous": torch.zeros(2, 3).long()}, r"be \[6, L\] int64, got \[2, 3\] "),
        (REPEATED | {"previous": torch.full((P, 1), 23)}, "previous must be words 0 … 22, or -1"),
        ({"seeds": torch.arange(P), "generator": torch.Generator()}, "expected one of the two"),
        ({"generator": 3}, "generator must be a torch.Generator, got 3"),
        ({"seeds": torch.zeros(P)}, r"seeds must be \[6\] int64, got \[6\] torch.float32"),
    ],
)
def test_options_out_of_range_raise(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(*random_layer("full"), **options)


@ways
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [*truth.OPTIONS, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_nan_and_inf_raise_with_their_position(value: float, options: Options) -> None:
    hidden, weight, tree, bias = random_layer("two_level")
    weight[:, 0] = 1.0
    hidden[4, 0] = value
    with pytest.raises(ValueError, match="log-probabilities of position 1, 1 are not finite"):
        sample(hidden.view(2, 3, H), weight, tree, bias, **options)


def test_seeds_are_the_published_sequence() -> None:
    """The first outputs for seed 1234567, as listed with Vigna's splitmix64.c."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected += [4593380528125082431, 16408922859458223821]
    seeds = derive_seeds(torch.tensor(1234567), torch.arange(5))
    assert [seed % (1 << 64) for seed in seeds.tolist()] == expected


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of several blocks of children, hidden vectors of several blocks, in the interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(compiled, "is_usable", lambda positions: False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "TILE", Tile(1, 4, 2, 1, 1))
    monkeypatch.setattr(fused, "is_right", lambda *_: True)


@by_kernel
@pytest.mark.parametrize("power", [0.6, 1.0, 2.5])
@pytest.mark.parametrize(
    ("shape", "num_trials"),
    [("full", 16), ("shortlist", 16), ("paths", 16), ("two_level", 1), ("huffman 3", 1)],
)
def test_words_are_those_of_the_trials(
    shape: str, power: float, num_trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Excluded is also the only word of a class."""
    monkeypatch.setattr(fused, "NUM_TRIALS", num_trials)
    hidden, weight, tree, bias = layer = random_layer(shape, scale=1.5)
    excluded = tree.row_of_word[[0, 3, truth.N // 2]] if power > 1 else tree.row_of_word[:0]
    positions = Positions(*layer, excluded=excluded if len(excluded) else None)
    each = [(hidden[[p]], weight, tree, bias) for p in range(6)]
    expected = [truth.trials(one, p, power, excluded, num_trials) for p, one in enumerate(each)]
    assert fused.launch_draws(positions, torch.arange(6), power).tolist() == expected


@by_kernel
def test_a_number_above_all_rounded_sums_draws_the_last_word_that_is_not_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = pytest.importorskip("lm.output.backends.triton.draw_kernel")
    monkeypatch.setattr(
        kernels, "_uniform", lambda seed, used: kernels.tl.full((), 1.0, kernels.tl.float64)
    )
    layer = random_layer("full")
    positions = Positions(*layer, excluded=layer[2].row_of_word[[truth.N - 1, truth.N - 2]])
    assert fused.launch_draws(positions, torch.arange(P), 1.0).tolist() == [truth.N - 3] * P


@by_kernel
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_words_of_positions_that_are_left_follow_the_distribution(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tree, bias = layer = random_layer("huffman 3", num_positions=1)
    num, excluded, rows = 1500, (0, 3), tree.row_of_word[[0, 3]]
    words = torch.tensor([truth.trials(layer, s, 1 / temperature, rows, 1) for s in range(num)])
    assert 0.1 < float((words < 0).float().mean()) < 0.9
    monkeypatch.setattr(fused, "launch_draws", lambda positions, seeds, power: words.clone())
    options: dict[str, Any] = {"temperature": temperature, "excluded": excluded}
    many = hidden.expand(num, -1), weight, tree, bias
    drawn = sample(*many, seeds=torch.arange(num), **options)
    assert torch.equal(drawn[words >= 0], words[words >= 0])
    truth.assert_distributed(drawn, truth.restricted(word_log_prob(*layer)[0], **options))


@by_kernel
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of_root", [True, False])
def test_the_kernel_sees_log_probabilities_that_are_not_finite(value: float, of_root: bool) -> None:
    hidden, weight, tree, bias = random_layer("two_level")
    row = tree.row_of_word[0]
    bias[tree.row_of_node[tree.node_of_row[row]]] = 100  # the class is certain
    bias[1 if of_root else row] = value
    with pytest.raises(ValueError, match="log-probabilities of position 0 are not finite"):
        sample(hidden, weight, tree, bias, seeds=torch.arange(6))


@by_kernel
def test_extreme_temperatures_and_own_words_use_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "launch_draws", lambda *_: pytest.fail("launched"))
    layer, seeds = random_layer("two_level"), torch.arange(6)
    rows = torch.zeros(6, 1, dtype=torch.int64)
    for positions, power in (
        (Positions(*layer), fused.MOST_POWER * 1.1),
        (Positions(*layer), fused.LEAST_POWER / 1.1),
        (Positions(*layer, penalty=Penalty(2.0, rows)), 1.0),
        (Positions(*layer, excluded=rows), 1.0),
    ):
        expected = draws.draw_words(positions, seeds, power)
        assert torch.equal(fused.draw_words(positions, seeds, power), expected)
