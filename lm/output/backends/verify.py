"""Whether compiled code is right on a device: a tiny problem, compared with the reference.

Compilers and devices differ; code that is right on one may be wrong on another. "auto" takes a
backend only after this comparison, made once per process, device and `Kind` of problem. It takes
about a second, and some more if the code is not in the compiler's cache yet.
"""

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Backend, Needs, Problem
from lm.output.backends.reference import ReferenceBackend
from lm.output.inputs import compute_dtype
from lm.output.rowwise.factors import Rule
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.tracing import is_captured, without_replaced_functions
from lm.output.tree.class_tree import ClassTree

PATIENCE = 2.0
"""Seconds that a comparison takes at most where nothing is compiled, on most machines."""
_log = logging.getLogger(__name__)
_NUM_WORDS, _NUM_CLASSES, _LEAST_SIZE = 3000, 70, 80
_HEAVY_VISITS = 131  # of a class that the kernels of heavy nodes work on, in two tiles
_NAMES = ("nll", "d_hidden", "d_weight", "d_bias", "row-wise step")


class Kind(NamedTuple):
    """What code is compiled for, besides sizes."""

    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype
    hidden_align: int = 16  # see `lm.output.backends.triton.plan.alignment`
    weight_align: int = 16
    tf32: bool = False  # whether products of fp32 numbers round them


Failures = tuple[type[Exception], ...]
"""What compiling and running code raises where it does not work."""
_differences: dict[tuple[str, torch.device, Kind], str | None] = {}


def verified(
    backend: Backend, device: torch.device, kind: Kind, failures: Callable[[], Failures]
) -> bool:
    """Whether a backend agrees with the reference, see `is_right`."""
    return is_right(f"backend {backend.name}", device, kind, partial(difference, backend), failures)


def is_right(
    what: str,
    device: torch.device,
    kind: Kind,
    comparison: Callable[[torch.device, Kind], str | None],
    failures: Callable[[], Failures],
) -> bool:
    """Whether a comparison finds nothing wrong on a device; the first call warns if it does.

    The comparison draws from its own generator and leaves random numbers as they are. Within
    `torch.compile` it runs while the caller is traced. `what` names the code, for the warning.

    Raises:
        RuntimeError: if the first call is made while a CUDA graph is captured.
    """
    if device.type == "cuda" and (what, device, kind) not in _differences:
        if not torch.cuda.is_available():
            return True  # the caller asks what would be chosen on another machine
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
    key = (what, device, kind)
    if key not in _differences:
        if is_captured(device):
            raise RuntimeError(
                f"{what} is verified at its first use, which cannot be captured in a CUDA graph:"
                " run a step before the capture"
            )
        text = f"the output layer ({what})"
        _differences[key] = result_of(partial(comparison, device, kind), text, failures)
        if _differences[key] is not None:
            warnings.warn(
                f"{what} cannot be used on {device} in {kind.hidden} with rows in {kind.weight},"
                " and the output layer is slow, with operations of PyTorch instead:"
                f" {_differences[key]}",
                stacklevel=2,
            )
    return _differences[key] is None


def result_of(
    comparison: Callable[[], str | None], what: str, failures: Callable[[], Failures]
) -> str | None:
    """What a comparison returns, or why there is no compiler or the code does not compile.

    It runs in a thread of its own, independent of the caller's autocast, autograd, inference mode,
    default device and tracing. `failures` imports the compiler.
    """
    with compiling(what), without_replaced_functions(), ThreadPoolExecutor(1) as thread:
        expected: Failures = (ImportError,)
        try:
            expected += failures()
            return thread.submit(comparison).result()
        except torch.OutOfMemoryError:
            raise
        except expected as failure:
            return f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Log a line if the block takes longer than it does with code that is in a compiler's cache.

    It may also be that this computer is busy.
    """
    text = (
        "loading the compiled code of %s, or compiling it: 10 to 30 seconds, once on this computer"
        " for each precision and size, unless the folder of the compiler's cache cannot be written"
    )
    timer = threading.Timer(PATIENCE, _log.info, (text, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def difference(backend: Backend, device: torch.device, kind: Kind) -> str | None:
    """How a backend differs from the reference; None if they agree.

    Allowed is twice the error of the reference in the same dtypes, both measured from fp64, and 8
    roundings of the largest value. Random numbers that are drawn do not count: training that a new
    process continues verifies again.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        target, problem, d_nll = tiny_problem(kind)
        truth = _results(ReferenceBackend(), target, problem.to("cpu", torch.float64), d_nll)
        given = target.to(device), problem.to(device), d_nll
        baseline, actual = (_results(b, *given) for b in (ReferenceBackend(), backend))
    rounds = kind.hidden == torch.float32 and kind.tf32
    rounding = 2.0**-10 if rounds else torch.finfo(kind.hidden).eps
    found = []
    for name, true, plain, ours in zip(_NAMES, truth, baseline, actual, strict=True):
        error, usual = (float((x.cpu().double() - true).abs().max()) for x in (ours, plain))
        if not error <= 2 * usual + 8 * rounding * float(true.abs().max()):  # also for NaN
            found.append(f"{name} is off by {error:.2g}, the reference by {usual:.2g}")
    return "; ".join(found) or None


def tiny_problem(kind: Kind) -> tuple[Tensor, Problem, Tensor]:
    """Targets that visit heavy and light nodes or are ignored, the problem, the gradient d_nll [P].

    Classes have 1 to 85 words: some fill no block of children and some more than one. The root has
    so many visits that they are shared among programs.
    """
    generator = torch.Generator().manual_seed(0)
    word = torch.arange(_NUM_WORDS)
    word_class = (_NUM_CLASSES * (word / _NUM_WORDS).sqrt()).long()
    tree = ClassTree.two_level(word_class)
    place = torch.arange(_HEAVY_VISITS)
    heavy = [word[word_class == c][place % int((word_class == c).sum())] for c in (30, 69)]
    target = torch.cat([*heavy, word[::8], torch.full((5,), -100)])
    target = target[torch.randperm(len(target), generator=generator)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    size = _aligned(_LEAST_SIZE, kind.hidden_align)
    hidden = normal(len(target), size).to(kind.hidden)
    weight = 0.2 * normal(tree.num_rows, _aligned(size, kind.weight_align))
    bias = normal(tree.num_rows).to(kind.bias)
    # without the check of `Problem.of`, which refuses wider rows outside of autocast
    problem = Problem.of(hidden.float(), weight, tree, bias.float())
    problem = problem._replace(hidden=hidden, weight=weight.to(kind.weight), bias=bias)
    return target, problem, normal(len(target))


def _aligned(least: int, align: int) -> int:
    """The least number from `least` on that `alignment` finds divided by `align`."""
    return next(size for size in range(least, least + 32) if math.gcd(size, 16) == align)


def _results(backend: Backend, target: Tensor, problem: Problem, d_nll: Tensor) -> list[Tensor]:
    """The nll, the dense gradients, and the rows after a step with row-wise ones."""
    needs = Needs(hidden=True, weight=True, bias=True)
    nll, _, saved = backend.nll(target, problem, needs)
    d_nll = d_nll.to(nll)
    gradients = backend.backward(d_nll, problem, saved, needs)
    needs = Needs(hidden=False, weight=True, bias=False, row_wise=True)
    _, _, saved = backend.nll(target, problem, needs)
    d_weight = backend.backward(d_nll, problem, saved, needs).d_weight
    assert isinstance(d_weight, RowGradient)
    table = _after_step(problem.weight.clone(), d_weight)
    return [nll, *(gradient for gradient in gradients if isinstance(gradient, Tensor)), table]


def _after_step(table: Tensor, gradient: RowGradient) -> Tensor:
    """The rows after a first step of `RowAdagrad`, whose class would import `torch.compile`."""
    lr, eps = 0.1, 1e-8
    total = table.new_zeros(len(table), dtype=compute_dtype(table.dtype))
    gradient.norm()  # which the update then takes row by row, as after clipping
    for block in gradient.factors.update(table, Rule("adagrad", (lr, eps), {"total": total})):
        root = (block.square_norms() / table.shape[1]).sqrt()
        table[block.rows] -= lr * block.values() / (root + eps)[:, None]
    return table
