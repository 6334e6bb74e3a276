"""Compiled loops have the results of Python, in which NumPy checks every index."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lm.output.decoding import compiled, draws
from lm.output.decoding import loops as package
from lm.output.decoding.distribution import topk

from ..as_python import as_python
from .truth import OPTIONS, N, Options, P, random_layer, sample

DRAWS: list[Options] = [
    *OPTIONS, {"excluded": (0, 3, 11, 3)}, {"excluded": range(9), "temperature": 1.7},
    {"excluded": (0, 3), "top_p": 0.5}, {"top_p": 0.3, "temperature": 1.5}, {"top_p": 0.999},
    {"top_p": 0.8, "repetition_penalty": 1.4, "previous": [3, 0, 3]},
    {"top_p": 0.5, "own_excluded": torch.tensor([[3, 3, -1], [0, 1, 2]]).repeat(P // 2, 1)},
]  # fmt: skip


def results(*layer: Any) -> Iterator[object]:
    """Words of each position, in several ways, and errors where a class is not finite."""
    excluded = torch.tensor([[3, 3, -1], [0, 1, 2]]).repeat(P // 2, 1)
    for k in (1, N - 3):
        for each in (*topk(*layer, k=k), *topk(*layer, k=k, excluded=excluded)):
            yield each.tolist()
    for options in DRAWS:
        yield sample(*layer, seeds=torch.arange(P), **options).tolist()
    hidden, weight, tree, _ = layer
    bias = torch.zeros(tree.num_rows, dtype=torch.float64)
    bias[tree.row_of_word[3]] = torch.nan
    many = hidden.repeat(50, 1), weight, tree, bias
    calls: list[Callable[[], object]] = [partial(topk, *many, k=N)]
    for seeds in torch.arange(5 * 50 * P).view(5, -1):
        calls.append(partial(sample, *many, seeds=seeds, top_p=0.999))
    for call in calls:
        with pytest.raises(ValueError, match="not finite") as raised:
            call()
        yield str(raised.value)


@pytest.mark.parametrize(
    ("shape", "scale"),
    [("full", 1), ("shortlist", 0), ("shortlist", 8), ("paths", 1), ("one word per class", 8)],
)
@pytest.mark.parametrize("node_cost", [1, 1 << 40])
def test_loops_have_the_results_of_python(
    shape: str, scale: float, node_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are opened by probability and with biases, or in the order of rows and without."""
    monkeypatch.setattr(compiled, "NODE_COST", node_cost)
    monkeypatch.setattr(compiled, "FEW", node_cost)
    monkeypatch.setattr(draws, "NUM_DRAWS", 2)
    hidden, weight, tree, bias = random_layer(shape, scale=scale)
    weight[1], bias[1] = weight[0], bias[0]  # equal probabilities
    layer = hidden, weight, tree, bias if node_cost == 1 else None
    expected = list(results(*layer))
    for name, module in as_python(
        "decoding.loops.search_loops", "decoding.loops.draw_loops"
    ).items():
        monkeypatch.setattr(package, name, module)
    with np.errstate(all="ignore"):
        assert list(results(*layer)) == expected
