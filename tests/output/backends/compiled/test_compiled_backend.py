"""Compiled loops: sizes, roundings, and what "auto" does where they do not work."""

import fcntl
import os
import platform
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends import choose_backend, verify
from lm.output.backends.base import Needs, Problem
from lm.output.backends.compiled import backend, loops
from lm.output.backends.compiled.passes import target_log_prob
from lm.output.backends.visits import route
from lm.output.codegen import compilation, vectors
from tests.conftest import python

from ...definition import TREES, gradients, problem, two_level
from ...laws import Case, Way, equals_the_definition, problem_of

CPU = torch.device("cpu")
Sizes = tuple[int, int, int, int]
Kind = tuple[torch.dtype, torch.dtype | None, bool]
EXAMPLE = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


SIZES = [  # H, words, classes, positions
    (1, 7, 3, 5),
    (17, 91, 4, 201),
    (33, 299, 2, 70),
    (64, 300, 150, 90),
    (304, 5000, 70, 150),  # the gradient in fp32 is larger than `CACHE_BYTES`
    (301, 9000, 90, 150),  # and rows begin within a line of a cache
    (2100, 1500, 30, 90),
    (37, 11, 1, 31), (37, 12, 1, 32), (37, 13, 1, 95),  # blocks from 32 visits, 12 children on
]  # fmt: skip
KINDS = [
    (FP64, None, True), (FP32, None, True), (BF16, None, True), (BF16, None, False),
    (BF16, FP32, True), (BF16, FP32, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [(of, kind) for i, of in enumerate(SIZES) for j, kind in enumerate(KINDS) if (i + j) % 2],
    ids=str,
)
def test_results_are_as_exact_as_those_of_pytorch_for_all_sizes_of_tiles(
    sizes: Sizes, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With instructions for products of bf16 numbers or without."""
    size, num_words, num_classes, num_positions = sizes
    dtype, rows, has_instructions = kind
    monkeypatch.setattr(vectors, "HAS_BF16", vectors.HAS_BF16 and has_instructions)
    tree = two_level(num_words, num_classes)
    case = Case(tree, num_positions, size, dtype, rows=rows)
    equals_the_definition(Way("compiled"), case, *problem_of(case))


def test_exp_is_right_to_two_roundings_down_to_the_smallest_numbers() -> None:
    """The error of a word is its probability: exp of its logit, as the other one's is 0."""
    logit = -torch.linspace(0, 120, 4001)
    tree, weight = ClassTree.full(2), torch.tensor([[0.0], [1.0]])
    target, ones = torch.zeros(4001, dtype=torch.int64), torch.ones(4001)
    _, d_hidden, _ = gradients([logit[:, None], weight], target, tree, ones, "compiled")
    exact = torch.sigmoid(logit.double())
    error = (d_hidden[:, 0] - exact).abs()
    normal = exact > 2e-38
    assert (error[normal] <= 2 * torch.finfo(torch.float32).eps * exact[normal]).all()
    assert (d_hidden[exact < 1e-39] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_in_low_precision_is_rounded_once_to_nearest(dtype: torch.dtype) -> None:
    tree = two_level(300, 7)
    hidden, *floats, target = problem(tree, 200, size=40, dtype=torch.float32)
    rows = [tensor.to(dtype) for tensor in floats]
    d_nll = torch.randn(200)
    d_nll[5] = torch.nan
    low, high = (
        gradients([hidden, *tables], target, tree, d_nll, "compiled")
        for tables in (rows, [tensor.float() for tensor in rows])
    )
    for rounded, exact in zip(low[2:], high[2:], strict=True):
        torch.testing.assert_close(rounded, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert high[2].isnan().any()


@pytest.mark.parametrize("tree", [*TREES.values(), ClassTree.two_level(torch.arange(140_000) // 2)])
def test_visits_are_those_of_the_reference(tree: ClassTree) -> None:
    """Ranks of the last tree's nodes have three digits."""
    hidden, weight, bias, target = problem(tree, 300)
    solved = Problem.of(hidden, weight, tree, bias)
    _, saved = target_log_prob(target, solved, Needs(hidden=True, weight=True, bias=True))
    expected = route(target, tree.arrays, tree.depth, -100)
    for ours, theirs in zip(saved, expected, strict=False):
        assert torch.equal(ours, theirs)


def test_without_numba_auto_warns_and_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_numba", lambda: False)
    with pytest.warns(UserWarning, match="slowly on cpu: .* requires numba: pip install numba"):
        assert choose_backend("auto", EXAMPLE, CPU) == "reference"
    with pytest.raises(ValueError, match="backend compiled requires numba: pip install numba"):
        choose_backend("compiled", EXAMPLE, CPU)
    with pytest.raises(ValueError, match="backend compiled requires a CPU, got cuda"):
        choose_backend("compiled", EXAMPLE, torch.device("cuda"))
    monkeypatch.undo()
    unknown = EXAMPLE._replace(weight=EXAMPLE.weight.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"backend compiled does not support torch\.float8_e5m2"):
        choose_backend("compiled", unknown, CPU)


OTHER_NUMPY = Mock(side_effect=ImportError("Numba needs NumPy 2.3 or less."))


@pytest.mark.parametrize(
    ("module", "function", "replacement", "problem"),
    [
        (loops, "backward", lambda *arguments: None, "d_weight is off by"),
        (backend, "failures", OTHER_NUMPY, "ImportError: Numba needs"),
    ],
)
def test_wrong_loops_and_a_numba_that_cannot_be_imported_are_replaced_with_one_warning(
    module: Any, function: str, replacement: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(module, function, replacement)
    with pytest.warns(UserWarning, match=f"compiled cannot be used on cpu.*{problem}"):
        assert choose_backend("auto", EXAMPLE, CPU) == "reference"
    assert choose_backend("auto", EXAMPLE, CPU) == "reference"  # warnings are errors


def without(name: str, code: str) -> str:
    """What code prints where numba compiles for a processor without some instructions."""
    from numba.core import codegen

    features = codegen.get_host_cpu_features()  # type: ignore[no-untyped-call]
    limited = features.replace(f"+{name}", f"-{name}")
    done = python("-c", code, env=os.environ | {"NUMBA_CPU_FEATURES": limited})
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_vectors_are_as_wide_as_the_instructions_that_numba_compiles_for() -> None:
    code = "from lm.output.codegen.vectors import *; print(VECTOR_BYTES, HAS_BF16)"
    assert without("avx512", code) == "32 False"
    assert without("avx512bf16", code).endswith("False")


def test_fp16_without_instructions_is_an_error_and_does_not_end_the_process() -> None:
    code = (
        "import numba, numpy as np\n"
        "from lm.output.codegen.row_operations import scaled_row\n"
        "@numba.njit\n"
        "def scale(x): scaled_row(x, x, x.ctypes.data, x.ctypes.data, len(x), np.float32(1))\n"
        "try: scale(np.ones(3, np.int16))\n"
        "except RuntimeError as error: print(error)\n"
    )
    is_x86 = platform.machine() == "x86_64"
    assert without("f16c", code) == is_x86 * "the processor has no instructions for fp16"


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


def one() -> int:
    return 1


def test_one_process_at_a_time_uses_the_files_of_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    files, found = compilation.compiled(one)._cache._cache_file, []
    files.save("first", 1)

    def use() -> None:
        files.save("key", "code")
        found.append(files.load("key"))

    (lock,) = tmp_path.rglob("lock")
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        user = threading.Thread(target=use)
        user.start()
        user.join(0.2)
        assert user.is_alive()
    user.join()
    assert found == ["code"]


def test_compiled_code_is_kept_until_a_file_with_loops_or_their_code_changes(
    tmp_path: Path,
) -> None:
    top = Path(loops.__file__).parents[4]
    for package in ("lm", "data_prep"):
        shutil.copytree(top / package, tmp_path / package)
    code = (
        "from lm.output.decoding.loops.expansion_loops import item_log_weight as found\n"
        "found(1.0, 2.0, 3)\n"
        "print(sum(found.stats.cache_hits.values()))"
    )
    folders = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def num_hits() -> int:
        done = python("-c", code, cwd=tmp_path, env=os.environ | folders)
        assert not done.returncode, done.stderr
        return int(done.stdout)

    assert [num_hits(), num_hits()] == [0, 1]
    with (tmp_path / "lm/output/codegen/vectors.py").open("a") as file:
        file.write("# another line\n")
    assert num_hits() == 0
