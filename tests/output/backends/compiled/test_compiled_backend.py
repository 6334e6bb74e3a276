"""Compiled loops: sizes, roundings, and what "auto" does where they do not work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends import BACKENDS, choose_backend, saved_bytes, verify
from lm.output.backends.base import Backend, Gradients, Needs, Problem
from lm.output.backends.compiled import backend, loops, memory
from lm.output.backends.compiled.codegen import vectors
from lm.output.backends.compiled.step import target_log_prob
from lm.output.backends.visits import route

from ...definition import TREES, assert_errors_are_small, gradients, problem, two_level

CPU = torch.device("cpu")
Sizes = tuple[int, int, int, int]
ALL = Needs(hidden=True, weight=True, bias=True)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "sizes",  # H, words, classes, positions
    [
        (1, 7, 3, 5),
        (17, 91, 4, 201),
        (33, 299, 2, 70),
        (64, 300, 150, 90),
        (304, 5000, 70, 150),  # the gradient is larger than `CACHE_BYTES`
        (301, 9000, 90, 150),  # and rows begin within a line of a cache
        (2100, 1500, 30, 90),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("of_hidden", "of_rows", "has_instructions"),
    [
        (FP64, FP64, True), (FP32, FP32, True), (BF16, BF16, True), (BF16, BF16, False),
        (BF16, FP32, True), (BF16, FP32, False),
    ],
)  # fmt: skip
def test_results_are_as_exact_as_those_of_pytorch_for_all_sizes_of_tiles(
    sizes: Sizes, of_hidden: torch.dtype, of_rows: torch.dtype, has_instructions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With instructions for products of bf16 numbers or without; all is in bf16 in PyTorch."""
    size, num_words, num_classes, num_positions = sizes
    monkeypatch.setattr(vectors, "HAS_BF16", vectors.HAS_BF16 and has_instructions)
    tree = two_level(num_words, num_classes)
    hidden, *parameters, target = problem(tree, num_positions, size=size)
    inputs = [hidden.to(of_hidden), *(tensor.to(of_rows) for tensor in parameters)]
    upstream = torch.randn(num_positions, dtype=torch.float64)
    true = gradients([x.double() for x in inputs], target, tree, upstream, "reference")
    plain = [x.to(of_hidden) for x in inputs]
    base = gradients(plain, target, tree, upstream, "reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=of_hidden == BF16):
        actual = gradients(inputs, target, tree, upstream, "compiled")
    eps = torch.finfo(of_hidden).eps
    assert_errors_are_small([actual, base, true], slack=eps if of_hidden == BF16 else 40 * eps)


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
    _, _, saved = compiled.nll(solved, ALL)
    return compiled.backward(d_nll, solved, saved, ALL)


@pytest.mark.parametrize("tree", [*TREES.values(), ClassTree.two_level(torch.arange(70_000) // 2)])
def test_visits_are_those_of_the_reference(tree: ClassTree) -> None:
    """Ranks of the last tree's nodes have three digits."""
    hidden, weight, bias, target = problem(tree, 300)
    solved = Problem.of(hidden, weight, target, tree, bias)
    _, saved = target_log_prob(solved, ALL)
    expected = route(target, tree.arrays, tree.depth, -100)
    for ours, theirs in zip(saved, expected, strict=False):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [BF16, FP64])
def test_softmaxes_whose_errors_are_not_saved_are_the_references(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAVED_ELEMENTS", "SAVED_ELEMENTS_OF_ONE_NODE", "FULL_SAVED_ELEMENTS"):
        monkeypatch.setattr(memory, name, 0)
    for tree in (ClassTree.full(40), two_level(40, 5)):
        *inputs, target = problem(tree, 20, dtype=dtype)
        upstream, found = torch.ones(20), []
        for name in ("compiled", "reference"):
            solved = Problem.of(inputs[0], inputs[1], target, tree, inputs[2])
            by_level = BACKENDS[name].softmaxes(solved, ALL)[0].nll_by_level()
            size = saved_bytes(name, solved, row_wise=False)
            each = gradients(inputs, target, tree, upstream, name)
            found.append([*each, by_level, torch.tensor(size)])
        assert all(map(torch.equal, *found))


def test_without_numba_auto_warns_and_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_numba", lambda: False)
    example = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    with pytest.warns(UserWarning, match="slowly on cpu: .* requires numba: pip install numba"):
        assert choose_backend("auto", example, CPU) == "reference"
    with pytest.raises(ValueError, match="backend compiled requires numba: pip install numba"):
        choose_backend("compiled", example, CPU)
    with pytest.raises(ValueError, match="backend compiled requires a CPU, got cuda"):
        choose_backend("compiled", example, torch.device("cuda"))
    monkeypatch.undo()
    unknown = example._replace(weight=example.weight.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"backend compiled does not support torch\.float8_e5m2"):
        choose_backend("compiled", unknown, CPU)


def test_wrong_loops_are_replaced_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(loops, "backward", lambda *arguments: None)
    example = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    with pytest.warns(UserWarning, match="compiled cannot be used on cpu.*d_weight is off by"):
        assert choose_backend("auto", example, CPU) == "reference"
    assert choose_backend("auto", example, CPU) == "reference"  # warnings are errors


def test_a_numba_that_cannot_be_imported_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def failures() -> verify.Failures:
        raise ImportError("Numba needs NumPy 2.3 or less.")

    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(backend, "failures", failures)
    example = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    with pytest.warns(UserWarning, match="compiled cannot be used .* ImportError: Numba needs"):
        assert choose_backend("auto", example, CPU) == "reference"


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
    code = (
        "from lm.output.backends.compiled.codegen.vectors import *; print(VECTOR_BYTES, HAS_BF16)"
    )
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
        "    print(verify.difference(BACKENDS['compiled'], torch.device('cpu'), kind))\n"
    )
    assert without(name, code).split() == ["None"] * 4


def test_compiled_code_is_kept_until_a_file_with_loops_or_their_code_changes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "compiled"
    shutil.copytree(Path(loops.__file__).parent, folder)
    code = (
        "import lm.output.backends.compiled as package\n"
        f"package.__path__[:] = [{str(folder)!r}]\n"
        "import numpy as np\n"
        "from lm.output.backends.compiled.expansion_loops import item_log_weight as found\n"
        "found(1.0, 2.0, 3)\n"
        "print(sum(found.stats.cache_hits.values()))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def num_hits() -> int:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert not done.returncode, done.stderr
        return int(done.stdout)

    assert [num_hits(), num_hits()] == [0, 1]
    with (folder / "codegen/vectors.py").open("a") as file:
        file.write("# another line\n")
    assert num_hits() == 0
    for data in (tmp_path / "cache").rglob("*.nbc"):
        data.write_bytes(b"damaged")
    assert num_hits() == 0
