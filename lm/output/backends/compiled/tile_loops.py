"""Products and softmaxes of a node's visits, in tiles: what the loops over nodes consist of."""

import math
from typing import Any

import numba
import numpy as np

from lm.output.backends.compiled.row_operations import LINE_BYTES, softmax_rows, stream
from lm.output.backends.compiled.tiles import ROW_TILE, TILE, VISIT_TILE, dot_tile, sum_tile
from lm.output.backends.compiled.vectors import VECTOR_BYTES

TERMS = 64
"""Rows that are summed up at a time, and stay in the first cache meanwhile."""
STREAMED_BYTES = 16 << 10
"""Rows that stay in the first cache before they go past it."""


@numba.njit(nogil=True)
def dots(hidden, weight, size, num, n, starts, strides, out):
    """The products of `num` hidden vectors [size] with `n` rows; addresses as of `dot_tile`."""
    item_bytes = max(hidden.itemsize, 4)
    for j in range(0, n, TILE[1]):
        for i in range(0, num, TILE[0]):
            first = (starts[0] + i * strides[0], starts[1] + j * strides[1])
            to = (out[0] + i * out[1] + j * item_bytes, out[1])
            last = (num - 1 - i, n - 1 - j)
            dot_tile(hidden, weight, size, first, strides, to, last)


def _sums(tile: tuple[int, int]) -> Any:
    add = sum_tile(tile)

    @numba.njit(nogil=True)
    def sums(factor, rows, out, num, num_terms, starts, strides, to, added, ahead):
        """`num` rows of sums of `num_terms` rows; the other arguments are as of `sum_tile`.

        What is left of a row is computed again with columns before it, if it is not added to.
        """
        num_columns = out.shape[1]
        columns = tile[1] * (VECTOR_BYTES // max(factor.itemsize, 4))
        for start in range(0, num_columns, columns):
            k = start if added else max(0, min(start, num_columns - columns))
            for i in range(0, num, tile[0]):
                first = (starts[0] + i * strides[0], starts[1] + k * rows.itemsize)
                place = (to[0] + i * to[1] + k * out.itemsize, to[1])
                last, left = num - 1 - i, num_columns - k
                add(factor, rows, out, num_terms, first, strides, place, last, left, added, ahead)

    return sums


sums, visit_sums, row_sums = map(_sums, (TILE, VISIT_TILE, ROW_TILE))


def _streamed(sums: Any, height: int) -> Any:
    @numba.njit(nogil=True)
    def streamed_sums(factor, rows, out, num, num_terms, starts, strides, to, buffer):
        """`sums` for rows next to each other, stored from the address `to` on, past the caches.

        Args:
            buffer: [`STREAMED_BYTES` or a row and two lines of a cache, whichever is more] bytes.
        """
        row_bytes, first = out.shape[1] * out.itemsize, -buffer.ctypes.data % LINE_BYTES
        # As many whole tiles as fit; of rows so long that no tile fits, as many rows as do.
        few = (len(buffer) - 2 * LINE_BYTES) // row_bytes
        few = max(few - few % height, min(few, height))
        for i in range(0, num, few):
            there, n = to + i * row_bytes, min(few, num - i)
            here = buffer.ctypes.data + first + there % LINE_BYTES
            of_rows = starts[0] + i * strides[0], starts[1]
            place = (here, row_bytes)
            sums(factor, rows, out, n, num_terms, of_rows, strides, place, False, None)
            stream(here, there, n * row_bytes)

    return streamed_sums


streamed_sums = _streamed(sums, TILE[0])
streamed_row_sums = _streamed(row_sums, ROW_TILE[0])


@numba.njit(nogil=True)
def softmaxes(rows, low, place, low_place, num, n, bias_address, child, log_prob, is_kept):
    """(2) and (4) in place of the logits without biases of a node's `num` visits and `n` children.

    Places are as of `softmax_rows`; child [num] and log_prob [num] are the visits'.
    """
    out = np.empty((TILE[0], 2), rows.dtype)
    for v in range(0, num, TILE[0]):
        here = (place[0] + v * place[1], place[1])
        low_here = (low_place[0] + v * low_place[1], low_place[1])
        last, address = num - 1 - v, child.ctypes.data + 8 * v
        softmax_rows(
            rows, low, here, low_here, last, n, bias_address, address, out.ctypes.data, is_kept
        )
        for i in range(min(TILE[0], num - v)):
            log_prob[v + i] = out[i, 0] - math.log(out[i, 1])
