"""The portable backend: node by node over views of the weight. The definition of correct, and the
product on a CPU.

With visits v = (position p, node n), rows W_n and biases b_n of the node's children, and y_v the
child on the target's path:

    z_v = W_n h_p + b_n                            (1)
    log q_v = z_v - lse_v,  lse_v = log Σ exp z_v  (2)
    nll_p = - Σ_{v of p} log q_v[y_v]              (3)
    e_v = q_v - onehot(y_v)                        (4)
    d h_p = d nll_p · Σ_{v of p} W_nᵀ e_v          (5)
    d W_n = Σ_{v of n} e_v (d nll_p h_p)ᵀ,   d b_n = Σ_{v of n} d nll_p e_v   (6)

Each node is one small matrix product, so a position costs O(H · columns on its path). Where they
are few (positions × √N), the log-probabilities (2) are kept for the backward; where they are many
(the full softmax) only lse is kept and the backward forms them again, one block of children after
another: every position needs every row then, and to multiply again what lies in cache costs less
than to fetch positions × N numbers from memory. No weight is copied, and each row's gradient is
complete when it is written, once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.reference.gradient_memory import zeros_but_for
from lm.output.backends.visits import Visits
from lm.output.rowwise.row_gradient import Product, RowGradient, Rows
from lm.output.tree.class_tree import TreeArrays

_KEPT_ELEMENTS = 1 << 26
"""Most log-probabilities kept from forward to backward: 256 MB in fp32."""
_KEPT_OF_ONE_NODE = 1 << 20
"""The same for a tree of one node, the full softmax."""
_BLOCK_ELEMENTS = 1 << 20
"""Most logits held at once where they are not kept: 4 MB in fp32, which a CPU's cache holds."""
_CUDA_BLOCK_ELEMENTS = 1 << 25
"""The same on CUDA, where the number of launches counts."""
_CAST_ELEMENTS = 1 << 23
"""Most elements of half-precision rows cast to fp32 at once."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def saved_size(
    num_positions: int, max_path_columns: int, depth: int, *, sparse: bool = False
) -> int:
    """Elements saved for the backward, a matter of shapes alone: log q (2) of every visit if they
    are few, else every lse. For sparse gradients of classes they are kept however many they are:
    as factors of these they are fewer than the visited rows' numbers, which would be instead.
    """
    num_columns = num_positions * max_path_columns
    if sparse and depth > 1:
        return num_columns
    most = _KEPT_OF_ONE_NODE if depth == 1 else _KEPT_ELEMENTS
    return num_columns if num_columns <= most else num_positions * depth


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    tree: TreeArrays,
    saved: Tensor,
    pulled: Tensor | None = None,
) -> Tensor:
    """nll [P] (3) in `compute_dtype`.

    Args:
        hidden: [P, H].
        weight: [R, H].
        bias: [R] or None.
        visits: of the targets.
        tree: its arrays.
        saved: [saved_size], filled in for the backward.
        pulled: [P, H] of zeros, in the order of the sorted positions, or None. Σ W_nᵀ e_v of (5) is
            added while the rows are at hand, and `saved` is left with the errors (4) instead of
            log-probabilities; only where these are kept.
    """
    own_hidden = hidden.index_select(0, visits.position).to(saved.dtype)
    log_prob = saved.new_zeros(hidden.shape[0])
    nodes = _nodes(visits, tree)
    if _keeps(saved, visits) and pulled is not None:
        for node in nodes:
            own = _pull(own_hidden, weight, bias, visits, saved, node, pulled)
            log_prob[node.visits] += own
    elif _keeps(saved, visits):
        for node in nodes:
            logits = saved.new_empty(node.shape)
            for children in node.blocks(weight, saved.dtype, kept=True):
                _logits(own_hidden, weight, bias, node, children, out=logits[:, children])
            torch.log_softmax(logits, dim=1, out=node.columns(saved))
        place, visit, used = _targets(visits, tree)
        log_prob.index_add_(0, visit, saved[place])
        saved[used:] = 0
    else:
        all_lse = saved.zero_().view(visits.node.shape)
        for node in nodes:
            child = visits.child[node.level, node.visits, None]
            lse, picked = _online_lse(own_hidden, weight, bias, node, child)
            all_lse[node.level, node.visits] = lse
            log_prob[node.visits] += picked - lse
    return torch.empty_like(log_prob).index_copy_(0, visits.position, log_prob.neg_())


def backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    tree: TreeArrays,
    saved: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d_hidden [P, H], d_weight [R, H], d_bias [R] in the dtypes of what they belong to; None where
    not needed.

    Args:
        d_nll: [P], gradient of each position's nll.
        saved: what `forward` filled in.
        needs: which of the three are wanted.
    """
    batch = _Batch.of(d_nll, hidden, weight, bias, visits, tree, saved)
    d_own = torch.zeros_like(batch.hidden) if needs[0] else None
    written = [(node.first_row, node.first_row + node.num_children) for node in batch.nodes]
    d_weight = zeros_but_for(written, weight) if needs[1] else None
    d_bias = torch.zeros_like(bias) if bias is not None and needs[2] else None
    for node, children, error in batch.errors():
        rows = node.rows(children)
        if d_own is not None:
            d_own[node.visits].addmm_(error, weight[rows].to(saved.dtype))
        if d_weight is not None:
            _write_product(d_weight[rows], error.T, batch.scaled[node.visits])
        if d_bias is not None:
            _write_product(d_bias[rows], error.T, batch.d_nll[node.visits])
    return None if d_own is None else batch.d_hidden(d_own, hidden.dtype), d_weight, d_bias


def sparse_backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    tree: TreeArrays,
    saved: Tensor,
    pulled: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, RowGradient | None, RowGradient | None]:
    """As `backward`, d_weight and d_bias as the gradients of visited rows: factors where the
    forward kept errors, else values.

    Args:
        pulled: what the forward filled in with `saved`.
    """
    batch = _Batch.of(d_nll, hidden, weight, bias, visits, tree, saved, errors_kept=True)
    d_own = pulled if batch.kept is not None else torch.zeros_like(batch.hidden)
    d_weight: list[Product | Rows] = []
    d_bias: list[Product | Rows] = []
    for node, children, error in batch.errors():
        rows = node.rows(children)
        if batch.kept is None and needs[0]:
            d_own[node.visits].addmm_(error, weight[rows].to(saved.dtype))
        for wanted, parts, right in (
            (needs[1], d_weight, batch.scaled[node.visits]),
            (bias is not None and needs[2], d_bias, batch.d_nll[node.visits, None]),
        ):
            if wanted and batch.kept is not None:
                parts.append(Product(rows.start, error, right))
            elif wanted:
                index = torch.arange(rows.start, rows.stop, device=error.device)
                parts.append(Rows(index, error.T @ right))
    return (
        batch.d_hidden(d_own, hidden.dtype) if needs[0] else None,
        RowGradient(weight, d_weight) if needs[1] else None,
        RowGradient(bias, d_bias) if bias is not None and needs[2] else None,
    )


class _Batch(NamedTuple):
    """What both backwards begin with: everything in the order of the sorted positions.

    Attributes:
        inputs: weight, bias, visits and saved, as the forward had them.
        hidden: [P, H].
        d_nll: [P].
        scaled: [P, H], d_nll_p h_p of (6).
        nodes: that are visited.
        kept: q - onehot of (4) in the places of the kept log q; None where they were not kept.
    """

    inputs: tuple[Tensor, Tensor | None, Visits, Tensor]
    hidden: Tensor
    d_nll: Tensor
    scaled: Tensor
    nodes: list["_Node"]
    kept: Tensor | None

    @classmethod
    def of(
        cls,
        d_nll: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        visits: Visits,
        tree: TreeArrays,
        saved: Tensor,
        errors_kept: bool = False,
    ) -> "_Batch":
        """Sort, and find the errors where the columns were kept, unless these are errors."""
        own_hidden = hidden.index_select(0, visits.position).to(saved.dtype)
        own_d_nll = d_nll.to(saved.dtype).index_select(0, visits.position)
        kept = None
        if _keeps(saved, visits):
            place, _, used = _targets(visits, tree)
            kept = saved if errors_kept else _error(saved[:used], place)
        nodes = list(_nodes(visits, tree))
        scaled = own_hidden * own_d_nll[:, None]
        return cls((weight, bias, visits, saved), own_hidden, own_d_nll, scaled, nodes, kept)

    def errors(self) -> Iterator[tuple["_Node", slice, Tensor]]:
        """(4) of each node, [visits, children], a block of children after another."""
        weight, bias, visits, saved = self.inputs
        for node in self.nodes:
            for children in node.blocks(weight, saved.dtype, self.kept is not None):
                if self.kept is not None:
                    yield node, children, node.columns(self.kept, children)
                else:
                    args = self.hidden, weight, bias, visits, saved, node, children
                    yield node, children, _error_in_block(*args)

    def d_hidden(self, d_own: Tensor, dtype: torch.dtype) -> Tensor:
        """(5) of the positions as they came, of the sums over visits as they were sorted."""
        scaled = d_own * self.d_nll[:, None]
        position = self.inputs[2].position
        return torch.empty_like(d_own).index_copy_(0, position, scaled).to(dtype)


class _Node(NamedTuple):
    """A visited node: its level, its visits start … stop among the sorted positions, its rows, and
    where its columns begin in the saved log-probabilities.
    """

    level: int
    start: int
    stop: int
    first_row: int
    num_children: int
    offset: int

    @property
    def visits(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.num_children

    def rows(self, children: slice) -> slice:
        return slice(self.first_row + children.start, self.first_row + children.stop)

    def columns(self, flat: Tensor, children: slice | None = None) -> Tensor:
        """The node's columns [visits, children] among the kept ones, a view."""
        count, width = self.shape
        own = flat.as_strided((count, width), (width, 1), flat.storage_offset() + self.offset)
        return (
            own if children is None or children.stop - children.start == width else own[:, children]
        )

    def blocks(self, weight: Tensor, dtype: torch.dtype, kept: bool) -> Iterator[slice]:
        """The children in portions: few enough for their logits, unless these are `kept` as a
        whole, and for their rows where these must be cast.
        """
        most = _CUDA_BLOCK_ELEMENTS if weight.is_cuda else _BLOCK_ELEMENTS
        step = self.num_children if kept else most // (self.stop - self.start)
        if weight.dtype != dtype:
            step = min(step, _CAST_ELEMENTS // weight.shape[1])
        step = max(1, step)
        for begin in range(0, self.num_children, step):
            yield slice(begin, min(begin + step, self.num_children))


def _nodes(visits: Visits, tree: TreeArrays) -> Iterator[_Node]:
    """The visited nodes, in the order of their rows: level by level, and depth first in each."""
    offset = 0
    for level, own in enumerate(visits.node):
        node, count = torch.unique_consecutive(own, return_counts=True)
        stop = count.cumsum(0)
        visited = node >= 0
        node, count, stop = node[visited], count[visited], stop[visited]
        arrays = (stop - count, stop, tree.first_row[node], tree.num_children[node])
        for start, end, row, width in zip(*(array.tolist() for array in arrays), strict=True):
            yield _Node(level, start, end, row, width, offset)
            offset += (end - start) * width


def _targets(visits: Visits, tree: TreeArrays) -> tuple[Tensor, Tensor, int]:
    """Where each visit's target stands among the kept columns [V], the sorted position that the
    visit belongs to [V], and how many columns are kept.
    """
    place = (visits.node.flatten() >= 0).nonzero().squeeze(1)
    width = tree.num_children[visits.node.flatten()[place]]
    end = width.cumsum(0)
    used = int(end[-1]) if place.numel() else 0
    return end - width + visits.child.flatten()[place], place % visits.node.shape[1], used


def _keeps(saved: Tensor, visits: Visits) -> bool:
    """Whether `saved` holds log-probabilities: their nodes have two children at least, so lse are
    always fewer.
    """
    return saved.numel() != visits.node.numel()


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, node: _Node, children: slice, out: Tensor
) -> None:
    """Equation (1) for some children of a node, into `out` [visits, children]; `hidden` [P, H] is
    sorted.
    """
    own = weight[node.rows(children)].to(hidden.dtype)
    _products(hidden, own, bias, node, children, out)


def _products(
    hidden: Tensor, rows: Tensor, bias: Tensor | None, node: _Node, children: slice, out: Tensor
) -> None:
    """`_logits` with the children's rows at hand, in hidden's dtype."""
    if bias is None:
        torch.mm(hidden[node.visits], rows.T, out=out)
    else:
        own_bias = bias[node.rows(children)].to(hidden.dtype)
        torch.addmm(own_bias, hidden[node.visits], rows.T, out=out)


def _pull(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    saved: Tensor,
    node: _Node,
    pulled: Tensor,
) -> Tensor:
    """log q [visits] of a node's targets; its errors go into `saved`, and into `pulled` what they
    pull at the hidden vectors.
    """
    blocks = list(node.blocks(weight, saved.dtype, kept=True))
    logits, error = saved.new_empty(node.shape), node.columns(saved)
    rows = weight[node.rows(blocks[0])].to(saved.dtype)
    for number, children in enumerate(blocks):
        if number:
            rows = weight[node.rows(children)].to(saved.dtype)
        _products(hidden, rows, bias, node, children, out=logits[:, children])
    torch.log_softmax(logits, dim=1, out=error)
    child = visits.child[node.level, node.visits, None]
    picked = error.gather(1, child)
    error.exp_().scatter_(1, child, picked.expm1())
    for number, children in enumerate(reversed(blocks)):
        if number:
            rows = weight[node.rows(children)].to(saved.dtype)
        pulled[node.visits].addmm_(error[:, children], rows)
    return picked.squeeze(1)


def _online_lse(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, node: _Node, child: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and the target's logit, [visits] each, walking the children block by block."""
    num_visits, _ = node.shape
    lse = hidden.new_full((num_visits,), -torch.inf)
    picked = torch.empty_like(lse)
    for children in node.blocks(weight, hidden.dtype, kept=False):
        logits = hidden.new_empty(num_visits, children.stop - children.start)
        _logits(hidden, weight, bias, node, children, out=logits)
        lse = torch.logaddexp(lse, logits.logsumexp(1))
        inside = (
            ((child >= children.start) & (child < children.stop)).squeeze(1).nonzero().squeeze(1)
        )
        picked[inside] = logits[inside, child[inside, 0] - children.start]
    return lse, picked


def _error(log_q: Tensor, place: Tensor) -> Tensor:
    """q - onehot of (4) for kept columns (flat), the targets' at `place`; q - 1 without
    cancellation.
    """
    error = log_q.exp()
    error[place] = log_q[place].expm1()
    return error


def _error_in_block(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    saved: Tensor,
    node: _Node,
    children: slice,
) -> Tensor:
    """q - onehot of (4) for a block of a node's children, formed again from lse."""
    log_q = saved.new_empty(node.stop - node.start, children.stop - children.start)
    _logits(hidden, weight, bias, node, children, out=log_q)
    log_q.sub_(saved.view(visits.node.shape)[node.level, node.visits, None])
    child = visits.child[node.level, node.visits, None] - children.start
    inside = (child >= 0) & (child < log_q.shape[1])
    child = child.clamp(0, log_q.shape[1] - 1)
    picked = log_q.gather(1, child)
    return log_q.exp().scatter_(1, child, torch.where(inside, picked.expm1(), picked.exp()))


def _write_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, a matrix or a vector, rounded once."""
    multiply = torch.mm if right.dim() == 2 else torch.mv
    if out.dtype == left.dtype:
        multiply(left, right, out=out)  # `torch.matmul` would write a copy first
    else:
        out.copy_(multiply(left, right))
