"""How often decoding waits for the device: not more often if more classes are opened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding import compiled

NUM_CLASSES = 40
READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select}
"""Operations whose results the host reads: item(), bool(), sizes that depend on values."""


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        indices = args[1] if func.overloadpacket is torch.ops.aten.index else ()
        has_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        self.num += has_mask or func.overloadpacket in READS
        return func(*args, **kwargs or {})


WAYS: dict[str, Callable[[HierarchicalSoftmax, Tensor], Any]] = {
    "top-k": lambda layer, hidden: layer.topk(hidden, 3, excluded=[1]),
    "draws": lambda layer, hidden: layer.sample(hidden),
    "top-p": lambda layer, hidden: layer.sample(hidden, top_p=0.9),
    "min-p": lambda layer, hidden: layer.sample(hidden, min_p=0.5),
    "penalty": lambda layer, hidden: layer.sample(
        hidden, top_k=5, repetition_penalty=1.1, previous=torch.arange(len(hidden))[:, None]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_host_waits_as_often_for_many_opened_classes_as_for_one(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position i has nearly all of its probability in class i, and opens that."""
    monkeypatch.setattr(compiled, "is_usable", lambda _: False)  # as on a GPU
    tree = ClassTree.two_level(torch.arange(400) % NUM_CLASSES)
    layer = HierarchicalSoftmax(NUM_CLASSES, tree)
    weight = torch.zeros(tree.num_rows, NUM_CLASSES)
    weight[:NUM_CLASSES] = 30 * torch.eye(NUM_CLASSES)
    layer.weight.detach().copy_(weight)
    waits, tolist = [], Tensor.tolist
    for num_positions in (1, 1, NUM_CLASSES):  # the first call fills what the tree keeps
        counter = Waits()

        def counted(tensor: Tensor) -> Any:  # which the dispatcher does not see
            counter.num += 1  # noqa: B023
            return tolist(tensor)

        with counter, monkeypatch.context() as patch:
            patch.setattr(Tensor, "tolist", counted)
            WAYS[way](layer, torch.eye(NUM_CLASSES)[:num_positions])
        waits.append(counter.num)
    assert waits[1] == waits[2] > 0
