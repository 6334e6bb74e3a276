"""Updates of looked-up rows in a CUDA graph, `pytest -m gpu`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.output.rowwise import RowAdagrad, RowAdam, RowOptimizer, RowSGD, lookup

pytestmark = pytest.mark.gpu


def after_lookups(kind: Callable[..., RowOptimizer], dtype: torch.dtype, record: bool) -> Tensor:
    """A table after steps in which rows repeat, and some are absent; then with other rates."""
    torch.manual_seed(0)
    index, lr = torch.randint(-1, 40, (700,), device="cuda"), torch.tensor(0.1, device="cuda")
    upstream = torch.randn(700, 64, device="cuda")
    table = torch.randn(3000, 64, device="cuda").to(dtype).requires_grad_()
    optimizer = kind([table], lr=lr)

    def step() -> None:
        torch.autograd.backward((lookup(table, index).float() * upstream).sum())
        torch.nn.utils.clip_grad_norm_([table], 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    graph, replay = torch.cuda.CUDAGraph(), step
    if record:
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    for number in range(1, 6):
        index.random_(-1, 40 * number)
        lr.fill_(0.1 / number)
        replay()
    return table.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, RowAdam])
def test_a_recorded_update_of_looked_up_rows_is_the_eager_one(
    kind: Callable[..., RowOptimizer], dtype: torch.dtype
) -> None:
    assert torch.equal(*(after_lookups(kind, dtype, record) for record in (False, True)))
