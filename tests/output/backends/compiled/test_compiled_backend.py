"""Compiled loops: sizes, roundings, threads, and what "auto" does where they do not work."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends import BACKENDS, choose_backend, verify
from lm.output.backends.base import Backend, Gradients, Needs, Problem
from lm.output.backends.compiled import (
    backend,
    columns,
    compilation,
    division,
    draw_loops,
    factors,
    node_loops,
    routing,
    row_loops,
    search_loops,
    vectors,
)
from lm.output.backends.compiled.backend import CompiledBackend
from lm.output.backends.visits import route

from ...definition import TREES, assert_errors_are_small, gradients, nll, problem, two_level

CPU = torch.device("cpu")
ALL = Needs(hidden=True, weight=True, bias=True)
all_sizes = pytest.mark.parametrize(
    ("size", "num_words", "num_classes", "num_positions"),
    [
        (1, 7, 3, 5),
        (17, 91, 4, 201),
        (33, 299, 2, 70),
        (64, 300, 150, 90),
        (304, 5000, 70, 150),  # the gradient is larger than `CACHE_BYTES`
        (301, 9000, 90, 150),  # and rows begin within a line of a cache
        (2100, 1500, 30, 90),
    ],
)


@all_sizes
def test_results_are_those_of_the_reference_for_all_sizes_of_tiles(
    size: int, num_words: int, num_classes: int, num_positions: int
) -> None:
    tree = two_level(num_words, num_classes)
    *inputs, target = problem(tree, num_positions, size=size)
    upstream = torch.randn(num_positions, dtype=torch.float64)
    expected = gradients(inputs, target, tree, upstream, "reference")
    for dtype in (torch.float64, torch.float32):
        like = [tensor.to(dtype) for tensor in inputs]
        actual = gradients(like, target, tree, upstream.to(dtype), "compiled")
        for ours, true in zip(actual, expected, strict=True):
            difference = (ours - true).abs().max()
            assert difference <= 40 * torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@all_sizes
def test_products_of_bf16_numbers_are_as_exact_as_those_of_pytorch(
    size: int,
    num_words: int,
    num_classes: int,
    num_positions: int,
    dtype: torch.dtype,
    has_instructions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hidden vectors are in bf16, rows and biases in `dtype`; plain torch has all in bf16."""
    monkeypatch.setattr(vectors, "HAS_BF16", vectors.HAS_BF16 and has_instructions)
    tree = two_level(num_words, num_classes)
    hidden, *parameters, target = problem(tree, num_positions, size=size, dtype=torch.float32)
    inputs = [hidden.bfloat16(), *(tensor.to(dtype) for tensor in parameters)]
    upstream = torch.randn(num_positions, dtype=torch.float64)
    true = gradients([x.double() for x in inputs], target, tree, upstream, "reference")
    plain = [x.bfloat16() for x in inputs]
    base = gradients(plain, target, tree, upstream, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(inputs, target, tree, upstream, "compiled")
    assert_errors_are_small([actual, base, true], slack=torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("num_words", [11, 12, 13, 150])
@pytest.mark.parametrize("num_positions", [31, 32, 33, 64, 95])
def test_many_visits_of_a_node_have_the_results_of_few(num_positions: int, num_words: int) -> None:
    """From 32 visits and 12 children on, and with fewer, which are computed in another order."""
    tree = ClassTree.full(num_words)
    *inputs, target = problem(tree, num_positions, size=37, dtype=torch.bfloat16)
    upstream = torch.randn(num_positions)
    together = gradients(inputs, target, tree, upstream, "compiled")
    hidden, *parameters = inputs
    parts = [
        gradients([hidden[part], *parameters], target[part], tree, upstream[part], "compiled")
        for part in torch.split(torch.arange(num_positions), 9)
    ]
    nll, d_hidden, *sums = zip(*parts, strict=True)
    torch.testing.assert_close(together[0], torch.cat(nll), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[1], torch.cat(d_hidden), rtol=0.01, atol=0.01)
    for ours, theirs in zip(together[2:], sums, strict=True):
        torch.testing.assert_close(ours, sum(theirs), rtol=0.05, atol=0.05)


def test_errors_that_are_read_row_by_row_are_not_in_blocks() -> None:
    assert factors.FORMED_VISITS <= columns.BLOCK


def test_a_visit_without_numbers_leaves_the_others_as_they_are() -> None:
    tree = ClassTree.full(40)
    *inputs, target = problem(tree, 70, size=16, dtype=torch.bfloat16)
    hidden, *parameters = (tensor.detach() for tensor in inputs)
    broken = hidden.clone()
    broken[[3, 40, 69]] = torch.nan
    upstream, others = torch.ones(70), torch.ones(70).bool()
    others[[3, 40, 69]] = False
    found = (
        gradients([x, *parameters], target, tree, upstream, "compiled")[:2]
        for x in (hidden, broken)
    )
    for whole, actual in zip(*found, strict=True):
        assert torch.equal(whole[others], actual[others])
        assert actual[~others].isnan().all()


def test_exp_is_right_to_two_roundings_down_to_the_smallest_numbers() -> None:
    """The error of a word is its probability: exp of its logit, as the other one's is 0."""
    logit = -torch.linspace(0, 120, 4001)
    tree, weight = ClassTree.full(2), torch.tensor([[0.0], [1.0]])
    hidden, target = logit[:, None].requires_grad_(), torch.zeros(4001, dtype=torch.int64)
    loss = hierarchical_cross_entropy(
        hidden, weight, target, tree, reduction="sum", backend="compiled"
    )
    loss.backward()  # type: ignore[no-untyped-call]
    exact = torch.sigmoid(logit.double())
    assert hidden.grad is not None
    error = (hidden.grad[:, 0] - exact).abs()
    normal = exact > 2e-38
    assert (error[normal] <= 2 * torch.finfo(torch.float32).eps * exact[normal]).all()
    assert (hidden.grad[exact < 1e-39] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_in_low_precision_is_rounded_once_to_nearest(dtype: torch.dtype) -> None:
    tree = two_level(300, 7)
    *floats, target = problem(tree, 200, size=40, dtype=torch.float32)
    hidden, weight, bias = (tensor.detach() for tensor in floats)
    weight, bias = weight.to(dtype), bias.to(dtype)
    d_nll = torch.randn(200)
    d_nll[5] = torch.nan
    low = Problem.of(hidden, weight, target, tree, bias)
    high = low._replace(weight=weight.float(), bias=bias.float())
    rounded, exact = (_gradients(each, d_nll) for each in (low, high))
    for ours, true in zip(rounded[1:], exact[1:], strict=True):
        assert isinstance(ours, Tensor)
        assert isinstance(true, Tensor)
        torch.testing.assert_close(ours, true.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert isinstance(exact.d_weight, Tensor)
    assert exact.d_weight.isnan().any()


def _gradients(solved: Problem, d_nll: Tensor) -> Gradients:
    """As the backend gives them."""
    compiled: Backend = BACKENDS["compiled"]
    _, saved = compiled.forward(solved, ALL)
    return compiled.backward(d_nll, solved, saved, ALL)


@pytest.fixture(params=["OpenMP's threads", "others"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What divides work: the threads of PyTorch's OpenMP library, or without it others."""
    if request.param == "others":
        monkeypatch.setattr(division, "_openmp", lambda _: None)
    elif sys.platform != "linux" or {"OMP_THREAD_LIMIT", "OMP_DYNAMIC"} & os.environ.keys():
        pytest.skip("on Linux, with as many threads as asked for")
    return str(request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "LEAST_COLUMNS", 0)
    tree = ClassTree.balanced(3000, 12)
    *inputs, target = problem(tree, 333, size=37, dtype=dtype)
    upstream, before = torch.randn(333), torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            found.append(gradients(inputs, target, tree, upstream, "compiled"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("tree", [*TREES.values(), ClassTree.two_level(torch.arange(70_000) // 2)])
def test_visits_are_those_of_the_reference(tree: ClassTree) -> None:
    """Ranks of the last tree's nodes have three digits."""
    hidden, weight, bias, target = problem(tree, 300)
    solved = Problem.of(hidden, weight, target, tree, bias)
    saved = CompiledBackend()._with_visits(solved, ALL)
    expected = route(target, tree.arrays, tree.depth, -100)
    for ours, theirs in zip(saved, expected, strict=False):
        assert torch.equal(ours, theirs)


def test_parts_run_side_by_side_and_hold_nothing_afterwards(threads: str) -> None:
    class Argument:
        pass

    barrier, parts, names = threading.Barrier(3, timeout=60), [], set()

    def loops(nodes: object, begin: int, end: int, argument: Argument) -> None:
        barrier.wait()
        parts.append((begin, end))
        names.add(threading.current_thread().name.split("_")[0])

    argument = Argument()
    reference = weakref.ref(argument)
    gc.disable()
    try:
        division.divide([0, 4, 5, 9], loops, np.empty(0), argument)
        del argument
        assert reference() is None
    finally:
        gc.enable()
    assert sorted(parts) == [(0, 4), (4, 5), (5, 9)]
    assert ("sqrtlm" in names) == (threads == "others")


def test_parts_that_no_thread_took_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    monkeypatch.setattr(division, "_in_threads", lambda *_: None)
    division.divide([0, 4, 5], lambda _, *part: parts.append(part), np.empty(0))
    assert parts == [(0, 4), (4, 5)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_any_thread_is_raised(failing: int) -> None:
    def loops(nodes: object, begin: int, end: int) -> None:
        if begin == failing:
            raise KeyboardInterrupt(begin)

    with pytest.raises(KeyboardInterrupt, match=str(failing)):
        division.divide([0, 1, 2, 3], loops, np.empty(0))


@pytest.mark.usefixtures("threads")
def test_no_interrupt_is_lost() -> None:
    """A signal is handled at any time; without its error all parts have run."""
    parts, raised, num = [], 0, 200

    def loops(nodes: object, begin: int, end: int) -> None:
        time.sleep(5e-4)
        parts.append(begin)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(num):
            try:
                parts.clear()
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 20 * 3e-5)
                division.divide([0, 1, 2, 3, 4], loops, np.empty(0))
                assert sorted(parts) == [0, 1, 2, 3]
                for _ in range(1000):  # another thread may have got the signal
                    time.sleep(1e-3)
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised == num


def test_threads_divide_the_work_evenly() -> None:
    """Of a root with many visits and of classes with few, by rows."""
    classes = [(10 * c, 10 * (c + 1), 50 + 40 * c, 40, 0, 1) for c in range(50)]
    nodes = np.array([(0, 500, 0, 50, 0, 0), *classes])
    cost = torch.cat([torch.full((50,), 500), torch.full((2000,), 10)]) + division.ROW_VISITS
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        bounds = division.bounds_of(nodes, 2050, by_rows=True)
    finally:
        torch.set_num_threads(before)
    parts = [int(cost[start:end].sum()) for start, end in pairwise(bounds)]
    assert sum(parts) == cost.sum()
    assert max(parts) <= 1.05 * cost.sum() / 3


def _loss_in_child(queue: "multiprocessing.Queue[float]") -> None:
    torch.set_num_threads(2)
    queue.put(_loss())


def _loss() -> float:
    torch.manual_seed(1)
    tree = two_level(4000, 60)
    *inputs, target = problem(tree, 600, dtype=torch.float32)
    return float(nll([*inputs, target], tree, reduction="mean", backend="compiled").detach())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # OpenMP's would not survive a fork
    expected, context = _loss(), multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(_loss()))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join()


def test_without_numba_auto_warns_and_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_numba", lambda: False)
    example = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    with pytest.warns(UserWarning, match="slowly on cpu: .* requires the package numba"):
        assert choose_backend("auto", example, CPU) == "reference"
    with pytest.raises(ValueError, match="backend compiled requires the package numba"):
        choose_backend("compiled", example, CPU)


def test_wrong_loops_are_replaced_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(node_loops, "backward", lambda *arguments: None)
    example = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    with pytest.warns(UserWarning, match="compiled cannot be used on cpu.*d_weight is off by"):
        assert choose_backend("auto", example, CPU) == "reference"
    assert choose_backend("auto", example, CPU) == "reference"  # warnings are errors


def without(name: str, code: str) -> str:
    """What code prints where numba compiles for a processor without some instructions."""
    from numba.core import codegen

    features = codegen.get_host_cpu_features()  # type: ignore[no-untyped-call]
    limited = features.replace(f"+{name}", f"-{name}")
    environment = os.environ | {"NUMBA_CPU_FEATURES": limited}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_vectors_are_as_wide_as_the_instructions_that_numba_compiles_for() -> None:
    code = "from lm.output.backends.compiled.vectors import *; print(VECTOR_BYTES, HAS_BF16)"
    assert without("avx512", code) == "32 False"
    assert without("avx512bf16", code).endswith("False")


@pytest.mark.long
@pytest.mark.parametrize("name", ["avx512", "avx512bf16"])
def test_loops_without_instructions_agree_with_the_reference(name: str) -> None:
    code = (
        "import torch\n"
        "from lm.output.backends import BACKENDS, verify\n"
        "for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):\n"
        "    kind = verify.Kind(dtype, dtype, dtype)\n"
        "    print(verify.difference(BACKENDS['compiled'], torch.device('cpu'), kind, ()))\n"
    )
    assert without(name, code).split() == ["None"] * 4


def test_importing_the_layer_imports_no_compiler() -> None:
    code = "import sys, lm.output; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_code_is_kept_on_disk_only_if_its_cache_notices_all_changes(tmp_path: Path) -> None:
    """numba looks at the file of a function alone, which has a hash of the files that emit code."""
    emitted = compilation.EMITTED
    for module in (node_loops, row_loops, routing, draw_loops, search_loops):
        assert emitted == module.EMITTED, f"EMITTED has to be {emitted}"
    folder = Path(node_loops.__file__).parent
    for module in (*compilation.EMITTING, node_loops):
        name = Path(str(module.__file__)).name
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    code = (
        "import sys, lm.output.backends.compiled as package\n"
        f"package.__path__.insert(0, {str(tmp_path)!r})\n"
        "from lm.output.backends.compiled import node_loops\n"
        "print(type(node_loops.forward._cache).__name__)"
    )
    for change, kept in (("", "FunctionCache"), ("# another line", "NullCache")):
        with (tmp_path / "vectors.py").open("a") as file:
            file.write(change)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == kept, done.stderr
