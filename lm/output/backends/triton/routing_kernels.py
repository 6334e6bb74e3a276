"""The kernels that route a batch: visits sorted by node, and lists of what programs work on.

Letters as in `forward_kernel`. Targets are sorted by the depth-first rank of their word's node,
stably: equal ranks in the order of the batch. `_sort` sorts short runs of keys that are unique,
rank · 2^32 + index, or leaves them to `torch.sort` where there would be many; `_merge` finds the
place of each key in the whole batch as the number of smaller keys in all runs, and writes the path
of each target there; `_plan` shares the visits among programs. `routing` describes the result.

The order of the entries of a list is the order in which programs reserve them. It affects when a
tile is computed and no number: each visit and each row belongs to one entry.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing import Routing


@triton.jit
def _fields(routing, P, D):
    """The pointers of a `Routing`, from that to its memory."""
    size = tl.cdiv(P, 32) * 32
    position = routing + 32
    node = position + 4 * size
    child = node + D * P
    visits = child + D * P
    tiles = visits + 4 * D * P
    return Routing(
        routing, routing + 8, routing + 9, position, position + size, position + 2 * size,
        position + 3 * size, node, child, visits, visits + 1, visits + 2, tiles, tiles + 4,
        tiles + 8,
    )  # fmt: skip


@triton.jit
def _light_entry(entry):
    """Where a light node is first visited, and whether it has few visits: then tiles have 16."""
    flat = tl.load(entry)
    return tl.where(flat < 0, -1 - flat, flat), flat < 0


@triton.jit
def _lower_bound(keys, size, probe, steps, BITS: tl.constexpr):
    """How many of `size` < 2^(steps · BITS) sorted keys are smaller than each probe.

    A step waits once for 2^BITS - 1 keys and finds as many bits of the number.
    """
    low = tl.zeros(probe.shape, tl.int32)
    for i in range(0, steps):
        stride = 1 << ((steps - 1 - i) * BITS)
        smaller = tl.zeros(probe.shape, tl.int32)
        for j in tl.static_range(1, 1 << BITS):
            inside = low + j * stride <= size
            key = tl.load(keys + low + j * stride - 1, mask=inside, other=0)
            smaller += (inside & (key < probe)).to(tl.int32)
        low += smaller * stride
    return low


@triton.jit
def _is_word(target, N, ignore_index):
    return (target >= 0) & (target < N) & (target != ignore_index)


@triton.jit(do_not_specialize=VARYING)
def _sort(
    target, row_of_word, node_of_row, preorder, keys, visited, routing,
    P, N, num_nodes, ignore_index,
    SORTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some keys, sorted or not; targets that are no words last. Also the initial values."""
    BLOCK_V: tl.constexpr = TILE.v
    lane = tl.arange(0, BLOCK_V)
    i = tl.program_id(0) * BLOCK_V + lane
    word = tl.load(target + i, mask=i < P, other=0)
    valid = (i < P) & _is_word(word, N, ignore_index)
    row = tl.load(row_of_word + word, mask=valid, other=0)
    node = tl.load(node_of_row + row, mask=valid, other=0)
    rank = tl.load(preorder + node, mask=valid, other=0)
    rank = tl.where(valid, rank, tl.where(i < P, num_nodes, num_nodes + 1))
    key = (rank << 32) + i
    tl.store(keys + i, tl.sort(key) if SORTED else key)
    for n0 in range(tl.program_id(0) * BLOCK_V, num_nodes, tl.num_programs(0) * BLOCK_V):
        tl.store(visited + n0 + lane, tl.zeros([BLOCK_V], tl.int8), mask=n0 + lane < num_nodes)
    if tl.program_id(0) == 0:  # no entries, all targets valid, and none counted
        tl.store(routing + lane, (lane == 8).to(tl.int32), mask=lane < 10)


@triton.jit(do_not_specialize=VARYING)
def _merge(
    target, paths, keys, routing, nll,
    P, N, D, ignore_index, run_size, steps, num_splits,
    TILE: tl.constexpr,
):  # fmt: skip
    """The sorted positions and their paths; `Routing.num_missing` counts programs for each nll.

    `TILE.v` keys are searched in `TILE.c` runs at a time, `TILE.step` bits in a step. In a shard,
    `node_of_row` and `local_row` are of `Shard`; the child is -1 if it is elsewhere.
    """
    BLOCK_V: tl.constexpr = TILE.v
    RUNS: tl.constexpr = TILE.c
    to = _fields(routing, P, D)
    key = tl.load(keys + tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V))
    # the threads of a warp search the same run for neighbouring keys
    probe = key[None, :] + tl.zeros([RUNS, BLOCK_V], tl.int64)
    v = tl.zeros([BLOCK_V], tl.int32)
    num_runs = tl.cdiv(P, run_size)
    for run0 in range(0, num_runs, RUNS):
        run = run0 + tl.arange(0, RUNS)
        size = tl.where(run < num_runs, run_size, 0)[:, None] + tl.zeros([RUNS, BLOCK_V], tl.int32)
        first = keys + run[:, None] * run_size
        v += tl.sum(_lower_bound(first, size, probe, steps, TILE.step), axis=0)
    in_batch = v < P
    p = (key & 0xFFFFFFFF).to(tl.int32)
    word = tl.load(target + p, mask=in_batch, other=0)
    valid = in_batch & _is_word(word, N, ignore_index)
    tl.store(to.all_valid + v * 0, 0, mask=in_batch & (valid == 0) & (word != ignore_index))
    tl.atomic_add(to.num_valid, tl.sum(valid.to(tl.int32), axis=0), sem="relaxed")
    tl.store(to.position + v, p, mask=in_batch)
    tl.store(to.rank + v, (key >> 32).to(tl.int32), mask=in_batch)
    row = tl.load(paths.row_of_word + word, mask=valid, other=0)
    num_visits = tl.zeros([BLOCK_V], tl.int32)
    for climbed in range(0, D):
        d = D - 1 - climbed
        n = tl.load(paths.node_of_row + row, mask=valid, other=0)
        on_path = valid & (tl.load(paths.level + n, mask=valid, other=0) == d)
        width = tl.load(paths.num_children + n, mask=valid, other=0)
        visits = on_path & (width > 1 if paths.local_row is None else width > 0)
        first_row = tl.load(paths.first_row + n, mask=valid, other=0)
        if paths.local_row is None:
            c = row - first_row
        else:
            local = tl.load(paths.local_row + row, mask=visits, other=-1)
            c = tl.where(local < 0, -1, local - first_row)
        tl.store(to.node + d * P + v, tl.where(visits, n, -1).to(tl.int32), mask=in_batch)
        tl.store(to.child + d * P + v, tl.where(visits, c, 0).to(tl.int32), mask=in_batch)
        num_visits += visits.to(tl.int32)
        parent_row = tl.maximum(tl.load(paths.row_of_node + n, mask=valid, other=0), 0)
        row = tl.where(on_path, parent_row, row)
    tl.store(to.num_missing + v, num_visits * num_splits, mask=in_batch)
    tl.store(nll + p, tl.zeros([BLOCK_V], nll.dtype.element_ty), mask=in_batch & (num_visits == 0))


@triton.jit
def _write_entry(place, mask, first, second, third, fourth):
    tl.store(place, first, mask=mask)
    tl.store(place + 1, second, mask=mask)
    tl.store(place + 2, third, mask=mask)
    tl.store(place + 3, fourth, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _plan(
    hidden, sorted_hidden, preorder, preorder_stop, num_children, visited, routing,
    P, D, chunk, steps,
    META: tl.constexpr,
):  # fmt: skip
    """Heavy or light, and the entries of all lists; hidden vectors in the order of positions.

    The first programs take `tile.v` positions each and search `tile.step` bits in a step, the
    others copy `tile.c` vectors each, `tile.h` columns at a time.
    """
    TILE: tl.constexpr = META.tile
    to = _fields(routing, P, D)
    num_plans = tl.cdiv(P, TILE.v)
    if tl.program_id(0) < num_plans:
        _plan_visits(to, (preorder, preorder_stop, num_children), visited, P, D, chunk, steps, META)
    else:
        H: tl.constexpr = META.hidden
        stride: tl.constexpr = (H + 15) // 16 * 16
        v = (tl.program_id(0) - num_plans) * TILE.c + tl.arange(0, TILE.c)
        p = tl.load(to.position + v, mask=v < P, other=0).to(tl.int64)
        for h0 in range(0, stride, TILE.h):
            h = h0 + tl.arange(0, TILE.h)
            inside = (v < P)[:, None] & (h < H)[None, :]
            x = tl.load(hidden + p[:, None] * H + h[None, :], mask=inside, other=0.0)
            place = sorted_hidden + v.to(tl.int64)[:, None] * stride + h[None, :]
            tl.store(place, x, mask=(v < P + META.visits)[:, None] & (h < stride)[None, :])


@triton.jit
def _of_list(i: tl.constexpr, values):
    """The row of one list, of [8, positions]."""
    return tl.sum(tl.where(tl.arange(0, 8)[:, None] == i, values, 0), axis=0)


@triton.jit
def _plan_visits(to, tree, visited, P, D, chunk, steps, META: tl.constexpr):
    preorder, preorder_stop, num_children = tree
    LIGHT: tl.constexpr = META.light.v
    BLOCK_V: tl.constexpr = META.tile.v
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    index = tl.arange(0, 8)
    zero = tl.zeros([BLOCK_V], tl.int32)
    top, sizes = zero + D, zero + P
    for d in range(0, D):
        flat = d * P + v
        n = tl.load(to.node + flat, mask=v < P, other=-1)
        visits = n >= 0
        width = tl.load(num_children + n, mask=visits, other=0).to(tl.int32)
        if d == 0:  # the root
            start, stop = zero, zero + tl.load(to.num_valid)
        else:
            begin = tl.load(preorder + n, mask=visits, other=0)
            end = tl.load(preorder_stop + n, mask=visits, other=0)
            start = _lower_bound(to.rank, sizes, begin, steps, META.tile.step)
            stop = _lower_bound(to.rank, sizes, end, steps, META.tile.step)
        first = visits & (v == start)
        heavy, light = visits & (stop - start > LIGHT), visits & (stop - start <= LIGHT)
        tl.store(visited + n, tl.full([BLOCK_V], 1, tl.int8), mask=first)
        heavy_tile = heavy & ((v - start) % META.visits == 0)
        light_node, light_group = light & first, light & first & (top == D)
        light_entry = tl.where(stop - start <= 16, -1 - flat, flat)
        top = tl.where(light & (top == D), d, top)
        # blocks of children of a node, for each chunk of its visits
        blocks = tl.where(heavy & first, tl.cdiv(width, META.rows), 0)
        chunks = tl.where(heavy & first, tl.cdiv(stop - start, chunk), 0)
        split = chunks > 1
        # one reservation for the entries of all lists, in the order of `Routing.num_entries`
        numbers = tl.where(index[:, None] == 0, heavy_tile.to(tl.int32)[None, :], 0)
        numbers += tl.where(index[:, None] == 1, light_node.to(tl.int32)[None, :], 0)
        numbers += tl.where(index[:, None] == 2, light_group.to(tl.int32)[None, :], 0)
        numbers += tl.where(index[:, None] == 3, tl.where(split, 0, blocks)[None, :], 0)
        numbers += tl.where(index[:, None] == 4, tl.where(split, blocks * chunks, 0)[None, :], 0)
        numbers += tl.where(index[:, None] == 5, tl.where(split, blocks, 0)[None, :], 0)
        numbers += tl.where(index[:, None] == 6, tl.where(split, chunks * width, 0)[None, :], 0)
        reserved = tl.atomic_add(to.num_entries + index, tl.sum(numbers, axis=1), sem="relaxed")
        place = reserved[:, None] + tl.cumsum(numbers, axis=1) - numbers
        tl.store(to.heavy_tiles + _of_list(0, place) * 4, flat, mask=heavy_tile)
        tl.store(to.light_nodes + _of_list(1, place) * 4, light_entry, mask=light_node)
        tl.store(to.light_groups + _of_list(2, place) * 4, light_entry, mask=light_group)
        row_place = to.row_tiles + _of_list(3, place) * 12
        chunk_place = to.chunk_tiles + _of_list(4, place) * 12
        split_place = to.split_tiles + _of_list(5, place) * 12
        tile_place = tl.where(split, chunk_place, row_place)
        partial_row = _of_list(6, place)
        for i in range(0, tl.max(blocks * chunks, 0)):
            inside = i < blocks * chunks
            part = i // tl.maximum(blocks, 1)
            block, row = i - part * blocks, partial_row + part * width
            part_end = tl.minimum(start + (part + 1) * chunk, stop)
            _write_entry(tile_place + i * 12, inside, flat + part * chunk, part_end, block, row)
            _write_entry(
                split_place + i * 12, inside & split & (i < blocks), flat, chunks, block, row
            )  # fmt: skip
    tl.store(to.light_level + v, top, mask=v < P)
