"""The kernel draws words by trials, here in the interpreter; and what they leave."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lm.output.backends.triton.tile_shapes import Tile
from lm.output.decoding import compiled, draws, fused
from lm.output.decoding.positions import Penalty, Positions

from .truth import N, assert_distributed, random_layer, restricted, sample, trials, word_log_prob


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of several blocks of children, hidden vectors of several blocks."""
    monkeypatch.setattr(compiled, "is_usable", lambda positions: False)
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    monkeypatch.setattr(fused, "TILE", Tile(1, 4, 2, 1, 1))
    monkeypatch.setattr(fused, "is_right", lambda *_: True)


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
    seeds = torch.arange(6)
    excluded = tree.row_of_word[[0, 3, N // 2]] if power > 1 else tree.row_of_word[:0]
    positions = Positions(*layer, excluded=excluded if len(excluded) else None)
    each = [(hidden[[p]], weight, tree, bias) for p in range(6)]
    expected = [trials(one, p, power, excluded, num_trials) for p, one in enumerate(each)]
    assert fused.launch_draws(positions, seeds, power).tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_words_of_positions_that_are_left_follow_the_distribution(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tree, bias = layer = random_layer("huffman 3", num_positions=1)
    num, excluded, rows = 1500, (0, 3), tree.row_of_word[[0, 3]]
    words = torch.tensor([trials(layer, s, 1 / temperature, rows, 1) for s in range(num)])
    assert 0.1 < float((words < 0).float().mean()) < 0.9
    monkeypatch.setattr(fused, "launch_draws", lambda positions, seeds, power: words.clone())
    options: dict[str, Any] = {"temperature": temperature, "excluded": excluded}
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
