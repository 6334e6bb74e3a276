"""A second-level cache that the loads and stores of the fused kernels are played through.

The cache evicts the least recently used line; what misses it must come from memory. As many
programs run concurrently as fit on a GPU, and each in turn makes one load or store. Every launch
begins with an empty cache. A line is `granule` neighbouring rows of one portion of columns; a line
of which a tile touches a part is read as a whole.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import NamedTuple


class Access(NamedTuple):
    """One load or store of rows begin … end of a tensor."""

    tensor: int
    begin: int
    end: int
    portion: int  # of columns
    row_bytes: int  # of a row of the portion


Programs = Sequence[Sequence[Access]]
"""What each program of a launch loads and stores."""


def in_turns(programs: Programs, num_concurrent: int) -> Iterator[Access]:
    """The accesses of concurrent programs in turn; the next program replaces one that is done."""
    waiting = iter(programs)
    slots = [
        chain.from_iterable(chain([first], waiting)) for first in islice(waiting, num_concurrent)
    ]
    return filter(None, chain.from_iterable(zip_longest(*slots)))


def missed_bytes(programs: Programs, capacity: int, num_concurrent: int, granule: int) -> int:
    """Bytes of a launch that miss a cache of `capacity` bytes with lines of `granule` rows."""
    cache: OrderedDict[tuple[int, int, int], int] = OrderedDict()  # line → bytes, oldest use first
    used = missed = 0
    for tensor, begin, end, portion, row_bytes in in_turns(programs, num_concurrent):
        size = row_bytes * granule
        for row in range(begin // granule, (end - 1) // granule + 1):
            line = tensor, row, portion
            if line in cache:
                cache.move_to_end(line)
                continue
            missed += size
            if size <= capacity:
                cache[line] = size
                used += size
            while used > capacity:
                used -= cache.popitem(last=False)[1]
    return missed
