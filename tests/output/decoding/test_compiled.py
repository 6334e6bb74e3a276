"""Compiled loops find and draw what they do as Python, and are replaced where they are wrong."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.backends import verify
from lm.output.decoding import compiled, draws, fused
from lm.output.decoding import loops as package
from lm.output.decoding.distribution import topk
from lm.output.decoding.search import TopK

from ..as_python import as_python
from .truth import OPTIONS, N, Options, P, random_layer, sample

LOOPS, KERNEL = "search and draws in compiled loops", "draws by a kernel"
FULL_DISK = Mock(side_effect=OSError("no space left\non the disk"))
WRONG: list[tuple[str, str, Any, str]] = [
    (LOOPS, "topk", lambda _, k: TopK(torch.zeros(2, k), torch.arange(k).expand(2, -1)), "off by"),
    (LOOPS, "topk", FULL_DISK, "OSError: no space left$"),
    (LOOPS, "draw_words", lambda _, seeds, power: 0 * seeds, r"\d+ of 16 words differ"),
    (KERNEL, "launch_draws", lambda *of: draws.draw_words(*of).roll(1), "63 of 64 words differ"),
    (
        *(KERNEL, "launch_draws"),
        lambda at, seeds, power: draws.draw_words(at, seeds, 1.25 * power if power < 1 else power),
        r"frequencies are off by 0\.1",
    ),
]


@pytest.mark.parametrize(("what", "function", "wrong", "problem"), WRONG)
def test_wrong_code_is_replaced_with_one_warning(
    what: str, function: str, wrong: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(compiled if what == LOOPS else fused, function, wrong)
    if what == KERNEL:
        pytest.importorskip("triton")
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
        monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    layer = HierarchicalSoftmax(8, ClassTree.two_level(num_words=700)).double()
    hidden, seeds = torch.ones(2, 8).double(), torch.arange(2)
    with pytest.warns(UserWarning, match=f"{what} cannot be used on cpu .*slow.*{problem}"):
        words = layer.topk(hidden, 9).word
    assert torch.equal(words, layer.topk(hidden, 9).word)
    assert torch.equal(layer.sample(hidden, seeds=seeds), layer.sample(hidden, seeds=seeds))


SCALES = [("full", 1), ("shortlist", 0), ("shortlist", 8), ("paths", 1), ("one word per class", 8)]
EXCLUDED = torch.tensor([[3, 3, -1], [0, 1, 2]]).repeat(P // 2, 1)
DRAWS: list[Options] = [
    *OPTIONS, {"excluded": (0, 3, 11, 3)}, {"excluded": range(9), "temperature": 1.7},
    {"excluded": (0, 3), "top_p": 0.5}, {"top_p": 0.3, "temperature": 1.5}, {"top_p": 0.999},
    {"top_p": 0.8, "repetition_penalty": 1.4, "previous": [3, 0, 3]},
    {"top_p": 0.5, "own_excluded": EXCLUDED},
]  # fmt: skip


def results(*layer: Any) -> Iterator[object]:
    """Words of each position, in several ways, and errors where a class is not finite."""
    for k in (1, N - 3):
        for each in (*topk(*layer, k=k), *topk(*layer, k=k, excluded=EXCLUDED)):
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


@pytest.mark.parametrize(("shape", "scale"), SCALES)
@pytest.mark.parametrize("node_cost", [1, 1 << 40])
def test_loops_have_the_results_of_python(
    shape: str, scale: float, node_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are opened by probability and with biases, or in the order of rows and without."""
    monkeypatch.setattr(compiled, "NODE_COST", node_cost)
    monkeypatch.setattr(compiled, "FEW", node_cost)
    monkeypatch.setattr(compiled, "NUM_DRAWS", 2)
    hidden, weight, tree, bias = random_layer(shape, scale=scale)
    weight[1], bias[1] = weight[0], bias[0]  # equal probabilities
    layer = hidden, weight, tree, bias if node_cost == 1 else None
    expected = list(results(*layer))
    loops = as_python("decoding.loops.search_loops", "decoding.loops.draw_loops")
    for name, module in loops.items():
        monkeypatch.setattr(package, name, module)
    with np.errstate(all="ignore"):
        assert list(results(*layer)) == expected
