"""Backend "auto" compares the kernels with the reference first; here in the interpreter."""

from subprocess import CalledProcessError
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends import BACKENDS, choose_backend, verify
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.verify import Kind

from ...definition import ROUTING, execute_routing, problem

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError

CPU = torch.device("cpu")
TREE = ClassTree.two_level(torch.arange(40) // 7)
KIND = Kind(torch.float16, torch.float16, torch.float16, 16, 16, False)
TINY_PROBLEM = verify.tiny_problem
HALF = Problem.without_values(30, 16, TREE, torch.float16)


def few_positions(kind: Kind) -> tuple[Tensor, Problem, Tensor]:
    """As `tiny_problem`, solved faster by the interpreter; every launch has a part of it."""
    *floats, target = problem(TREE, 90, size=16, dtype=torch.float32)
    hidden, weight, bias = (x.detach().to(kind.hidden) for x in floats)
    return target, Problem.of(hidden, weight, TREE, bias), torch.randn(90)


@pytest.fixture(autouse=True)
def _verified_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.function is not test_the_kernels_pass_the_comparison:
        monkeypatch.setattr(verify, "tiny_problem", few_positions)
    monkeypatch.setattr(backend, "VERIFIED", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(BACKENDS["triton"], "automatic_on", backend.VERIFIED)
    monkeypatch.setattr(BACKENDS["compiled"], "automatic_on", frozenset())


def test_correct_kernels_are_taken_after_one_comparison(launches: list[Launch]) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert choose_backend("auto", HALF, CPU) == "triton"
        count = len(launches)
        assert choose_backend("auto", HALF, CPU) == "triton"
    assert len(launches) == count > 0
    names = [each.kernel.__name__ for each in launches]
    assert names[-2:] == ["_update", "_update"]  # norms, and a step that reads them


def test_the_problem_of_the_comparison_has_all_that_programs_work_on() -> None:
    target, whole, _ = TINY_PROBLEM(KIND)
    with instrumented(run=execute_routing):
        _, _, saved = BACKENDS["triton"].nll(target, whole, Needs(True, True, True))
    assert saved[0][:7].all()


@pytest.mark.long
def test_the_kernels_pass_the_comparison() -> None:
    assert verify.difference(BACKENDS["triton"], CPU, KIND) is None


def test_the_comparison_leaves_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in bf16 are rounded at random; what a process draws after it must not depend on it."""
    monkeypatch.setattr(verify, "_results", lambda *_: list(torch.rand(5)))
    before = torch.get_rng_state()
    verify.difference(BACKENDS["triton"], CPU, KIND)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_without_any_one_launch_auto_warns_and_takes_the_reference() -> None:
    """But the routing, without which kernels would read anywhere, and sums of chunks, of which the
    row-wise gradients of this problem have none.
    """
    names: list[str] = []
    faulty: int | None = None

    def run(launch: Launch) -> None:
        if len(names) != faulty:
            execute(launch)
        names.append(launch.kernel.__name__)

    with instrumented(run=run):
        assert choose_backend("auto", HALF, CPU) == "triton"
    expected = list(names)
    chosen = [i for i, name in enumerate(expected) if name not in ROUTING]
    chosen.remove(len(expected) - 1 - expected[::-1].index("_heavy"))
    assert "_update" in expected
    for faulty in chosen:
        names.clear()
        verify._differences.clear()
        with (
            instrumented(run=run),
            pytest.warns(UserWarning, match="(nll|d_.*|step) is off by") as seen,
        ):
            assert choose_backend("auto", HALF, CPU) == "reference", expected[faulty]
        assert len(seen) == 1
        assert choose_backend("auto", HALF, CPU) == "reference"
        assert choose_backend("triton", HALF, CPU) == "triton"


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        CalledProcessError(1, ["gcc", "main.c"]),
        FileNotFoundError(2, "No such file or directory", "ptxas"),
        CompilationError("", None, "unsupported"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_kernels_that_do_not_compile_are_replaced_with_one_warning(failure: Exception) -> None:
    warning = pytest.warns(UserWarning, match=type(failure).__name__)
    with instrumented(run=Mock(side_effect=failure)), warning as seen:
        assert choose_backend("auto", HALF, CPU) == "reference"
    assert str(failure).splitlines()[0] in str(seen[0].message)
    assert choose_backend("auto", HALF, CPU) == "reference"  # warnings are errors


def test_a_lack_of_memory_does_not_condemn_the_kernels() -> None:
    run = Mock(side_effect=torch.OutOfMemoryError)
    with instrumented(run=run), pytest.raises(torch.OutOfMemoryError):
        choose_backend("auto", HALF, CPU)
    assert choose_backend("auto", HALF, CPU) == "triton"


def loss(hidden: Tensor, weight: Tensor) -> Tensor:
    return hierarchical_cross_entropy(hidden, weight, torch.arange(9), TREE)


def test_a_model_is_traced_with_a_warning_where_paths_are_too_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "MAX_COLUMNS", 10)
    inputs = torch.randn(9, 16).half(), torch.randn(TREE.num_rows, 16).half()
    with pytest.warns(UserWarning, match="slowly on cpu: .* takes at most 10 columns"):
        expected = loss(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="slowly on cpu"):
        torch.testing.assert_close(compiled(*inputs), expected)


@pytest.mark.parametrize("faulty", [False, True])
def test_the_choice_is_made_while_a_model_is_traced(faulty: bool, launches: list[Launch]) -> None:
    inputs = torch.randn(9, 16).half(), torch.randn(TREE.num_rows, 16).half()
    expected = loss(*inputs) if not faulty else None
    verify._differences.clear()
    if faulty:
        verify._differences["backend triton", CPU, KIND] = "wrong"
    launches.clear()
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    actual = compiled(*inputs)
    traced = len(launches)
    torch.testing.assert_close(compiled(*inputs), actual)
    if expected is not None:
        torch.testing.assert_close(actual, expected)
    assert len(verify._differences) == 1
    assert (len(launches) > traced > 0) != faulty


def test_fake_tensors_are_compared_in_real_ones() -> None:
    with FakeTensorMode():
        assert choose_backend("auto", HALF, CPU) == "triton"
    assert list(verify._differences.values()) == [None]


def test_a_cuda_graph_cannot_capture_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run a step before the capture"):
        BACKENDS["triton"].verified(HALF, torch.device("cuda", 0))
    verify._differences["backend triton", torch.device("cuda", 0), KIND] = None
    assert BACKENDS["triton"].verified(HALF, torch.device("cuda", 0))
