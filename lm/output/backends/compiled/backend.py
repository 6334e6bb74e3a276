"""The backend for CPUs: the loops of the reference backend over nodes, compiled by numba.

It computes what the reference backend computes, from the same equations, and saves the same. A
visit costs no call of PyTorch, rows are read where they are, and they are still in the cache when
(5) follows (1). Work is divided among PyTorch's number of threads, forward by positions and
backward by rows; the results are the same bit for bit for any number.

A row-wise gradient holds the products of wide nodes as factors, as the reference backend does; the
rows of narrow nodes, of which a deep tree visits many, are formed at once. The loops give softmaxes
with so many columns that errors are not saved (a full softmax is one large product, best left to
PyTorch) and shards to the reference backend.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.reference.backend import (
    ReferenceBackend,
    Saved,
    saves_errors,
    sorted_d_nll,
)
from lm.output.backends.reference.gradient_memory import zeros_except
from lm.output.backends.verify import Kind, verified
from lm.output.backends.visits import check_words
from lm.output.rowwise.blocks import Part, Product, Rows
from lm.output.rowwise.eager import constant_when_compiled
from lm.output.rowwise.row_gradient import RowGradient

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
LEAST_COLUMNS = 1 << 15
"""Columns of all visits from which on work is divided among threads."""
ROW_VISITS = 8
"""The time to write a row of a gradient, as a number of visits."""
ALIGN = 32
"""Hidden vectors are followed by zeros up to a multiple of so many numbers."""
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""What numba gets numbers as that it has no type for, see `vectors`."""
NARROW = 8
"""Most children of a node whose rows' values a row-wise gradient holds instead of factors."""


class CompiledBackend(ReferenceBackend):
    """`Backend` for CPUs with numba."""

    name = "compiled"
    automatic_on: frozenset[str] = frozenset({"cpu"})
    divides = False

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """See `Backend.obstacle`."""
        if device.type != "cpu":
            return f"requires a CPU, got {device}"
        if not has_numba():
            return "requires the package numba"
        weight, bias = problem.weight, problem.bias
        if weight.stride(1) != 1:
            return f"requires rows without gaps, got strides {tuple(weight.stride())}"
        dtypes = {tensor.dtype for tensor in (problem.hidden, weight, bias) if tensor is not None}
        if not dtypes <= DTYPES:
            return f"does not support {next(iter(dtypes - DTYPES))}"
        return None

    def verified(self, problem: Problem, device: torch.device) -> bool:
        """See `lm.output.backends.verify`."""
        bias = problem.weight if problem.bias is None else problem.bias
        return self._verified(device, (problem.hidden.dtype, problem.weight.dtype, bias.dtype))

    @constant_when_compiled
    def _verified(
        self, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    ) -> bool:
        from numba.core.errors import NumbaError

        failures = (NumbaError, RuntimeError, OSError)
        return verified(self, device, Kind(*dtypes), failures)

    def _target_log_prob(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        if not saves_errors(problem.depth, problem.num_columns, needs.row_wise):
            return super()._target_log_prob(problem, needs)
        from lm.output.backends.compiled import node_loops

        saved = self._with_visits(problem, needs)
        ones = saved.error.new_ones(len(saved.position))
        is_bf16 = _multiplies_bf16(problem)
        hidden = _sorted_hidden(problem, saved.position, ones, in_bf16=is_bf16)
        log_prob = ones.new_zeros(saved.node.shape)
        nodes = _nodes(saved.node, problem)
        bounds = _bounds(nodes, len(hidden), by_rows=False)
        widest = int(nodes[:, 3].max(initial=0))
        bias = ones.new_zeros(widest) if problem.bias is None else problem.bias.to(ones.dtype)
        bias = bias.contiguous()  # which the loops read by address
        loops = node_loops.forward_bf16 if is_bf16 else node_loops.forward
        results = map(own_array, (saved.child, log_prob, *saved[3:5]))
        _divide(
            bounds,
            loops,
            nodes,
            own_array(hidden),
            *map(array_of, (problem.weight, bias)),
            *results,
            widest,
        )
        return log_prob, saved

    def _with_visits(self, problem: Problem, needs: Needs) -> Saved:
        """What is saved, with its visits."""
        from lm.output.backends.compiled.routing import route

        saved = Saved(*self.new_saved(problem, needs))
        target, ignored = problem.target.contiguous(), problem.ignore_index
        arrays = tuple(map(own_array, problem.tree[:7]))
        if not route(own_array(target), ignored, arrays, *map(own_array, saved[:3])):
            check_words("target", target, problem.vocab_size, ignored)
        return saved

    def _backward(
        self, d_nll: Tensor, lse: Tensor | None, problem: Problem, saved: Saved, needs: Needs
    ) -> Gradients:
        errors = saves_errors(problem.depth, problem.num_columns, needs.row_wise)
        if lse is not None or not errors:
            return super()._backward(d_nll, lse, problem, saved, needs)
        from lm.output.backends.compiled import node_loops

        weight, bias, position = problem.weight, problem.bias, saved.position
        d_nll = sorted_d_nll(d_nll, problem, position)
        nodes = _nodes(saved.node, problem)
        d_hidden = None
        if needs.hidden:
            d_hidden = problem.hidden.new_empty(problem.hidden.shape)
            unsorted = map(own_array, (position, saved.d_hidden_unscaled, d_nll))
            node_loops.unsort_rows(*unsorted, array_of(d_hidden))
        if needs.row_wise:
            hidden = _sorted_hidden(problem, position, d_nll)
            rows = _row_gradients(nodes, problem, needs, saved.error, hidden, d_nll)
            return Gradients(d_hidden, *rows)
        is_bf16 = _multiplies_bf16(problem)
        factor = torch.ones_like(d_nll) if is_bf16 else d_nll
        hidden = _sorted_hidden(problem, position, factor, in_bf16=is_bf16)
        d_weight, d_bias = weight.new_empty(0, weight.shape[1]), d_nll.new_empty(0)
        if needs.weight:
            first, num = torch.from_numpy(nodes[:, 2:4]).unbind(1)
            d_weight = zeros_except(first, num, weight)
        if bias is not None and needs.bias:
            d_bias = d_nll.new_zeros(bias.shape)
        bounds = _bounds(nodes, len(weight), by_rows=True)
        arrays = (*map(own_array, (saved.error, hidden, d_nll)), *map(array_of, (d_weight, d_bias)))
        _divide(
            bounds, node_loops.backward_bf16 if is_bf16 else node_loops.backward, nodes, *arrays
        )
        return Gradients(
            d_hidden,
            d_weight if needs.weight else None,
            d_bias.to(bias.dtype) if bias is not None and needs.bias else None,
        )


def _multiplies_bf16(problem: Problem) -> bool:
    """Whether the processor multiplies bf16 numbers, and hidden vectors have them.

    Rows in fp32 are then rounded, as autocast rounds those of a linear layer.
    """
    from lm.output.backends.compiled.vectors import HAS_BF16

    is_low = problem.hidden.dtype == torch.bfloat16
    return HAS_BF16 and is_low and problem.weight.dtype in (torch.bfloat16, torch.float32)


def _sorted_hidden(
    problem: Problem, position: Tensor, factor: Tensor, *, in_bf16: bool = False
) -> Tensor:
    """The hidden vectors of the sorted positions times factors [P], in their dtype or bf16.

    [P, W up to a multiple of `ALIGN`], so that each begins a line of a cache.
    """
    from lm.output.backends.compiled.node_loops import sort_rows

    dtype, size = torch.bfloat16 if in_bf16 else factor.dtype, problem.weight.shape[1]
    hidden = factor.new_empty(len(position), -(-size // ALIGN) * ALIGN, dtype=dtype)
    source = array_of(problem.hidden.contiguous())
    sort_rows(own_array(position), source, own_array(factor), own_array(hidden))
    return hidden


def _row_gradients(
    nodes: "Array", problem: Problem, needs: Needs, error: Tensor, hidden: Tensor, d_nll: Tensor
) -> tuple[RowGradient | None, RowGradient | None]:
    """Those of weight and bias, if needed; `hidden` [P, ≥ W] is multiplied by d_nll [P]."""
    from lm.output.backends.compiled import node_loops

    is_narrow = nodes[:, 3] <= NARROW
    formed = nodes[is_narrow]
    first, num = torch.from_numpy(formed[:, 2:4]).unbind(1)
    begin = num.cumsum(0) - num  # of each node, among the rows that are formed
    row = (first - begin).repeat_interleave(num) + torch.arange(int(num.sum()))
    formed[:, 2] = begin
    size = problem.weight.shape[1]
    of_weight = hidden.new_empty(len(row) if needs.weight else 0, size)
    of_bias = hidden.new_zeros(len(row) if needs.bias else 0)
    arrays = map(own_array, (error, hidden, d_nll, of_weight, of_bias))
    _divide(_bounds(formed, len(row), by_rows=True), node_loops.backward, formed, *arrays)
    weight_parts: list[Part] = [Rows(row, of_weight)] * (len(row) > 0)
    bias_parts: list[Part] = [Rows(row, of_bias[:, None])] * (len(row) > 0)
    for start, end, first_row, n, offset, _ in nodes[~is_narrow].tolist():
        of_node = error[offset : offset + (end - start) * n].view(-1, n)
        weight_parts.append(Product(first_row, of_node, hidden[start:end, :size]))
        bias_parts.append(Product(first_row, of_node, d_nll[start:end, None]))
    weight, bias = problem.weight, problem.bias
    return (
        RowGradient(weight, weight_parts) if needs.weight else None,
        RowGradient(bias, bias_parts) if bias is not None and needs.bias else None,
    )


def own_array(tensor: Tensor) -> "Array":
    """The same of a tensor that no caller will resize, in less time."""
    bits = _BITS.get(tensor.dtype)
    array: Array = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


@constant_when_compiled
def has_numba() -> bool:
    """Whether loops can be compiled."""
    return "numba" in sys.modules or find_spec("numba") is not None


def array_of(tensor: Tensor) -> "Array":
    """A tensor's memory as numpy's, of bf16 and fp16 the bits, see `vectors`."""
    bits = _BITS.get(tensor.dtype)
    alias = from_dlpack((tensor if bits is None else tensor.view(bits)).detach())
    array: Array = alias.numpy()  # which forbids to resize the storage: FSDP resizes the tensor's
    return array


def _nodes(node: Tensor, problem: Problem) -> "Array":
    """See `node_loops.list_nodes`."""
    from lm.output.backends.compiled.node_loops import list_nodes

    tree = problem.tree
    nodes: Array = list_nodes(*map(own_array, (node, tree.first_row, tree.num_children)))
    return nodes


def _bounds(nodes: "Array", num: int, *, by_rows: bool) -> list[int]:
    """Where the threads' parts of `num` positions or rows begin, and the end of the last one.

    A row costs its visits, and as much as `ROW_VISITS` to be written.
    """
    num_threads = torch.get_num_threads()
    num_visits, first_row, num_children = nodes[:, 1] - nodes[:, 0], nodes[:, 2], nodes[:, 3]
    if num_threads == 1 or int(num_visits @ num_children) < LEAST_COLUMNS:
        return [0, num]
    if not by_rows:
        return [num * i // num_threads for i in range(num_threads + 1)]
    cost = (num_visits + ROW_VISITS) * num_children
    before = cost.cumsum() - cost
    bounds = [0]
    for i in range(1, num_threads):
        share = int(cost.sum()) * i // num_threads
        node = int(before.searchsorted(share, side="right")) - 1
        inside = (share - before[node]) * num_children[node] // cost[node]
        bounds.append(int(first_row[node] + inside))
    return [*bounds, num]


@cache
def _threads(process: int, num: int) -> ThreadPoolExecutor:
    """Threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(num, "sqrtlm")


def _divide(bounds: list[int], loops: Callable[..., None], nodes: "Array", *arguments: Any) -> None:
    """Run loops over nodes for each part, all but the first one in threads of their own."""
    parts = list(pairwise(bounds))
    if len(parts) == 1:
        loops(nodes, *parts[0], *arguments)
        return
    threads = _threads(os.getpid(), len(parts) - 1)
    others = [threads.submit(loops, nodes, *part, *arguments) for part in parts[1:]]
    try:
        loops(nodes, *parts[0], *arguments)
    finally:
        wait(others)
    for other in others:
        other.result()
