"""What the fused kernels load and store, program by program, in the order of the kernels' loops."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.triton.schedule import schedule, splits_per_tile
from lm.output.backends.triton.tile_shapes import Tiles
from lm.output.backends.visits import route
from scripts.benchmarks.kernel_cache import Access, Programs

HIDDEN, WEIGHT, EXP_LOGITS, D_WEIGHT = range(4)
"""Tensors of a trace; `EXP_LOGITS` with its block maxima. d_hidden and its partial sums are touched
once and left out.
"""


class Batch:
    """The visits of a batch of targets [P], and what decides how the kernels handle them."""

    def __init__(
        self, target: Tensor, tree: ClassTree, hidden_size: int, element_bytes: int, shape: Tiles
    ) -> None:
        self.tree, self.hidden_size, self.shape = tree, hidden_size, shape
        self.element_bytes = element_bytes  # of a number in hidden and weight
        self.row_bytes = hidden_size * element_bytes
        self.num_positions = len(target)
        self.visits = route(target, tree.arrays, tree.depth, -100)
        self.plan = schedule(self.visits, tree.arrays)  # which programs work on which visits
        # [D, P], whether there is a visit, one of a heavy node, one of a light node
        self.visited = self.visits.node >= 0
        self.heavy = self.visited & (torch.arange(tree.depth)[:, None] < self.plan.light_level)
        self.light = self.visited & ~self.heavy
        self.num_with_light = int((self.plan.light_level < tree.depth).sum())  # positions

    def rows(self, chosen: Tensor) -> int:
        """Children of the nodes of the chosen visits [D, P], each node once."""
        return int(self.tree.num_children[torch.unique(self.visits.node[chosen])].sum())

    def positions(self, chosen: Tensor) -> int:
        """Positions with a chosen visit."""
        return int(chosen.any(0).sum())

    def blocks(self, chosen: Tensor) -> int:
        """Blocks of children, over the chosen visits."""
        width = self.tree.num_children[self.visits.node[chosen]]
        return int((-(-width // self.shape.block_c)).sum())

    def rows_by_tile(self, tile: int) -> int:
        """Children of heavy nodes, once for each tile of `tile` positions that visits them."""
        place = torch.arange(self.num_positions) // tile
        num_tiles = self.num_positions // tile + 1
        key = self.visits.node * num_tiles + place
        nodes = torch.unique(key[self.heavy]) // num_tiles
        return int(self.tree.num_children[nodes].sum())


class _Node(NamedTuple):
    """A node in a tile of positions."""

    begin: int  # of its visits there
    end: int
    first_row: int  # of its children
    width: int
    block: int  # number of its first block among those of a path


class Launches:
    """Loads and stores of the four launches of a batch.

    In the forward, `num_splits` programs share a tile's children; by default as in the backend.
    """

    def __init__(self, batch: Batch, num_splits: int | None = None) -> None:
        self.batch, plan, arrays = batch, batch.plan, batch.tree.arrays
        self.depth, self.num_positions = batch.visits.node.shape
        self.node, self.stop = batch.visits.node.numpy(), plan.stop.numpy()
        self.light_level = plan.light_level.numpy()
        groups, heavy = plan.light_first.numpy(), plan.heavy_first.numpy()
        self.groups, self.heavy = groups[groups < self.num_positions], heavy[heavy >= 0]
        self.first_row, self.width = arrays.first_row.numpy(), arrays.num_children.numpy()
        self.column = arrays.column.numpy()
        path = batch.tree.max_path_columns, self.depth, batch.shape.block_c
        self.num_splits = num_splits or splits_per_tile(*path)

    def __iter__(self) -> Iterator[Programs]:
        yield self._forward()
        yield self._d_hidden()
        yield self._d_weight()
        yield self._d_light()

    def _nodes(
        self, begin: int, end: int, top: int, *, heavy: bool, backwards: bool = False
    ) -> list[_Node]:
        """The heavy or the light nodes of positions begin … end, in the order of the kernels."""
        nodes = []
        for d in range(top, self.depth):
            level, s = [], begin
            while s < end:
                s_stop = min(int(self.stop[d, s]), end) if self.node[d, s] >= 0 else s + 1
                if self.node[d, s] >= 0 and (d < self.light_level[s]) == heavy:
                    level.append(self._node(d, s, s_stop))
                s = s_stop
            nodes += level[::-1] if backwards else level
        return nodes

    def _node(self, d: int, begin: int, end: int) -> _Node:
        n = self.node[d, begin]
        block = int(self.column[n]) // self.batch.shape.block_c + d
        return _Node(begin, end, int(self.first_row[n]), int(self.width[n]), block)

    def _tiles(self, v: int) -> Iterator[list[_Node]]:
        """The heavy nodes of each tile of v positions, in alternating order."""
        for tile, begin in enumerate(range(0, self.num_positions, v)):
            end = min(begin + v, self.num_positions)
            yield self._nodes(begin, end, 0, heavy=True, backwards=tile % 2 == 1)

    def _light_groups(self) -> Iterator[tuple[int, int, list[_Node]]]:
        """Positions and nodes of each light group."""
        for first in self.groups:
            begin, top = int(first), int(self.light_level[first])
            end = int(self.stop[top, begin])
            yield begin, end, self._nodes(begin, end, top, heavy=False)

    def _forward(self) -> Programs:
        trace = _Builder(self.batch, self.batch.shape.forward.h)
        tiles = list(self._tiles(self.batch.shape.forward.v))
        tiles += [nodes for _, _, nodes in self._light_groups()]
        for nodes in tiles:
            for split in range(self.num_splits):
                for node in nodes:
                    blocks = list(trace.blocks(node))
                    share = -(-len(blocks) // self.num_splits)
                    for block, rows in blocks[split * share : (split + 1) * share]:
                        for h in range(trace.num_h):
                            trace.add(HIDDEN, node.begin, node.end, h)
                            trace.add(WEIGHT, *rows, h)
                        trace.add(EXP_LOGITS, node.begin, node.end, block)
                trace.next_program()
        return trace.programs

    def _d_hidden(self) -> Programs:
        trace = _Builder(self.batch, self.batch.shape.d_hidden.h)
        for nodes in self._tiles(self.batch.shape.d_hidden.v):
            for h in range(trace.num_h):
                for node in nodes:
                    for block, rows in trace.blocks(node):
                        trace.add(EXP_LOGITS, node.begin, node.end, block)
                        trace.add(WEIGHT, *rows, h)
                trace.next_program()
        return trace.programs

    def _d_weight(self) -> Programs:
        trace = _Builder(self.batch, self.batch.shape.d_weight.h)
        step = self.batch.shape.d_weight.v
        for flat in self.heavy:
            d, s = divmod(int(flat), self.num_positions)
            node = self._node(d, s, int(self.stop[d, s]))
            for block, rows in trace.blocks(node):
                for h in range(trace.num_h):
                    for v in range(node.begin, node.end, step):
                        trace.add(EXP_LOGITS, v, min(v + step, node.end), block)
                        trace.add(HIDDEN, v, min(v + step, node.end), h)
                    trace.add(D_WEIGHT, *rows, h)
                    trace.next_program()
        return trace.programs

    def _d_light(self) -> Programs:
        trace = _Builder(self.batch, self.batch.shape.d_light.h)
        for begin, end, nodes in self._light_groups():
            for h in range(trace.num_h):
                trace.add(HIDDEN, begin, end, h)
                for node in nodes:
                    for block, rows in trace.blocks(node):
                        trace.add(EXP_LOGITS, node.begin, node.end, block)
                        trace.add(WEIGHT, *rows, h)
                        trace.add(D_WEIGHT, *rows, h)
                trace.next_program()
        return trace.programs


class _Builder:
    """Collects the loads and stores of one launch."""

    def __init__(self, batch: Batch, block_h: int) -> None:
        self.batch, self.block_h, self.block_c = batch, block_h, batch.shape.block_c
        self.num_h = -(-batch.hidden_size // block_h)
        self.programs: list[list[Access]] = [[]]

    def blocks(self, node: _Node) -> Iterator[tuple[int, tuple[int, int]]]:
        """Blocks of a node's children: their number on the path, and their rows."""
        for k, c0 in enumerate(range(0, node.width, self.block_c)):
            first = node.first_row + c0
            yield node.block + k, (first, node.first_row + min(c0 + self.block_c, node.width))

    def add(self, tensor: int, begin: int, end: int, portion: int) -> None:
        """Add one load or store of rows begin … end by the current program."""
        columns = min(self.block_h, self.batch.hidden_size - portion * self.block_h)
        row_bytes = columns * self.batch.element_bytes
        if tensor == EXP_LOGITS:
            row_bytes = self.block_c * self.batch.element_bytes + 4
        self.programs[-1].append(Access(tensor, begin, end, portion, row_bytes))

    def next_program(self) -> None:
        """Continue with the next program."""
        self.programs.append([])
