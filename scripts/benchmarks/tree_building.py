"""Time and peak memory of building trees, each in a new process.

Peak memory is the operating system's figure for the process, PyTorch included.
"""

import resource
import sys
import time
from typing import Any

import torch

from lm.output import ClassTree
from scripts import run
from scripts.benchmarks.class_building import in_new_process
from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive

SHAPES = ("from_levels", "from_paths", "from_clusters", "huffman", "balanced")


def binary_levels(num_words: int, depth: int) -> torch.Tensor:
    """Classes of classes of two each, [depth - 1, N], over shuffled words."""
    place = torch.randperm(num_words, generator=torch.Generator().manual_seed(0))
    bits = torch.arange(depth - 2, -1, -1)[:, None]
    levels: torch.Tensor = (place * 2 ** (depth - 1) // num_words) >> bits & 1
    return levels


def nested(low: int, high: int, depth: int) -> list[Any]:
    """Nested lists of the words from `low` on, of nodes with two children."""
    if depth == 1 or high - low < 2:
        return list(range(low, high))
    middle = (low + high) // 2
    return [nested(low, middle, depth - 1), nested(middle, high, depth - 1)]


def measure(shape: str, num_words: int, depth: int) -> dict[str, Any]:
    """Seconds, peak memory and sizes of one shape, in this process."""
    given: Any
    if shape == "from_levels":
        given = (binary_levels(num_words, depth),)
    elif shape == "from_paths":
        levels = binary_levels(num_words, depth)
        given = (torch.cat([levels, torch.arange(num_words)[None]]).T.tolist(),)
    elif shape == "from_clusters":
        given = (nested(0, num_words, depth),)
    elif shape == "huffman":
        given = (1_000_000_000 // torch.arange(1, num_words + 1),)
    else:
        given = (num_words, 2)
    start = time.perf_counter()
    tree = getattr(ClassTree, shape)(*given)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, bytes on macOS
    return {
        "shape": shape,
        "vocab_size": num_words,
        "depth": tree.depth,
        "num_nodes": tree.num_nodes,
        "seconds": round(seconds, 1),
        "peak_mib": round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)),
    }


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--words", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=20, help="of trees given by classes or paths")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    options = parser.parse_args()
    require_positive(parser, options, ["words", "depth"])
    table = Table(log=options.json)
    for shape in options.shapes:
        table.add(in_new_process(measure, shape, options.words, options.depth))


if __name__ == "__main__":
    run(main)
