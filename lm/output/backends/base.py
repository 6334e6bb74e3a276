"""What every backend takes and returns: the problem, the gradients asked for, and the base class.

A backend computes the softmaxes on the targets' paths and, backwards, the gradients: equations (1)
to (6) of `reference.py`, for the tree in the arrays of `tree/arrays.py`. Node n has the logits of
the rows `first_row[n] + range(num_children[n])`. The path of word w goes up from `row_of_word[w]`:
row r is a child of `node_of_row[r]`, whose own row is `row_of_node` of it; -1 for node 0, the root.
A visit is a position at a node of its target's path: `visits.route` sorts visits by their nodes.

`Problem.of` checks shapes, dtypes and devices, not strides. Weight and bias may have a lower
precision than hidden or, under autocast, a higher one; under torch.compile, sizes may be symbols. A
backend checks the values of targets (see `inputs.check_words`), disables autocast for what it
computes, does not reduce over positions, and records nothing for autograd (`autograd.py` makes the
ops; decoding is none of its tasks). Where it is to be recorded as a CUDA graph, the host waits for
nothing. Sums are formed in `inputs.compute_dtype(hidden.dtype)`: fp32, or fp64 for fp64, of numbers
that are not rounded before.

What else it must obey is in `tests/output/laws.py`: biases of -inf exclude children; a row that is
no number is seen where its node is visited, and nowhere else; positions do not change each other by
a bit; the error at a target of probability 1 - ε is accurate; a d_nll of 1e-8 survives fp16.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.inputs import autocast, check_parameters, check_tensors
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.tracing import is_recorded
from lm.output.tree.arrays import Shard, TreeArrays
from lm.output.tree.class_tree import ClassTree


def row_size(hidden_size: int) -> int:
    """The numbers W in a row of a `HierarchicalSoftmax`: H up to a multiple of 8.

    Rows of 2-byte or wider numbers then begin at multiples of 16 bytes, as fast copies require.
    """
    return -(-hidden_size // 8) * 8


class Problem(NamedTuple):
    """All but the targets of negative log-likelihoods; its fields are arguments of custom ops.

    P positions, H features, R rows of W ≥ H numbers, D levels of the tree.
    """

    hidden: Tensor  # [P, H] floating point
    weight: Tensor  # [R, W] floating point; columns from H on are finite and have no effect
    tree: TreeArrays
    bias: Tensor | None  # [R] floating point
    depth: int  # D
    max_path_columns: int  # children of all nodes on a path, on the path with the most of them
    ignore_index: int  # value of the targets that are ignored
    shard: Shard | None = None  # None: `weight` has all rows; else see `tree.arrays.Shard`

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        tree: ClassTree,
        bias: Tensor | None = None,
        ignore_index: int = -100,
    ) -> "Problem":
        """The problem of all positions of `hidden` [..., H].

        Under autocast, hidden vectors are cast to its dtype; weight and bias stay as they are.

        Raises:
            ValueError: if shapes, dtypes or devices do not match.
        """
        check_tensors(weight=weight)
        if not isinstance(tree, ClassTree):
            raise ValueError(f"tree must be a ClassTree, such as ClassTree.full(N), got {tree!r}")
        arrays = check_parameters(hidden, weight, tree, bias)
        hidden = autocast(hidden, weight, bias)
        flat = hidden.reshape(-1, hidden.shape[-1])
        sizes = (tree.depth, tree.max_path_columns, ignore_index)
        problem = cls(flat, weight, arrays, bias, *sizes)
        return problem.to("meta") if hidden.is_meta else problem

    @classmethod
    def without_values(
        cls,
        num_positions: int,
        hidden_size: int,
        tree: ClassTree,
        dtype: torch.dtype,
        device: str = "meta",
    ) -> "Problem":
        """A `HierarchicalSoftmax`'s problem of tensors that are not initialised, for its sizes."""
        hidden = torch.empty(num_positions, hidden_size, dtype=dtype, device=device)
        weight = hidden.new_empty(tree.num_rows, row_size(hidden_size))
        return cls.of(hidden, weight, tree, weight[:, 0])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Problem":
        """The problem on a device; if given, its numbers in a dtype."""
        moved: dict[str, Any] = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        moved = {name: None if x is None else x.to(device, dtype) for name, x in moved.items()}
        tree = TreeArrays(*(each.to(device) for each in self.tree))
        return self._replace(**moved, tree=tree)

    def sizes(self) -> "Problem":
        """The tree and the numbers, without the tensors that autograd saves."""
        none = self.hidden.new_empty(0)
        return self._replace(hidden=none, weight=none, bias=None)

    @property
    def num_positions(self) -> int:
        """P."""
        return self.hidden.shape[0]

    @property
    def num_columns(self) -> int:
        """As many logits as all visits have at most."""
        return self.num_positions * self.max_path_columns

    @property
    def vocab_size(self) -> int:
        """N."""
        return self.tree.row_of_word.numel()


class Needs(NamedTuple):
    """Which gradients are asked for, and in which form."""

    hidden: bool
    weight: bool
    bias: bool
    row_wise: bool = False  # gradients of weight and bias are `RowGradient`s instead of dense

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, row_wise: bool = False
    ) -> "Needs":
        """What these inputs need; dense gradients of all of them where the call is recorded.

        A recorded call may be repeated with inputs that need other gradients.
        """
        enabled = torch.is_grad_enabled()
        if is_recorded():
            every = enabled or not torch.compiler.is_compiling()
            return cls(every, every, every and bias is not None)
        return cls(
            hidden=enabled and hidden.requires_grad,
            weight=enabled and weight.requires_grad,
            bias=enabled and bias is not None and bias.requires_grad,
            row_wise=enabled and row_wise,
        )

    @property
    def any(self) -> bool:
        """Whether a backward follows."""
        return self.hidden or self.weight or self.bias


class Gradients(NamedTuple):
    """Gradients in the dtypes of what they belong to; None where not needed."""

    d_hidden: Tensor | None  # [P, H]
    d_weight: Tensor | RowGradient | None  # [R, W], 0 in columns from H on
    d_bias: Tensor | RowGradient | None  # [R]


Tensors = tuple[Tensor, ...]
"""What a forward saves for the backward: of a backend, one of its `saved_types`."""


class Softmaxes(NamedTuple):
    """The softmaxes on the targets' paths, over the rows that a problem has; [D, P], root first.

    In the dtype of sums, and in the order of the problem's positions. A level has no visit where a
    path has ended, a node has one child in the whole tree, or the target is ignored.

    Of a whole table, only the term `largest + log_total - logit` is read (0 or -inf without a
    visit): one field may hold it, `logit` with the opposite sign, and the others be zeros that
    broadcast to [D, P]. Of a shard, `logit` and `largest + log_total` are read; the latter is -inf
    without a visit and for nodes without rows there.
    """

    largest: Tensor  # of the logits z
    log_total: Tensor  # log Σ exp(z - largest)
    logit: Tensor  # of the child on the path; 0 for no visit, or if its row is in another shard

    @classmethod
    def by_position(cls, position: Tensor, *values: Tensor) -> "Softmaxes":
        """The softmaxes of sorted positions, each with its place `position` [P] in the problem."""
        return cls(*(torch.empty_like(x).index_copy_(1, position, x) for x in values))

    def nll_by_level(self) -> Tensor:
        """The terms of the nll; 0 for no visit, also where they are -inf."""
        nll = self.largest - self.logit + self.log_total
        return nll.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0)


class Solver(ABC):
    """One way to compute the softmaxes on the targets' paths, and gradients, on any strides.

    The loss, its terms by level and the softmaxes of a table in shards follow from these. A solver
    is a `Backend`, or the `ShardedSolver` of a table whose rows are divided among processes.
    """

    @abstractmethod
    def softmaxes(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Softmaxes, Tensors]:
        """The softmaxes on the paths of targets [P] int64, and what the backward needs.

        Of a backend, that is a `saved_type` with the shapes and dtypes of `new_saved`; unless
        `needs.any`, it is not read, and may be anything. Its tensors are contiguous and share no
        memory with each other, the softmaxes, the target or the problem. P may be 0. The same
        inputs give the same bits, here and backwards.

        A target that is neither a word nor `ignore_index` raises an IndexError, or fails a
        device-side assertion where the backend does not wait for the device.
        """

    def nll(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """The nll [P] in the dtype of sums, 0 if ignored, and what the backward needs.

        Second, the number of targets that are not ignored, an integer scalar, if it was counted.
        """
        softmaxes, saved = self.softmaxes(target, problem, needs)
        return softmaxes.nll_by_level().sum(0), None, saved

    @abstractmethod
    def backward(
        self, d_nll: Tensor, problem: Problem, saved: Any, needs: Needs, lse: Tensor | None = None
    ) -> Gradients:
        """The gradients that are needed, given the gradient d_nll [P] in the dtype of the nll.

        The targets are not given: what it needs of them is in `saved`. d_nll may have stride 0 (a
        broadcast scalar); the backend takes what it has for ignored targets as 0, even if it is not
        finite. A second backward may follow: `saved` must not change. `problem` is that of the
        forward, whose `needs` asked for at least these gradients. With `needs.row_wise`, which is
        not optional, d_weight and d_bias are `RowGradient`s, such as `RowGradient(weight,
        RowFactors(rows=((row, value),)))` with rows [K], which may repeat, and values [K, W] (of a
        bias [K, 1]) in the dtype of sums: of the children of visited nodes, and of no others, which
        an optimizer would move; see `rowwise/factors.py` for factors of visits and subclasses that
        update a table by themselves. For a shard, `lse` has the log-sum-exps [D, P] over all
        shards, in the dtype of sums and the order of `Softmaxes`, in place of those in `saved`; and
        d_hidden is what the rows of the shard add.
        """


class Backend(Solver):
    """A solver of problems whose rows are in this process, all of a tree or a shard's.

    To add one: an instance, by its name, in the dict `BACKENDS` of `backends/__init__.py`, in the
    order of preference (ops are registered at import); its name in `BackendName` of `functional.py`
    and in `lm/config/schema.py`. It refuses the dtypes, devices and shards that it does not take in
    `obstacle`, or derives from `ReferenceBackend` and calls it then, as `CompiledBackend` does. One
    that compiles code and that "auto" may choose overrides `verified`. The problems of these
    methods may consist of meta tensors, but for `softmaxes` and `backward`.

    Tests: a way to choose it in the fixture `backend` of `tests/output/conftest.py`, and settings
    in `VARIOUS` and `WAYS` of `test_laws.py`, if it runs on CPUs (in fp64 too); else the laws as in
    `backends/test_gpu.py`. Its errors may be twice those of PyTorch in the same dtype.
    """

    name: str  # as in the argument `backend` of the public functions
    automatic_on: frozenset[str] = frozenset()
    """Types of devices where "auto" prefers it to the reference."""
    saved_types: tuple[Any, ...]
    """What a forward may save: NamedTuples of tensors."""

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """Why the backend cannot solve the problem on a device, "requires …"; None if it can."""
        return None

    def verified(self, problem: Problem, device: torch.device) -> bool:
        """Whether "auto" may rely on the results for such dtypes and strides, see `verify.py`."""
        return True

    def part_size(self, problem: Problem) -> int:
        """Most positions whose saved tensors exist at once, for estimates of memory."""
        return problem.num_positions

    def saved_type(self, problem: Problem, needs: Needs) -> Any:
        """Which of `saved_types` a forward with a backward saves."""
        return self.saved_types[0]

    @abstractmethod
    def new_saved(self, problem: Problem, needs: Needs) -> Tensors:
        """What a forward with a backward saves, in uninitialised memory of the same device."""
