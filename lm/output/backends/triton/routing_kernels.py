"""The kernels that route a batch: visits sorted by node, and lists of what programs work on.

Letters as in `forward_kernel`. Targets are sorted by the depth-first rank of their word's node,
stably: equal ranks in the order of the batch. `_sort` sorts short runs of keys that are unique,
rank · 2^32 + index; `_merge` finds the place of each key in the whole batch as the number of
smaller keys in all runs, and writes the path of each target there; `_plan` shares the visits among
programs. `routing` describes the result.

The order of the entries of a list is the order in which programs reserve them. It affects when a
tile is computed and no number: each visit and each row belongs to one entry.
"""

import triton
import triton.language as tl


@triton.jit
def _lower_bound(keys, size, probe, STEPS: tl.constexpr):
    """How many of `size` < 2^STEPS sorted keys are smaller than each probe."""
    low = tl.zeros(probe.shape, tl.int32)
    for bit in tl.static_range(STEPS):
        step = 1 << (STEPS - 1 - bit)
        inside = low + step <= size
        key = tl.load(keys + low + step - 1, mask=inside, other=0)
        low += tl.where(inside & (key < probe), step, 0)
    return low


@triton.jit
def _is_word(target, N, ignore_index):
    return (target >= 0) & (target < N) & (target != ignore_index)


@triton.jit
def _sort(
    target, row_of_word, node_of_row, preorder,
    keys, visited, num_entries, all_valid,
    P, N, num_nodes, ignore_index, NUM_LISTS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One sorted run of keys; targets that are no words last. Also the initial values."""
    lane = tl.arange(0, RUN)
    i = tl.program_id(0) * RUN + lane
    word = tl.load(target + i, mask=i < P, other=0)
    valid = (i < P) & _is_word(word, N, ignore_index)
    row = tl.load(row_of_word + word, mask=valid, other=0)
    node = tl.load(node_of_row + row, mask=valid, other=0)
    rank = tl.load(preorder + node, mask=valid, other=0)
    rank = tl.where(valid, rank, tl.where(i < P, num_nodes, num_nodes + 1))
    tl.store(keys + i, tl.sort((rank << 32) + i))
    for n0 in range(tl.program_id(0) * RUN, num_nodes, tl.num_programs(0) * RUN):
        tl.store(visited + n0 + lane, tl.zeros([RUN], tl.int8), mask=n0 + lane < num_nodes)
    if tl.program_id(0) == 0:
        tl.store(num_entries + lane, tl.zeros([RUN], tl.int32), mask=lane < NUM_LISTS)
        tl.store(all_valid, 1)


@triton.jit
def _merge(
    target, row_of_word, node_of_row, row_of_node, level, first_row, num_children, keys,
    position, rank, node, child, num_missing, nll, all_valid,
    P, N, D, ignore_index, num_runs,
    SPLITS: tl.constexpr, RUN: tl.constexpr, STEPS: tl.constexpr, MAX_RUNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The sorted positions and their paths. `num_missing` is how many programs compute each nll."""
    key = tl.load(keys + tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V))
    run = tl.arange(0, MAX_RUNS)
    size = tl.where(run < num_runs, RUN, 0)[None, :] + tl.zeros([BLOCK_V, MAX_RUNS], tl.int32)
    probe = key[:, None] + tl.zeros([BLOCK_V, MAX_RUNS], tl.int64)
    smaller = _lower_bound(keys + run[None, :] * RUN, size, probe, STEPS)
    v = tl.sum(smaller, axis=1)
    in_batch = v < P
    p = (key & 0xFFFFFFFF).to(tl.int32)
    word = tl.load(target + p, mask=in_batch, other=0)
    valid = in_batch & _is_word(word, N, ignore_index)
    tl.store(all_valid + v * 0, 0, mask=in_batch & (valid == 0) & (word != ignore_index))
    tl.store(position + v, p, mask=in_batch)
    tl.store(rank + v, (key >> 32).to(tl.int32), mask=in_batch)
    row = tl.load(row_of_word + word, mask=valid, other=0)
    num_visits = tl.zeros([BLOCK_V], tl.int32)
    for climbed in range(0, D):
        d = D - 1 - climbed
        n = tl.load(node_of_row + row, mask=valid, other=0)
        on_path = valid & (tl.load(level + n, mask=valid, other=0) == d)
        visits = on_path & (tl.load(num_children + n, mask=on_path, other=0) > 1)
        c = row - tl.load(first_row + n, mask=visits, other=0)
        tl.store(node + d * P + v, tl.where(visits, n, -1).to(tl.int32), mask=in_batch)
        tl.store(child + d * P + v, tl.where(visits, c, 0).to(tl.int32), mask=in_batch)
        num_visits += visits.to(tl.int32)
        parent_row = tl.maximum(tl.load(row_of_node + n, mask=on_path, other=0), 0)
        row = tl.where(on_path, parent_row, row)
    tl.store(num_missing + v, num_visits * SPLITS, mask=in_batch)
    tl.store(nll + p, tl.zeros([BLOCK_V], nll.dtype.element_ty), mask=in_batch & (num_visits == 0))


@triton.jit
def _reserve(num_entries, number):
    """Where the entries of each lane, `number` of them, begin in a list."""
    before = tl.cumsum(number, 0) - number
    return tl.atomic_add(num_entries, tl.sum(number, 0), sem="relaxed") + before


@triton.jit
def _append(entries, num_entries, chosen, value):
    place = _reserve(num_entries, chosen.to(tl.int32))
    tl.store(entries + place, value, mask=chosen)


@triton.jit
def _write_entry(entries, place, mask, first, second, third, fourth):
    tl.store(entries + place * 4, first, mask=mask)
    tl.store(entries + place * 4 + 1, second, mask=mask)
    tl.store(entries + place * 4 + 2, third, mask=mask)
    tl.store(entries + place * 4 + 3, fourth, mask=mask)


@triton.jit
def _plan(
    rank, node, preorder, preorder_stop, num_children,
    light_level, visited, num_entries, heavy_tiles, light_nodes, light_groups, row_tiles,
    split_tiles,
    P, D, chunk,
    LIGHT: tl.constexpr, BLOCK_V: tl.constexpr, TILE_V: tl.constexpr, TILE_C: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Heavy or light, and the entries of all lists."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    top = tl.zeros([BLOCK_V], tl.int32) + D
    for d in range(0, D):
        n = tl.load(node + d * P + v, mask=v < P, other=-1)
        visits = n >= 0
        sizes = P + tl.zeros([BLOCK_V], tl.int32)
        begin = tl.load(preorder + n, mask=visits, other=0)
        end = tl.load(preorder_stop + n, mask=visits, other=0)
        start = _lower_bound(rank, sizes, begin, STEPS)
        stop = _lower_bound(rank, sizes, end, STEPS)
        first = visits & (v == start)
        light = visits & (stop - start <= LIGHT)
        heavy = visits & (stop - start > LIGHT)
        tl.store(visited + n, tl.full([BLOCK_V], 1, tl.int8), mask=first)
        flat = d * P + v
        _append(heavy_tiles, num_entries, heavy & ((v - start) % TILE_V == 0), flat)
        _append(light_nodes, num_entries + 1, light & first, flat)
        _append(light_groups, num_entries + 2, light & first & (top == D), flat)
        top = tl.where(light & (top == D), d, top)
        # blocks of children of a node, for each chunk of its visits
        heavy_first = heavy & first
        width = tl.load(num_children + n, mask=heavy_first, other=0).to(tl.int32)
        blocks = tl.cdiv(width, TILE_C)
        chunks = tl.where(heavy_first, tl.cdiv(stop - start, chunk), 0)
        split = chunks > 1
        partial_row = _reserve(num_entries + 5, tl.where(split, chunks * width, 0))
        place = _reserve(num_entries + 3, blocks * chunks)
        split_place = _reserve(num_entries + 4, tl.where(split, blocks, 0))
        for i in range(0, tl.max(blocks * chunks, 0)):
            inside = i < blocks * chunks
            part = i // tl.maximum(blocks, 1)
            c0 = (i - part * blocks) * TILE_C
            row = tl.where(split, partial_row + part * width, -1)
            part_end = tl.minimum(start + (part + 1) * chunk, stop)
            _write_entry(row_tiles, place + i, inside, flat + part * chunk, part_end, c0, row)
            _write_entry(
                split_tiles, split_place + i, inside & split & (i < blocks), flat, chunks, c0, row
            )
    tl.store(light_level + v, top, mask=v < P)
