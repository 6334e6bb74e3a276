"""What `bench_output_layer` compares: one problem, and the methods that compute its loss.

Decides what a method is and what its step does, at once or as a CUDA graph; knows no method.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm.output import ClassTree

Loss = Callable[[Tensor, Tensor], Tensor]
"""From hidden [P, H] and target [P] to their mean loss."""


@dataclass(kw_only=True)
class Problem:
    """What all methods are given.

    Attributes:
        hidden: [P, H].
        target: [P] int64.
        trees: by name; `random` and `tree_full` are always there.
        weight: [≥ R, H] for the largest of the trees; a method takes as many rows as it has.
        bias: [≥ R].
        cutoffs: of the adaptive softmax.
    """

    hidden: Tensor
    target: Tensor
    trees: dict[str, ClassTree]
    weight: Tensor
    bias: Tensor
    cutoffs: list[int]

    @property
    def vocab_size(self) -> int:
        return self.trees["tree_full"].vocab_size

    @property
    def num_positions(self) -> int:
        return self.hidden.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.hidden.shape[1]

    @property
    def element_bytes(self) -> int:
        return self.hidden.element_size()

    def parameters(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows and biases first … stop - 1 as parameters; no copy."""
        return parameter(self.weight[first:stop]), parameter(self.bias[first:stop])

    def gradient_bytes(self, num_rows: int) -> int:
        """Of `num_rows` rows with biases, and of the hidden vectors."""
        elements = num_rows * (self.hidden_size + 1) + self.hidden.numel()
        return elements * self.element_bytes


@dataclass(kw_only=True, eq=False)
class Method:
    """One way to compute the loss.

    Attributes:
        name: as `--methods` knows it.
        problem: what it computes the loss of.
        build: makes the loss and its parameters.
        needed_bytes: estimate of what it holds beside the problem: gradients, temporaries, weights
            of its own.
        tree: whose probabilities it computes, so that all methods of a tree have the same loss;
            None if its own.
        backend: of ours; "torch" of peers.
        exact: whether its loss must be that of the other methods of its tree; if not, it rounds
            sums to half precision.
        slow: timed in every third round only.
        num_positions: how many of the problem's positions it is timed on; 0: all.
        refused: why there is no figure, or None.
        value: loss of the last step.
        timings: seconds of each step, to be asked for at the end.
        peak_bytes: most that one step held beyond what was held before it.
    """

    name: str
    problem: Problem
    build: Callable[[], tuple[Loss, list[Tensor]]]
    needed_bytes: int
    tree: ClassTree | None = None
    backend: str = "torch"
    exact: bool = True
    slow: bool = False
    num_positions: int = 0
    refused: str | None = None
    value: Tensor | None = None
    timings: list[Callable[[], float]] = field(default_factory=list)
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        self.num_positions = self.num_positions or self.problem.num_positions
        self.hidden = parameter(self.problem.hidden[: self.num_positions])
        self.target = self.problem.target[: self.num_positions]
        self.loss: Loss | None = None
        self.parameters: list[Tensor] = []

    @property
    def label(self) -> str:
        """Name, and backend of ours."""
        return self.name if self.backend == "torch" else f"{self.name}/{self.backend}"

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of the parameters, hidden vectors included."""
        return sum(p.numel() * p.element_size() for p in [self.hidden, *self.parameters])

    def prepare(self) -> None:
        """Make the parameters."""
        self.loss, self.parameters = self.build()

    def step(self) -> None:
        """Forward and backward."""
        loss = self.loss(self.hidden, self.target)
        torch.autograd.backward(loss)
        self.value = loss.detach()

    def seconds(self) -> list[float]:
        """Of each timed step, for all positions of the problem."""
        scale = self.problem.num_positions / self.num_positions
        return [scale * timing() for timing in self.timings]

    def free(self) -> None:
        """Let go of the gradients."""
        for tensor in [self.hidden, *self.parameters]:
            tensor.grad = None

    def refuse(self, reason: str) -> None:
        """Give up, and let go of all memory."""
        self.free()
        self.refused, self.loss, self.parameters, self.timings = reason, None, [], []
        if self.hidden.is_cuda:
            torch.cuda.empty_cache()


def parameter(tensor: Tensor) -> Tensor:
    """The same memory as a leaf that wants a gradient."""
    return tensor.detach().requires_grad_()


class Graph(Method):
    """A method whose step is captured in a CUDA graph once, and then replayed."""

    graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """Replay; the gradients stay the graph's."""
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def free(self) -> None:
        """Let go of the gradients unless they are the graph's."""
        if self.graph is None:
            super().free()

    def refuse(self, reason: str) -> None:
        """Give up, and let go of all memory."""
        self.graph = None
        super().refuse(reason)

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().step()
                super().free()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            super().step()
        return graph


def zipf(vocab_size: int, positions: int) -> tuple[Tensor, Tensor]:
    """Words [positions] drawn by inverse rank, and counts [N] in that proportion."""
    rank = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    cumulative = (1 / rank).cumsum(0)
    uniform = torch.rand(positions, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, uniform), (10 * vocab_size / rank).long()
