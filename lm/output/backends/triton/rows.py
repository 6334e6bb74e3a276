"""Gradients of rows: the launch that writes them, and the factors that optimizers use instead."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import SLOT, launch
from lm.output.backends.triton.plan import Children, Inputs, Memory, Plan
from lm.output.backends.triton.routing import Routing
from lm.output.backends.triton.tile_shapes import Tile
from lm.output.inputs import compute_dtype, followed_by_zeros
from lm.output.rowwise.factors import KINDS, Block, RowFactors, Rule, summed_by_row

ROW_PROGRAMS = 2048
"""Most programs for tiles of heavy nodes' rows: they step through a list that may be short."""
_ZEROING_PROGRAMS = 512
"""Most programs that write zeros for rows of nodes without visits."""
UPDATE_PROGRAMS, SHARED_BLOCKS = 32_768, 8
"""Most programs of an update, and the blocks of children of a light node that one of them takes."""
PAIRS = 1 << 25
"""Most pairs of a single row and a position whose errors are in memory at once."""
ALIGNED = 32
"""Tensors that share memory begin at multiples of this many elements, as kernels expect."""


class Errors(NamedTuple):
    """What `_errors` writes, and the scale of it."""

    errors: Tensor  # as `Memory.exp_logits`
    scale: Tensor | None  # the s of (9); None for 1


class Partial(NamedTuple):
    """What `_heavy` writes; None where there is no gradient."""

    partial_hidden: Tensor | None  # [P, columns of sorted hidden vectors]
    partial_rows: Tensor | None  # [., the same], sums of chunks
    partial_bias: Tensor | None  # [.]


class Outputs(NamedTuple):
    """Gradients to write.

    `written_row` [I] is where each node's rows begin in d_weight and d_bias; None if these have all
    rows, of which those of nodes without visits are set to 0.
    """

    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None
    written_row: Tensor | None = None


class Update(NamedTuple):
    """What `_update` uses (6) for: numbers of the rule, a table and its state, norms."""

    numbers: Tensor
    seed: Tensor | None = None
    table: Tensor | None = None
    total: Tensor | None = None
    mean: Tensor | None = None
    square: Tensor | None = None
    squares: Tensor | None = None
    sums: Tensor | None = None
    bias_sums: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BatchFactors:
    """The gradients of a batch for weight and bias as their factors, which need no rows.

    Squared norms are formed for weight and bias together and kept until the update of each: a CUDA
    graph of the backward alone writes new factors here.
    """

    problem: Problem
    memory: Memory
    plan: Plan
    errors: Errors
    partial: Partial
    formed: dict[bool, tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # norms

    def norms(self, *, of_bias: bool) -> tuple[Tensor | None, Tensor]:
        """Squared norms of rows [R], undefined where there is no gradient, and their sum.

        Those of the numbers of the bias are not kept.
        """
        if of_bias not in self.formed:
            num_rows, num_nodes = self.problem.weight.shape[0], self.plan.num_nodes
            num_places = -(-(num_rows // SLOT + num_nodes) // ALIGNED) * ALIGNED
            sums = self._new(2, num_places).zero_()
            rule = Update(self._new(1).fill_(1))
            if has_rows := self.partial.partial_rows is not None:
                rule = rule._replace(squares=self._new(num_rows), sums=sums[0])
            if self.partial.partial_bias is not None:
                rule = rule._replace(bias_sums=sums[1])
            self.launch(self.plan.tiles.norm, rule, of_bias=not has_rows)
            totals = sums.sum(1)
            self.formed[False] = rule.squares, totals[0]
            self.formed[True] = None, totals[1]
        return self.formed[of_bias]

    def kept(self) -> "BatchFactors":
        """The factors without autograd's history and without what updates do not use."""
        tables = {name: getattr(self.problem, name).detach() for name in ("hidden", "weight")}
        return replace(
            self,
            problem=self.problem._replace(**tables, bias=None),
            memory=self.memory._replace(exp_logits=self.errors.errors),
            partial=self.partial._replace(partial_hidden=None),
        )

    @cached_property
    def shared(self) -> dict[str, Any]:
        """The arguments that the kernels of the backward have in common."""
        return {
            "errors_of": self.errors,
            "tree": Children.of(self.problem.tree),
            "routing": self.memory.routing,
            "strides": self.plan.strides,
            "P": self.plan.num_positions,
            "ACC": self.plan.acc,
        }

    def launch(self, tile: Tile, rule: Update, *, of_bias: bool) -> None:
        """Launch the kernel for a table, its state and norms."""
        most, rows = self.plan.most, self.plan.tiles.heavy.c
        tile = self.plan.tiles.bias if of_bias else tile
        tile = tile._replace(c=min(tile.c, rows))
        num_shares = -(-self.problem.max_path_columns // (tile.c * SHARED_BLOCKS))
        num_shares = max(1, min(num_shares, UPDATE_PROGRAMS // max(most.light_nodes, 1)))
        num_items = (most.row_tiles + most.split_tiles) * (rows // tile.c)
        num_items += most.light_nodes * num_shares
        launch(
            "_update", min(num_items, UPDATE_PROGRAMS), tile,
            rule=rule, inputs=Inputs(None if of_bias else self.memory.sorted_hidden, None),
            partial=self.partial, num_shares=num_shares, META=self.plan.meta(tile), **self.shared,
        )  # fmt: skip

    def _new(self, *shape: int) -> Tensor:
        return self.memory.visit_lse.new_empty(shape)


def write(factors: BatchFactors, outputs: Outputs, *, with_chunks: bool = False) -> None:
    """Launch the kernels that write gradients from their factors, and sums of chunks if asked."""
    plan, partial, weight = factors.plan, factors.partial, factors.problem.weight
    most, columns, heavy, light = plan.most, weight.shape[1], plan.tiles.heavy, plan.tiles.light
    of_rows = outputs.d_weight is not None or outputs.d_bias is not None
    row_tiles, split_tiles = (most.row_tiles, most.split_tiles) if of_rows else (0, 0)
    num_h = -(-plan.padded_size // heavy.h)
    items = num_h + (0 if partial.partial_bias is None else heavy.c // 16)
    chunk_programs = min(most.chunk_tiles * items, ROW_PROGRAMS) if with_chunks else 0
    items = -(-columns // heavy.h) + (outputs.d_bias is not None)
    row_programs = min(row_tiles * items, ROW_PROGRAMS)
    num_programs = chunk_programs + row_programs
    if outputs.d_hidden is not None:
        num_programs += -(-plan.num_positions // heavy.v) * num_h
    shared = factors.shared | {
        "inputs": Inputs(factors.memory.sorted_hidden, weight),
        "outputs": outputs,
    }
    launch(
        "_heavy", num_programs, heavy, chunk_programs=chunk_programs, row_programs=row_programs,
        partial=partial if with_chunks else Partial(partial.partial_hidden, None, None),
        META=plan.meta(heavy), **shared,
    )  # fmt: skip
    if not of_rows and outputs.d_hidden is None:
        return
    num_rows = weight.shape[0] if of_rows and outputs.written_row is None else 0
    num_programs = (most.light_groups + split_tiles) * -(-columns // light.h)
    num_programs += min(-(-num_rows // heavy.c), _ZEROING_PROGRAMS)
    launch(
        "_rows", num_programs, light, visited=factors.memory.visited,
        node_of_row=factors.problem.tree.node_of_row, R=num_rows, max_groups=most.light_groups,
        max_split_tiles=split_tiles, partial=partial, META=plan.meta(light), **shared,
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonFactors(RowFactors):
    """The gradient of the weight or of the bias."""

    factors: BatchFactors
    of_bias: bool

    def in_memory(self) -> RowFactors:
        """See `RowFactors.in_memory`: as rows. The host waits for their number."""
        factors, tree = self.factors, self.factors.problem.tree
        visited = factors.memory.visited.bool()
        width = torch.where(visited, tree.num_children, 0)
        index = visited[tree.node_of_row].nonzero().squeeze(1)
        columns = 1 if self.of_bias else factors.problem.weight.shape[1]
        values = factors.memory.visit_lse.new_empty(index.numel(), columns)
        weight, bias = (None, values.view(-1)) if self.of_bias else (values, None)
        write(factors, Outputs(None, weight, bias, width.cumsum(0) - width))
        formed = index, values * self.factor
        return RowFactors(rows=(formed, *super().in_memory().rows))

    def _of_rows(self, row: Tensor) -> Tensor:
        """The gradients of rows [K], [K, W], without single rows; the host waits for nothing."""
        problem, memory = self.factors.problem, self.factors.memory
        tree, (errors, scale) = problem.tree, self.factors.errors
        visited = Routing.of(memory.routing, problem.num_positions, problem.depth).node
        visited = visited.view(problem.depth, -1)
        vectors = memory.sorted_hidden[: problem.num_positions].to(memory.visit_lse.dtype)
        vectors = followed_by_zeros(vectors, problem.weight.shape[1])
        if self.of_bias:
            vectors = torch.ones_like(vectors[:, :1])
        vectors = vectors if scale is None else vectors * scale
        found = []
        for some in torch.split(row, max(1, PAIRS // max(1, len(vectors)))):
            node = tree.node_of_row[some]
            level, child = tree.level[node], some - tree.first_row[node]
            is_child = (child >= 0) & (child < tree.num_children[node])
            slot = (tree.column[node] // SLOT + level) * SLOT + child.where(is_child, 0)
            is_visit = (visited[level] == node[:, None]) & is_child[:, None]
            found.append(errors.T[slot].where(is_visit, 0).to(vectors.dtype) @ vectors)
        return torch.cat(found) * self.factor

    def _single(self) -> tuple[Block, Tensor] | None:
        """The sums of single rows, if there are any, and the products' gradients of these rows."""
        if not any(len(row) for row, _ in self.rows):
            return None
        rows = super().in_memory().rows
        block = summed_by_row(*(torch.cat(each) for each in zip(*rows, strict=True)))
        return block, self._of_rows(block.index(block.values().device))

    def forget(self) -> None:
        """See `RowFactors.forget`."""
        self.factors.formed.clear()

    def square_norm(self, table: Tensor) -> Tensor:
        """See `RowFactors.square_norm`."""
        total = self.factors.norms(of_bias=self.of_bias)[1] * self.factor**2
        if (single := self._single()) is not None:
            block, others = single
            more = ((2 * others + block.values()) * block.values()).sum(1)
            total = (total + more.where(block.is_first(), 0).sum()).clamp(min=0)
        return total

    def update(self, table: Tensor, rule: Rule) -> Iterable[Block]:
        """See `RowFactors.update`: rows with single gradients remain."""
        if rule.kind not in KINDS:
            return super().update(table, rule)
        remaining, tables, before = list[Block](), [table, *rule.state.values()], list[Tensor]()
        if (single := self._single()) is not None:
            block, others = single
            remaining = [replace(block, formed=block.values() + others)]
            before = [some[block.rows] for some in tables]
        dtype, device = compute_dtype(table.dtype), table.device
        numbers = torch.ones(1 + len(rule.numbers), dtype=dtype, device=device)
        each, values = numbers.unbind(), (self.factor, *rule.numbers)
        torch._foreach_mul_(each, [1.0 if isinstance(x, Tensor) else x for x in values])
        for number, value in zip(each, values, strict=True):
            if isinstance(value, Tensor):
                number.mul_(value)
        squares, _ = self.factors.formed.pop(self.of_bias, (None, None))
        squares = squares if rule.kind == "adagrad" else None
        rounds = table.dtype == torch.bfloat16
        seed = torch.randint(1 << 31, (), device=device) if rounds else None
        of_table = Update(numbers, seed, table, squares=squares, **rule.state)
        tiles = self.factors.plan.tiles
        tile = tiles.adam if rule.kind == "adam" else tiles.update
        self.factors.launch(tile, of_table, of_bias=self.of_bias)
        for some, old in zip(tables, before, strict=False):
            some[block.rows] = old
        return remaining
