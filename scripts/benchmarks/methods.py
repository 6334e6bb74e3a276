"""The problem that `output_layer` poses, and what a method of computing its loss is.

The methods themselves are in `output_layer` (this project's layer) and in `peers`.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the mean loss of hidden [P, H] and target [P]."""
Layer = tuple[Loss, list[Tensor]]
"""A loss and its parameters."""


@dataclass(kw_only=True)
class Problem:
    """The input of all methods."""

    hidden: Tensor  # [P, H]
    target: Tensor  # [P] int64
    trees: dict[str, ClassTree]  # name → tree; `random` and `tree_full` are always there
    rows: Tensor  # [≥ R, W] for the largest tree, as the layer has them; a method uses R
    bias: Tensor  # [≥ R]
    cutoffs: list[int]  # where the clusters of the adaptive softmax begin

    def __post_init__(self) -> None:
        self.num_positions, self.hidden_size = self.hidden.shape
        self.vocab_size = self.trees["tree_full"].vocab_size

    @property
    def weight(self) -> Tensor:
        """[≥ R, H], the rows of methods that need no zeros at the end."""
        return self.rows[:, : self.hidden_size]


@dataclass(eq=False)
class Method:
    """One way to compute the loss; all methods of a tree have the same loss."""

    name: str  # its name in `--methods`
    problem: Problem
    build: Callable[[], Layer]
    _: KW_ONLY
    tree: ClassTree | None = None  # the tree whose probabilities it computes
    backend: str = "torch"  # this project's backend; "torch" for peers
    exact: bool = True  # whether its loss equals that of its tree, not rounded in half precision
    slow: bool = False  # timed in every third round only
    is_graph: bool = False  # whether its step is captured in a CUDA graph once and then replayed
    refused: str | None = None  # why there is no figure
    last_loss: float | Tensor = float("nan")
    seconds: list[float] = field(default_factory=list)  # of each round
    peak_bytes: int | None = None  # what one step holds in addition to what was held before

    def __post_init__(self) -> None:
        self.hidden, self.target = parameter(self.problem.hidden), self.problem.target
        self.loss: Loss = _not_prepared
        self.parameters: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def label(self) -> str:
        """Name, with the backend if there is one."""
        return self.name if self.backend == "torch" else f"{self.name}/{self.backend}"

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of parameters and hidden vectors."""
        return sum(p.numel() * p.element_size() for p in [self.hidden, *self.parameters])

    def prepare(self) -> None:
        """Make the parameters."""
        self.loss, self.parameters = self.build()

    def step(self) -> None:
        """Forward and backward, or a replay of the graph."""
        if not self.is_graph:
            self._step()
            return
        self.graph = self.graph or captured(self._step, self.free)
        self.graph.replay()

    def _step(self) -> None:
        loss = self.loss(self.hidden, self.target)
        torch.autograd.backward(loss)
        self.last_loss = loss.detach()

    def free(self) -> None:
        """Release the gradients unless they belong to the graph."""
        if self.graph is None:
            for tensor in [self.hidden, *self.parameters]:
                tensor.grad = None

    def refuse(self, reason: str) -> None:
        """Exclude the method from timing and release its memory."""
        self.graph = None
        self.free()
        self.refused, self.loss, self.parameters, self.seconds = reason, _not_prepared, [], []
        if self.hidden.is_cuda:
            torch.cuda.empty_cache()


def captured(step: Callable[[], object], free: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph; before, it runs three times, each time followed by `free`."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            free()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def parameter(tensor: Tensor) -> Tensor:
    """The tensor's memory as a leaf that requires a gradient."""
    return tensor.detach().requires_grad_()


def split_rows(weight: Tensor, bias: Tensor, *bounds: int) -> list[tuple[Tensor, Tensor]]:
    """Intervals of rows and biases as leaves, so that no gradient has the table's size."""
    return [(parameter(weight[a:b]), parameter(bias[a:b])) for a, b in pairwise(bounds)]


def full_loss(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """The full softmax: holds logits, log-probabilities and their gradient."""
    return F.cross_entropy(F.linear(hidden, weight, bias), target)


def zipf(vocab_size: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Words [P] drawn with P(w) ∝ 1 / rank, and counts [N] in that proportion."""
    rank = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    cumulative = (1 / rank).cumsum(0)
    uniform = torch.rand(num_positions, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, uniform), (10 * vocab_size / rank).long()


def _not_prepared(hidden: Tensor, target: Tensor) -> Tensor:
    raise AssertionError("the method is not prepared")
