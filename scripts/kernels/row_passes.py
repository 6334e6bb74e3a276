"""Bytes from and to memory of a step of row-wise training, with gradients in memory and without.

Every element counts once in each pass: a launch, or an operation of the optimizer. The rows are
those of visited nodes, in a tree of two levels with √N classes and words assigned at random, for
inverse-rank targets. Nothing is measured. Copies that the optimizer makes of indexed rows, where
gradients are in memory, are not counted; nor are the routing and what stays in caches.
"""

import torch

from lm.output.backends.base import row_size
from lm.output.backends.triton.launch import SLOT
from lm.output.backends.visits import route
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size
from scripts.kernels.compilation import make_problem

SINGLE = 4
"""Bytes of a number of gradients in memory and of an optimizer's state."""
STATE = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0}
"""Numbers of state: of each row for Adagrad, of each number of a row for Adam."""


def passes(
    vocab_size: int, hidden_size: int, num_positions: int, dtype: torch.dtype, optimizer: str
) -> dict[str, tuple[float, float]]:
    """Bytes of every pass with gradients in memory and without, by what it reads or writes.

    Hidden vectors are in bf16, rows in a dtype.
    """
    problem = make_problem(vocab_size, 8, num_positions)  # the same tree for any size
    node = route(problem.target, problem.tree, problem.depth, problem.ignore_index).node
    width = problem.tree.num_children
    num_rows = float(width[torch.unique(node[node >= 0])].sum())
    slots = float((-(-width[node[node >= 0]] // SLOT) * SLOT).sum())
    columns = row_size(hidden_size)
    factors = 2 * slots + 2.0 * num_positions * (-(-hidden_size // SLOT) * SLOT)
    rows, gradients = (num_rows * columns * size for size in (dtype.itemsize, SINGLE))
    state = 2 * SINGLE * num_rows * (columns if optimizer == "adam" else STATE[optimizer])
    state *= 2 if optimizer == "adam" else 1
    squares = num_rows * SINGLE
    return {
        "forward: rows read": (rows, rows),
        "backward: rows read for d_hidden": (rows, rows),
        "gradients: factors read": (factors, 0),
        "gradients written": (gradients, 0),
        "norm: gradients read": (gradients, 0),
        "norm: factors read, norms of rows written": (0, factors + squares),
        "update: gradients read": (gradients, 0),
        "update: factors and norms of rows read": (0, factors + squares * (optimizer == "adagrad")),
        "update: rows read": (rows, rows),
        "update: rows written": (rows, rows),
        "update: state read and written": (state, state),
    }


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, default=(10_000_000, 300), metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=DTYPES, default="fp32", help="of rows; default: %(default)s")
    add("--optimizer", choices=STATE, default="adagrad")
    options = parser.parse_args()
    dtype = DTYPES.get(options.dtype, torch.float32)
    vocab_size, hidden_size = options.rows
    found = passes(vocab_size, hidden_size, options.positions, dtype, options.optimizer)
    found["total"] = tuple(map(sum, zip(*found.values(), strict=True)))  # type: ignore[assignment]
    table = Table(log=options.json)
    for name, (before, after) in found.items():
        gb = {"in_memory_gb": round(before / 1e9, 3), "in_registers_gb": round(after / 1e9, 3)}
        table.add({"pass": name, **gb})


if __name__ == "__main__":
    main()
