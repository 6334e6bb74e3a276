"""Time and memory of the output layer and its peers, forward and backward, and their lower bound.

All methods have the same hidden vectors and targets (Zipf: P(w) ∝ 1 / rank). On a CPU each runs
in a process of its own, one after the other, as in a program that has one output layer: next to
others, a method has to map again the memory that they have returned to the system. On a GPU, whose
allocator keeps freed memory, they take turns in one process, except for the peers of other
packages, a fault of which may end the process. A figure is the median over the rounds; compare
ratios, not times. Our methods run with each of --backends, by default the one that
users get, `auto`, and the reference. The methods:

  random     ours, two levels, √N classes of √N words assigned at random: nearly every class is
             visited, as with classes by meaning. "÷ ours" is relative to the first line: to this
             method on the first of --backends, unless it is left out
  blocks     ours, two levels, √N classes of √N words of neighbouring frequency rank
  clustered  as `random`, with classes of uneven sizes (log-normal, at most 4 √N words), as clusters
             of words have
  tree_full  ours, one level: the full softmax
  graph      `random` by triton, its step captured in a CUDA graph: no launch overhead
  full       torch: linear + cross_entropy
  cce        Apple's cut-cross-entropy, on CUDA, if installed
  liger      Liger's fused linear cross-entropy, on CUDA, if installed
  adaptive   torch: AdaptiveLogSoftmaxWithLoss, projections divided by 4 from one cluster to the
             next
  grouped    the classes of `random`, padded to one size, by grouped_mm

Methods that compute the same probabilities must have the same loss: a peer that has another one is
refused, and if one of ours has, nothing is logged. A method that does not fit into the free memory
is refused. Slow methods are timed in every third round. On a GPU every step begins with an idle
device and unrelated data in the L2 cache, so launch overhead counts; on a CPU it begins with the
caches as the step before has left them.

The lower bound (column "÷ floor") is the larger of bytes / bandwidth (each visited row and each
hidden vector read twice, their gradients written once) and multiply–adds / matrix rate (three
products for each position and child on its path); both rates are measured in the same run.
"""

import argparse
import gc
import importlib.util
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lm.commands.arguments import at_least_one
from lm.device import available_bytes, keep_freed_memory
from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends import base, choose_backend
from lm.output.backends.triton.backend import failures
from lm.output.functional import BackendName
from scripts.benchmarks import measure, reporting
from scripts.benchmarks.measure import Work
from scripts.benchmarks.methods import Layer, Method, Problem, split_rows, zipf
from scripts.benchmarks.peers import CUTOFFS, PEERS, installed
from scripts.benchmarks.reporting import Row, Table

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "rows": [(10_000, 300), (33_278, 300), (267_735, 300)],
        "positions": 2048,
        "dtype": "fp32",
    },
    "cuda": {
        "rows": [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)],
        "positions": 16384,
        "dtype": "bf16",
    },
}
TREES: dict[str, Callable[[int], ClassTree]] = {
    "random": lambda n: ClassTree.two_level(torch.randperm(n) % round(math.sqrt(n))),
    "blocks": lambda n: ClassTree.two_level(num_words=n),
    "clustered": lambda n: ClassTree.two_level(uneven_classes(n)),
    "tree_full": ClassTree.full,
}
"""Trees of the methods that are ours, given N."""
COLUMNS = {
    "method": "{label}",
    "milliseconds": "{seconds_median:.3f/1e-3}",
    "÷ ours": "{ratio_to_ours:.2f}",
    "÷ floor": "{ratio_to_floor:.2f}",
    "floor GB": "{floor_bytes:.3f/1e9}",
    "floor GFLOP": "{floor_flops:.2f/1e9}",
    "peak MiB": "{peak_bytes:.1f/1048576}",
    "gradient MiB": "{gradient_bytes:.1f/1048576}",
    "refused": "{refused}",
}


def uneven_classes(vocab_size: int) -> Tensor:
    """Class [N] of each word, one of √N drawn in proportion to log-normal numbers."""
    share = torch.randn(round(math.sqrt(vocab_size))).mul_(0.7).exp_()
    share = share.clamp_(max=4 * float(share.mean()))
    word_class = torch.multinomial(share, vocab_size, replacement=True)
    number: Tensor = torch.unique(word_class, return_inverse=True)[1]
    return number


def ours(problem: Problem, name: str, backend: BackendName, is_graph: bool = False) -> Method:
    """This project's layer on one of the problem's trees."""
    tree, hidden = problem.trees[name], problem.hidden
    sizes = (problem.num_positions, problem.hidden_size)
    posed = base.Problem.without_values(*sizes, tree, hidden.dtype)
    chosen = choose_backend(backend, posed, hidden.device)

    def build() -> Layer:
        ((weight, bias),) = split_rows(problem.rows, problem.bias, 0, tree.num_rows)

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            return hierarchical_cross_entropy(hidden, weight, target, tree, bias, backend=backend)

        return loss, [weight, bias]

    slow = name == "tree_full" or (chosen == "reference" and hidden.is_cuda)
    options: Any = {"tree": tree, "backend": chosen, "slow": slow, "is_graph": is_graph}
    return Method("graph" if is_graph else name, problem, build, **options)


def make_problem(vocab_size: int, hidden_size: int, options: argparse.Namespace) -> Problem:
    """Hidden vectors, targets, trees and weights."""
    torch.manual_seed(1)
    like: dict[str, Any] = {"device": options.device, "dtype": measure.DTYPES[options.dtype]}
    target, _ = zipf(vocab_size, options.positions)
    trees = {
        name: make(vocab_size).to(options.device)
        for name, make in TREES.items()
        if name in {"random", "tree_full", *options.methods}
    }
    num_rows = max(tree.num_rows for tree in trees.values())
    hidden = torch.randn(options.positions, hidden_size, **like)
    return Problem(
        hidden=hidden,
        target=target.to(options.device),
        trees=trees,
        rows=torch.randn(num_rows, base.row_size(hidden_size), **like).mul_(0.05),
        bias=torch.randn(num_rows, **like).mul_(0.05),
        cutoffs=CUTOFFS.get(vocab_size) or [max(1, vocab_size // 10), vocab_size // 3],
    )


def make_methods(problem: Problem, options: argparse.Namespace) -> list[Method]:
    """The methods of --methods, ours first."""
    methods = [
        ours(problem, name, backend)
        for backend in options.backends
        for name in TREES
        if name in options.methods
    ]
    fused = any(method.backend == "triton" for method in methods)
    if fused and problem.hidden.is_cuda:
        methods += [ours(problem, "random", "triton", is_graph=True)] * ("graph" in options.methods)
    return methods + [make(problem) for name, make in PEERS.items() if name in options.methods]


def attempt(method: Method, action: Callable[[Method], None]) -> None:
    """Run an action unless the method is refused; refuse it if memory does not suffice or it fails.

    An error of this project's layer is raised, unless triton does not support the tree.
    """
    refusable: tuple[type[Exception], ...] = (ValueError,) * (method.backend == "triton")
    if method.backend == "torch":  # a package may not suit a version of torch or Triton
        refusable = RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError
        refusable += failures() if importlib.util.find_spec("triton") else ()
    try:
        if not method.refused:
            action(method)
    except (RuntimeError, MemoryError, OSError, *refusable) as error:  # type: ignore[misc]
        if measure.is_out_of_memory(error):
            method.refuse("does not fit into memory")
        elif isinstance(error, refusable):
            first, *_ = [*str(error).splitlines(), ""]
            method.refuse(f"failed: {type(error).__name__}: {first}")
        else:
            raise


def warm_up(method: Method) -> None:
    """Make the parameters, run one or two steps and measure the memory of the last."""
    method.prepare()
    if not (method.slow or method.is_graph):  # a graph allocates at its capture
        method.step()
        method.free()
    method.peak_bytes = measure.peak_bytes(method)
    method.free()


def check_losses(rows: list[Row]) -> None:
    """Compare the losses of rows with the same tree; a peer that differs is refused.

    Raises SystemExit if one of ours differs.
    """
    firsts: dict[str, Row] = {}
    for row in rows:
        if row["tree"] and not row["refused"]:
            first = firsts.setdefault(row["tree"], row)
            dtype = measure.DTYPES[row["dtype"]]
            if not abs(row["loss"] - first["loss"]) <= measure.TOLERANCE[dtype] * first["loss"]:
                found = (
                    f"loss of {row['label']} is {row['loss']}, of {first['label']} {first['loss']}"
                )
                if row["backend"] != "torch":
                    raise SystemExit(found)
                row |= dict.fromkeys(measure.FIGURES) | {"refused": found}


def compare(size: tuple[int, int], peak: Work, options: argparse.Namespace) -> list[Row]:
    """A row for each method on one problem of `size` (N, H); the results are also printed."""
    chosen = options.methods
    if options.device.type == "cuda":
        separate = [name for name in chosen if installed(name)]
        together = [name for name in chosen if name not in separate]
        some = argparse.Namespace(**vars(options) | {"methods": together})
        rows = measured(size, peak, some)
        gc.collect()  # the problem, for the memory of the other processes
        torch.cuda.empty_cache()
    else:
        separate = [name for name in PEERS if name in chosen]
        each = [(name, backend) for backend in options.backends for name in TREES]
        rows = [alone(size, peak, *pair, options) for pair in each if pair[0] in chosen]
    check_losses(rows)
    own = next((row for row in rows if row["backend"] != "torch" and not row["refused"]), None)
    print(f"\nN = {size[0]:,}, H = {size[1]}, {options.positions:,} positions")
    printed = Table(COLUMNS, options.json, options.device.type)

    def add(row: Row) -> None:
        ratio = own and row["seconds_median"] and row["seconds_median"] / own["seconds_median"]
        printed.add(row | {"ours": own and own["label"], "ratio_to_ours": ratio})

    for row in rows:
        add(row)
    for name in separate:
        rows.append(alone(size, peak, name, options.backends[0], options))
        check_losses(rows)
        add(rows[-1])
    return printed.rows


def alone(
    size: tuple[int, int], peak: Work, name: str, backend: str, options: argparse.Namespace
) -> Row:
    """The row of one method, measured in a new process; a peer that ends it is refused."""
    one = argparse.Namespace(**vars(options) | {"methods": [name], "backends": [backend]})
    rows, exit_code = measure.in_new_process(measured, size, peak, one)
    if rows:
        return rows[0]
    if name in TREES:
        raise SystemExit(f"output_layer: {name} ended with exit code {exit_code}")
    sizes = {"vocab_size": size[0], "hidden": size[1], "positions": options.positions}
    refused = {"refused": f"its process ended with exit code {exit_code}", "tree": None}
    names = {"method": name, "backend": "torch", "label": name, "dtype": options.dtype}
    return sizes | names | refused | dict.fromkeys(measure.FIGURES)


def measured(size: tuple[int, int], peak: Work, options: argparse.Namespace) -> list[Row]:
    """A row for each method, measured in this process, the slow ones in every third round."""

    def time_step(method: Method) -> None:
        method.seconds.append(measure.step_seconds(method.step, options.device))
        method.free()

    prepare_process(options)
    on_gpu = options.device.type == "cuda"
    available = math.inf if on_gpu else available_bytes(options.device) or math.inf
    with measure.memory_limit(available, options.device):
        problem = make_problem(*size, options)
        methods = make_methods(problem, options)
        for method in methods:
            attempt(method, warm_up)
        for turn, method in product(range(options.rounds), methods):
            if not (method.slow and turn % 3):
                attempt(method, time_step)
    rows = [measure.make_row(method, peak) | {"dtype": options.dtype} for method in methods]
    for method, row in zip(methods, rows, strict=True):
        if on_gpu and method.backend == "triton" and not method.refused:
            found = None if method.is_graph else measure.kernels(method.step, method.free)
            row["kernels"] = found
    return rows


def parse_options() -> argparse.Namespace:
    """Options of the command line, with the defaults of the device."""
    parser = reporting.benchmark_parser(__doc__)
    add = parser.add_argument
    names = [*TREES, "graph", *PEERS]
    add("--rows", type=reporting.problem_size, nargs="+", metavar="N:H", help="words, hidden size")
    add("--positions", type=at_least_one, help="2048 on a CPU, 16384 on a GPU")
    add("--dtype", choices=measure.DTYPES, help="fp32 on a CPU, bf16 on a GPU")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--methods", nargs="+", choices=names, default=names, metavar="NAME", help="default: all")
    backends = ["auto", "compiled", "reference", "triton"]
    of = "of our methods"
    add("--backends", nargs="+", choices=backends, default=["auto", "reference"], help=of)
    add("--rounds", type=at_least_one, default=9)
    add("--threads", type=at_least_one, help="CPU threads")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.device = torch.device(options.device)
    return options


def prepare_process(options: argparse.Namespace) -> None:
    """Set threads and the allocator as training does."""
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()


def main() -> None:
    """Print a table for each problem, and write a log if asked."""
    options = parse_options()
    prepare_process(options)
    peak = measure.best_rates(options.device, measure.DTYPES[options.dtype])
    print(
        f"{reporting.environment(options.device.type)['device']}, {options.dtype}: copy"
        f" {peak.bytes / 1e9:.1f} GB/s, matrix product {peak.flops / 1e12:.3f} TFLOP/s"
    )
    for size in options.rows:
        compare(size, peak, options)


if __name__ == "__main__":
    main()
