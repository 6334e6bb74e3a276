"""Repeat a step of the layer and compare its results bit for bit with those of the first.

Kernels that read a register or shared memory too early are right or wrong by timing, and a few runs
may all be right. Here every step computes the nll and all gradients by the fused kernels; on a GPU
unrelated copies on another stream vary the timing. The exit code is 1 if a step differs.
"""

import argparse
import sys
import time

import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import row_size
from scripts.benchmarks.kernel_compilation import random_classes
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.reporting import (
    Row,
    Table,
    benchmark_parser,
    problem_size,
    require_positive,
)

COLUMNS = {
    "N": "{vocab_size:,}",
    "H": "{hidden_size}",
    "steps": "{steps}",
    "steps that differ": "{differing}",
    "seconds": "{seconds:.1f}",
}


def step(inputs: list[Tensor], target: Tensor, tree: ClassTree, upstream: Tensor) -> list[Tensor]:
    """The nll of every position, and the gradients of hidden, weight and bias."""
    hidden, weight, bias = inputs
    nll = hierarchical_cross_entropy(
        hidden, weight, target, tree, bias, reduction="none", backend="triton"
    )
    return [nll.detach(), *torch.autograd.grad(nll, inputs, upstream)]


def repeat(vocab_size: int, hidden_size: int, options: argparse.Namespace) -> Row:
    """How many of the steps differ from the first, with Zipf targets in random classes."""
    torch.manual_seed(0)
    device, positions, steps = options.device, options.positions, options.steps
    tree = random_classes(vocab_size).to(device)
    target = zipf(vocab_size, positions)[0].to(device)
    rows = (tree.num_rows, row_size(hidden_size))
    shapes = ((positions, hidden_size), rows, rows[:1])
    inputs = [
        torch.randn(shape, device=device).mul_(0.3).to(DTYPES[options.dtype]) for shape in shapes
    ]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    upstream = torch.randn(positions, device=device)
    first = step(inputs, target, tree, upstream)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    begin = time.perf_counter()
    on_gpu = device == "cuda"
    side = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
    unrelated = torch.zeros(1 << (24 if on_gpu else 0), device=device)
    for turn in range(steps):
        if side is not None and turn % 2:
            with torch.cuda.stream(side):
                unrelated.add_(1)
        again = step(inputs, target, tree, upstream)
        equal = [(a == b).all() for a, b in zip(first, again, strict=True)]
        differing += ~torch.stack(equal).all()
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "steps": steps,
        "differing": int(differing),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    """Print a row for each size, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", default=[(33_278, 650), (33_278, 300)])
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: interpreted")
    add("--steps", type=int, default=1000)
    options = parser.parse_args()
    require_positive(parser, options, ["positions", "steps"])
    table = Table(COLUMNS, options.json, options.device)
    for vocab_size, hidden_size in options.rows:
        table.add(repeat(vocab_size, hidden_size, options))
    sys.exit(any(row["differing"] for row in table.rows))


if __name__ == "__main__":
    main()
