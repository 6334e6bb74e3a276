"""The routing that the model counts is that of the kernels, in the interpreter."""

from itertools import chain

import pytest
import torch

pytest.importorskip("triton")

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import Launch, execute
from scripts.kernels.compilation import Classes, launches, make_problem
from scripts.kernels.routed import KERNELS, TILES, write_routing


def routing(problem: Problem, *, interpreted: bool) -> dict[str, torch.Tensor]:
    """What the kernels write, in lists up to their last entry."""
    found: list[Launch] = []

    def run(launch: Launch) -> None:
        found.append(launch)
        if launch.kernel.__name__ in KERNELS and interpreted:
            execute(launch)
        elif launch.kernel.__name__ == KERNELS[-1]:
            write_routing(found)

    launches(problem, 90, run=run)
    arguments = dict(chain.from_iterable(each.arguments.items() for each in found[:3]))
    names = ("position", "rank", "node", "child", "light_level", "visited", "num_entries")
    lists = [name for name in arguments if name.endswith(("_tiles", "_nodes", "_groups"))]
    lists = [name for name in lists if torch.is_tensor(arguments[name])]
    assert len(lists) == 6
    for name, length in zip(lists, arguments["num_entries"].tolist(), strict=False):
        of_tiles = name in TILES
        arguments[name] = arguments[name].view(-1, 4 if of_tiles else 1)[:length]
    return {name: arguments[name] for name in (*names, *lists)}


@pytest.mark.parametrize(("classes", "positions"), [("equal", 300), ("frequency", 1100)])
def test_routing_is_that_of_the_kernels(classes: Classes, positions: int) -> None:
    problem = make_problem(400, 16, positions, classes=classes)._replace(mean=True)
    problem.target[::7] = -100
    found, kernels = (routing(problem, interpreted=each) for each in (False, True))
    for name, expected in kernels.items():
        assert torch.equal(found[name], expected), name
    assert all(len(found[name]) for name in ("heavy_tiles", "light_nodes", "row_tiles"))
