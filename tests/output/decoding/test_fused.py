"""The kernel draws words by trials, here in the interpreter; what they leave; its verification."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lm.output import HierarchicalSoftmax
from lm.output.backends.triton.tile_shapes import Tile
from lm.output.decoding import compiled, draws, fused
from lm.output.decoding.positions import Penalty, Positions

from .truth import (
    TREES,
    H,
    N,
    Options,
    assert_distributed,
    random_layer,
    restricted,
    sample,
    trials,
    word_log_prob,
)


@pytest.fixture(autouse=True)
def _way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of several blocks of children, hidden vectors of several blocks."""
    monkeypatch.setattr(compiled, "is_usable", lambda positions: False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "TILE", Tile(1, 4, 2, 1, 1))
    monkeypatch.setattr(fused, "_verified", lambda device, dtypes: True)


@pytest.mark.parametrize("power", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("shape", ["full", "two_level", "shortlist", "huffman 3", "paths"])
@pytest.mark.parametrize("num_trials", [1, fused.NUM_TRIALS])
def test_words_are_those_of_the_trials(
    shape: str, power: float, num_trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Excluded is also the only word of a class."""
    monkeypatch.setattr(fused, "NUM_TRIALS", num_trials)
    hidden, weight, tree, bias = layer = random_layer(shape, scale=1.5)
    seeds = torch.arange(6)
    excluded = tree.row_of_word[[0, 3, N // 2]] if power > 1 else tree.row_of_word[:0]
    positions = Positions(*layer, excluded=excluded if len(excluded) else None)
    expected = [
        trials((hidden[[p]], weight, tree, bias), p, power, excluded, num_trials) for p in range(6)
    ]
    assert fused.launch_draws(positions, seeds, power).tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_words_of_positions_that_are_left_follow_the_distribution(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tree, bias = layer = random_layer("huffman 3", num_positions=1)
    num, excluded, rows = 5000, (0, 3), tree.row_of_word[[0, 3]]
    words = torch.tensor([trials(layer, s, 1 / temperature, rows, 1) for s in range(num)])
    assert 0.1 < float((words < 0).float().mean()) < 0.9
    monkeypatch.setattr(fused, "launch_draws", lambda positions, seeds, power: words.clone())
    options: Options = {"temperature": temperature, "excluded": excluded}
    many = hidden.expand(num, -1), weight, tree, bias
    drawn = sample(*many, seeds=torch.arange(num), **options)
    assert torch.equal(drawn[words >= 0], words[words >= 0])
    assert_distributed(drawn, restricted(word_log_prob(*layer)[0], **options))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of_root", [True, False])
def test_log_probabilities_that_are_not_finite_raise(value: float, of_root: bool) -> None:
    hidden, weight, tree, bias = random_layer("two_level")
    row = tree.row_of_word[0]
    bias[tree.row_of_node[tree.node_of_row[row]]] = 100  # the class is certain
    bias[1 if of_root else row] = value
    with pytest.raises(ValueError, match="log-probabilities of position 0 are not finite"):
        sample(hidden, weight, tree, bias, seeds=torch.arange(6))


def test_extreme_temperatures_and_words_of_each_position_are_left_to_all_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize(
    ("power", "problem"), [(1.0, "63 of 64 words differ"), (0.75, r"frequencies are off by 0\.1")]
)
def test_a_kernel_that_is_wrong_is_replaced_with_one_warning(
    power: float, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one of two temperatures: what it draws there is of the next position, or colder."""
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "is_usable", lambda positions: False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})

    def launch(positions: Positions, seeds: Tensor, given: float) -> Tensor:
        is_wrong = given == power
        colder = 1.25 if is_wrong and power < 1 else 1.0
        word = draws.draw_words(positions, seeds, given * colder)
        return word.roll(int(is_wrong and power == 1))

    monkeypatch.setattr(fused, "launch_draws", launch)
    layer, hidden = HierarchicalSoftmax(H, TREES["two_level"](N)), torch.ones(2, H)
    try:
        with pytest.warns(UserWarning, match=f"drawn slowly, without a kernel: {problem}"):
            layer.sample(hidden)
        layer.sample(hidden)
    finally:
        fused._verified.cache_clear()
