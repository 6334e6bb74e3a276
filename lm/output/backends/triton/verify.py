"""Whether the fused kernels are right on a device: a tiny problem, compared with the reference.

Compilers and devices differ; kernels that are right on one may be wrong on another. "auto" takes
them only after this comparison, made once per process, device, dtype and precision of products. It
takes about a second, and some more if the kernels are not in Triton's cache yet.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from subprocess import CalledProcessError

import torch
from torch import Tensor

from lm.output.backends.base import Backend, Needs, Problem
from lm.output.backends.reference.backend import ReferenceBackend
from lm.output.backends.triton.tile_shapes import tf32
from lm.output.tree.class_tree import ClassTree

DEVICES = frozenset({"cuda"})
"""Types of devices that are verified: not the interpreter, which takes seconds instead."""
_NUM_WORDS, _NUM_CLASSES, _HIDDEN_SIZE = 3000, 70, 80
_HEAVY_VISITS = 131  # of a class that the kernels of heavy nodes work on, in two tiles
_NAMES = ("nll", "d_hidden", "d_weight", "d_bias")
_differences: dict[tuple[torch.device, torch.dtype, bool], str | None] = {}


def verified(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels' backend agrees with the reference; the first call warns if it does not.

    True for devices that are not verified.

    The comparison runs in a thread of its own and draws from its own generator: it is independent
    of the caller's autocast, autograd, inference mode and tracing, and leaves its random numbers
    as they are. Within `torch.compile` it runs while the caller is traced.

    Raises:
        RuntimeError: if the first call is made while a CUDA graph is captured.
    """
    if device.type not in DEVICES:
        return True
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return True  # the caller asks what would be chosen on another machine
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
    key = (device, dtype, tf32())
    if key not in _differences:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                'backend "auto" verifies the kernels at its first use, which cannot be captured in'
                " a CUDA graph: run a step before the capture"
            )
        with ThreadPoolExecutor(1) as thread:
            _differences[key] = thread.submit(difference, backend, device, dtype).result()
        if _differences[key] is not None:
            warnings.warn(
                f"the fused kernels cannot be used on {device} in {dtype}, and the layer computes"
                f" slowly with the reference backend: {_differences[key]}",
                stacklevel=2,
            )
    return _differences[key] is None


def difference(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """How a backend differs from the reference, or why it does not compile; None if they agree.

    Allowed is twice the error of the reference in the same dtype, both measured from fp64, and 8
    roundings of the largest value.
    """
    from triton.errors import TritonError

    problem, d_nll = tiny_problem(dtype)
    truth = _results(ReferenceBackend(), *_converted(problem, d_nll, "cpu", torch.float64))
    on_device = _converted(problem, d_nll, device, dtype)
    baseline = _results(ReferenceBackend(), *on_device)
    try:
        actual = _results(backend, *on_device)
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, OSError, CalledProcessError) as failure:
        # without a C compiler or an assembler, among others
        return f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
    rounding = 2.0**-10 if dtype == torch.float32 and tf32() else torch.finfo(dtype).eps
    found = []
    for name, true, plain, ours in zip(_NAMES, truth, baseline, actual, strict=True):
        error, usual = (float((x.cpu().double() - true).abs().max()) for x in (ours, plain))
        if not error <= 2 * usual + 8 * rounding * float(true.abs().max()):  # also for NaN
            found.append(f"{name} is off by {error:.2g}, the reference by {usual:.2g}")
    return "; ".join(found) or None


def tiny_problem(dtype: torch.dtype) -> tuple[Problem, Tensor]:
    """A problem with heavy and light nodes and ignored targets, and the gradient of its nll [P].

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

    hidden = normal(len(target), _HIDDEN_SIZE).to(dtype)
    weight = (0.2 * normal(tree.num_rows, _HIDDEN_SIZE)).to(dtype)
    bias = normal(tree.num_rows).to(dtype)
    return Problem.of(hidden, weight, target, tree, bias), normal(len(target))


def _converted(
    problem: Problem, d_nll: Tensor, device: torch.device | str, dtype: torch.dtype
) -> tuple[Problem, Tensor]:
    floats = (problem.hidden, problem.weight, problem.bias)
    hidden, weight, bias = (None if x is None else x.to(device, dtype) for x in floats)
    assert hidden is not None
    assert weight is not None
    arrays = type(problem.tree)(*(array.to(device) for array in problem.tree))
    target = problem.target.to(device)
    moved = problem._replace(hidden=hidden, weight=weight, bias=bias, target=target, tree=arrays)
    return moved, d_nll.to(device, torch.promote_types(dtype, torch.float32))


def _results(backend: Backend, problem: Problem, d_nll: Tensor) -> list[Tensor]:
    """The nll and the dense gradients."""
    needs = Needs(hidden=True, weight=True, bias=True)
    nll, saved = backend.forward(problem, needs)
    gradients = backend.backward(d_nll, problem, saved, needs)
    return [nll, *(gradient for gradient in gradients if isinstance(gradient, Tensor))]
