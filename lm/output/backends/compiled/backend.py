"""The backend for CPUs: the loops of the reference backend over nodes, compiled by numba.

It computes what the reference backend computes, from the same equations, and saves the errors (4).
A visit costs no call of PyTorch, rows are read where they are, and they are still in the cache when
(5) follows (1). Work is divided among PyTorch's number of threads, forward by positions and
backward by rows; the results are the same bit for bit for any number.

Row-wise gradients are formed when they are used, see `factors`. The loops give softmaxes with so
many columns that errors are not saved (such as most full softmaxes, which are one large product,
best left to PyTorch) and shards to the reference backend.
"""

import sys
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.compiled.arrays import Array, as_array, own
from lm.output.backends.compiled.division import bounds_of, divide
from lm.output.backends.compiled.factors import Factors
from lm.output.backends.compiled.gradient_memory import zeros_except
from lm.output.backends.reference import ReferenceBackend
from lm.output.backends.verify import Kind, verified, was_verified
from lm.output.backends.visits import check_words
from lm.output.rowwise.blocks import Factored
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.tracing import constant_when_compiled

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
ALIGN = 32
"""Hidden vectors are followed by zeros up to a multiple of so many numbers."""
SAVED_ELEMENTS = 1 << 26
"""Most errors saved: 256 MB in fp32; for row-wise gradients of classes, whose factors they are, as
many as there are."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""Most errors saved of a tree of one node, the full softmax."""
FULL_SAVED_ELEMENTS = 1 << 28
"""Most errors saved of a full softmax whose products are of bf16 numbers: 1 GB, a third
of what PyTorch's `cross_entropy` of as many logits takes. It takes half to two thirds of the time
of computing logits again in PyTorch's products."""
LEAST_ZEROS = 1 << 18
"""Numbers from which on threads divide the rows that are set to zero."""
FREE_COLUMNS = 150_000_000
"""Columns without a gradient that the reference backend computes before the loops are loaded, which
takes a second and 140 MB of memory, and tens of seconds to compile once. The loops save 5 to 12 ns
of each column (10,000 to 200,000 words on an AMD EPYC with AVX-512)."""


class Saved(NamedTuple):
    """What the forward saves, by sorted position; without elements if it is not needed."""

    position: Tensor  # [P], node and child [D, P]: see `Visits`
    node: Tensor
    child: Tensor
    error: Tensor  # [P · max_path_columns], (4) of all visits, node by node; the rest undefined
    d_hidden_unscaled: Tensor  # [P, W], Σ W_nᵀ e_v of (5)
    hidden: Tensor  # [P, …], where they are read again


class CompiledBackend(ReferenceBackend):
    """`Backend` for CPUs with numba."""

    name = "compiled"
    automatic_on: frozenset[str] = frozenset({"cpu"})

    def __init__(self) -> None:
        self._num_columns = 0  # without a gradient, so far

    def is_worth_loading(self, problem: Problem, *, has_gradient: bool) -> bool:
        """See `FREE_COLUMNS`."""
        if has_gradient or torch.compiler.is_compiling() or was_verified(self.name):
            return True
        self._num_columns += problem.num_columns
        return self._num_columns > FREE_COLUMNS

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

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.forward`."""
        if not _saves_errors(problem, needs):
            return super().forward(problem, needs)
        from lm.output.backends.compiled.routing import nll_of

        log_prob, saved = self._target_log_prob(problem, needs)
        nll = log_prob.new_empty(problem.num_positions)
        nll_of(own(saved.position), own(log_prob), *_targets(problem), own(nll))
        return nll, list(saved) if needs.any else super().new_saved(problem, needs)

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        needs = Needs(hidden=False, weight=False, bias=False)
        if not _saves_errors(problem, needs):
            return super().nll_by_level(problem)
        log_prob, saved = self._target_log_prob(problem, needs)
        return torch.empty_like(log_prob).index_copy_(1, saved.position, 0 - log_prob)

    def new_saved(self, problem: Problem, needs: Needs) -> list[Tensor]:
        """See `Backend.new_saved`."""
        if needs.any and _saves_errors(problem, needs):
            return list(self._new_saved(problem, needs))
        return super().new_saved(problem, needs)

    def _new_saved(self, problem: Problem, needs: Needs) -> Saved:
        *visits, none = super().new_saved(problem, needs)
        size = problem.num_positions if needs.hidden else 0, problem.weight.shape[1]
        is_read = (needs.weight or needs.bias) and _multiplies_bf16(problem)
        error = none.new_empty(problem.num_columns if needs.any else 0)
        hidden = _new_sorted(problem, none, is_bf16=True) if is_read else none.new_empty(0)
        return Saved._make([*visits, error, none.new_empty(size), hidden])

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.backward`."""
        if not _saves_errors(problem, needs):
            return super().backward(d_nll, problem, saved, needs)
        from lm.output.backends.compiled import node_loops

        found = Saved(*saved)
        weight, bias, position = problem.weight, problem.bias, found.position
        d_nll = _sorted_d_nll(d_nll, problem, position)
        nodes = _nodes(found.node, problem)
        d_hidden = None
        if needs.hidden:
            d_hidden = problem.hidden.new_empty(problem.hidden.shape)
            unsorted = map(own, (position, found.d_hidden_unscaled, d_nll))
            bounds = bounds_of(nodes, len(d_hidden), by_rows=False)
            divide(bounds, node_loops.unsort_rows, *unsorted, as_array(d_hidden))
        if needs.row_wise:
            return Gradients(d_hidden, *_row_gradients(nodes, problem, found, needs, d_nll))
        d_weight, d_bias = weight.new_empty(0, weight.shape[1]), d_nll.new_empty(0)
        if needs.weight:
            d_weight = zeros_except(int(nodes[:, 3].sum()), weight, partial(_zero_gaps, nodes))
        if bias is not None and needs.bias:
            d_bias = d_nll.new_zeros(bias.shape)
        if needs.weight or needs.bias:
            _form(problem, found, d_nll, nodes, d_weight, d_bias)
        return Gradients(
            d_hidden,
            d_weight if needs.weight else None,
            d_bias.to(bias.dtype) if bias is not None and needs.bias else None,
        )

    def _target_log_prob(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        """The log q [D, P] of every visit's target, 0 for none, and what is saved."""
        from lm.output.backends.compiled import node_loops

        saved = self._with_visits(problem, needs)
        log_prob = saved.error.new_zeros(saved.node.shape)
        is_bf16, ones = _multiplies_bf16(problem), log_prob[0, :0]
        if len(hidden := saved.hidden) == 0:
            hidden = _new_sorted(problem, log_prob, is_bf16=is_bf16)
        nodes = _nodes(saved.node, problem)
        bounds = bounds_of(nodes, len(hidden), by_rows=False)
        widest = int(nodes[:, 3].max(initial=0))
        bias = ones.new_zeros(widest) if problem.bias is None else problem.bias.to(ones.dtype)
        bias = bias.contiguous()  # which the loops read by address
        loops = node_loops.forward_bf16 if is_bf16 else node_loops.forward
        results = map(own, (saved.child, log_prob, *saved[3:5]))
        divide(
            bounds,
            loops,
            nodes,
            (own(saved.position), as_array(problem.hidden.contiguous()), own(ones)),
            own(hidden),
            *map(as_array, (problem.weight, bias)),
            *results,
            widest,
        )
        return log_prob, saved

    def _with_visits(self, problem: Problem, needs: Needs) -> Saved:
        """What is saved, with its visits."""
        from lm.output.backends.compiled.routing import route

        saved = self._new_saved(problem, needs)
        target, ignored, _ = _targets(problem)
        arrays = tuple(map(own, problem.tree[:7]))
        if not route(target, ignored, arrays, *map(own, saved[:3])):
            check_words("target", problem.target, problem.vocab_size, ignored)
        return saved


def _saves_errors(problem: Problem, needs: Needs) -> bool:
    """Whether the loops compute, which save the errors of all visits, and not PyTorch."""
    if problem.depth > 1:
        return needs.row_wise or problem.num_columns <= SAVED_ELEMENTS
    is_bf16 = _multiplies_bf16(problem)
    return problem.num_columns <= (FULL_SAVED_ELEMENTS if is_bf16 else SAVED_ELEMENTS_OF_ONE_NODE)


def _targets(problem: Problem) -> tuple[Array, int, bool]:
    """What `routing` reads: targets [P], which of them are ignored, and whether for a mean."""
    return own(problem.target.contiguous()), problem.ignore_index, problem.mean


def _sorted_d_nll(d_nll: Tensor, problem: Problem, position: Tensor) -> Tensor:
    """The d nll [P] of the sorted positions; 0 where the target is ignored, divided for a mean."""
    from lm.output.backends.compiled.routing import sort_d_nll

    sorted_ = torch.empty_like(d_nll, memory_format=torch.contiguous_format)
    sort_d_nll(own(position), own(d_nll.contiguous()), *_targets(problem), own(sorted_))
    return sorted_


def _zero_gaps(nodes: Array, out: Tensor) -> None:
    """See `zeros_except`."""
    from lm.output.backends.compiled import node_loops

    num_zeros = (len(out) - int(nodes[:, 3].sum())) * out.shape[1]
    num_threads = torch.get_num_threads() if num_zeros >= LEAST_ZEROS else 1
    bounds = [len(out) * i // num_threads for i in range(num_threads + 1)]
    divide(bounds, node_loops.zero_gaps, nodes, own(out))


def _form(
    problem: Problem, saved: Saved, d_nll: Tensor, nodes: Array, d_weight: Tensor, d_bias: Tensor
) -> None:
    """(6) of the rows of some nodes, see `node_loops.backward`."""
    from lm.output.backends.compiled import node_loops

    is_bf16 = _multiplies_bf16(problem)
    hidden = saved.hidden if is_bf16 else _scaled_hidden(problem, saved.position, d_nll)
    loops = node_loops.backward_bf16 if is_bf16 else node_loops.backward
    arrays = (*map(own, (saved.error, hidden, d_nll)), *map(as_array, (d_weight, d_bias)))
    num_rows = max(len(d_weight), len(d_bias))
    divide(bounds_of(nodes, num_rows, by_rows=True), loops, nodes, *arrays)


def _multiplies_bf16(problem: Problem) -> bool:
    """Whether the processor multiplies bf16 numbers, and hidden vectors have them.

    Rows in fp32 are then rounded, as autocast rounds those of a linear layer.
    """
    if problem.hidden.dtype != torch.bfloat16:
        return False
    from lm.output.backends.compiled.vectors import HAS_BF16

    return HAS_BF16 and problem.weight.dtype in (torch.bfloat16, torch.float32)


def _new_sorted(problem: Problem, like: Tensor, *, is_bf16: bool) -> Tensor:
    """Memory for the hidden vectors of the sorted positions, in the dtype of `like` or bf16.

    [P, W up to a multiple of `ALIGN`], so that each begins a line of a cache.
    """
    size = -(-problem.weight.shape[1] // ALIGN) * ALIGN
    dtype = torch.bfloat16 if is_bf16 else like.dtype
    return like.new_empty(problem.num_positions, size, dtype=dtype)


def _scaled_hidden(problem: Problem, position: Tensor, d_nll: Tensor) -> Tensor:
    """The hidden vectors of the sorted positions times their d_nll [P]."""
    from lm.output.backends.compiled.node_loops import sort_rows

    hidden = _new_sorted(problem, d_nll, is_bf16=False)
    source = as_array(problem.hidden.contiguous())
    sort_rows(0, len(hidden), own(position), source, own(d_nll), own(hidden))
    return hidden


@constant_when_compiled
def has_numba() -> bool:
    """Whether loops can be compiled."""
    return "numba" in sys.modules or find_spec("numba") is not None


def _row_gradients(
    nodes: Array, problem: Problem, saved: Saved, needs: Needs, d_nll: Tensor
) -> tuple[RowGradient | None, RowGradient | None]:
    """Gradients of weight and bias, if needed, given d_nll [P] of the sorted positions."""
    weight, bias, d_weight, d_bias = problem.weight, problem.bias, None, None
    none = d_nll.new_empty(0)

    def form(found: Array, rows: Tensor) -> None:
        _form(problem, saved, d_nll, found, rows, none)

    def form_bias(found: Array, rows: Tensor) -> None:
        _form(problem, saved, d_nll, found, none[:, None], rows.view(-1).zero_())

    if needs.weight:
        hidden = _scaled_hidden(problem, saved.position, d_nll)
        of_weight = Factors.of(nodes, saved.error, hidden, form, weight.shape)
        d_weight = RowGradient(weight, [Factored(of_weight, 1)])
    if bias is not None and needs.bias:
        shape = len(bias), 1
        of_bias = Factors.of(nodes, saved.error, d_nll[:, None], form_bias, shape)
        d_bias = RowGradient(bias, [Factored(of_bias, 1)])
    return d_weight, d_bias


def _nodes(node: Tensor, problem: Problem) -> Array:
    """See `node_loops.list_nodes`."""
    from lm.output.backends.compiled.node_loops import list_nodes

    tree = problem.tree
    nodes: Array = list_nodes(*map(own, (node, tree.first_row, tree.num_children)))
    return nodes
