"""What is launched and allocated for the fused kernels, and what they refuse."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from lm.output import hierarchical_cross_entropy
from lm.output.backends import BACKENDS
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend as triton_backend
from lm.output.backends.triton import plan, tile_shapes
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.tile_shapes import tiles

from ...definition import SMALL_TILES, nll, problem, two_level

pytest.importorskip("triton")

TREE = two_level(60, 8)


def test_without_gradients_no_exponentials_are_saved(launches: list[Launch]) -> None:
    inputs = problem(TREE, 40, size=16, dtype=torch.float32)
    with torch.no_grad():
        found, truth = (nll(inputs, TREE, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(found, truth)
    assert launches[-1].arguments["saved"].exp_logits is None


@pytest.mark.parametrize("precisions", [("high", "highest"), ("highest", "high")])
@pytest.mark.parametrize("num_words", [60, 3000])
def test_another_precision_in_the_backward_is_refused(
    precisions: tuple[str, str], num_words: int
) -> None:
    """Its tiles would read what was saved at other places."""
    tree = two_level(num_words, num_words // 10)
    inputs = problem(tree, 40, size=16, dtype=torch.float32)
    forward, backward = precisions
    try:
        torch.set_float32_matmul_precision(forward)
        loss = nll(inputs, tree, backend="triton", reduction="mean")
        torch.set_float32_matmul_precision(backward)
        with pytest.raises(RuntimeError, match="must be the same in the forward and the back"):
            torch.autograd.backward(loss)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_may_be_allowed_for_one_backend_of_torch(launches: list[Launch]) -> None:
    inputs = problem(TREE, 20, size=16, dtype=torch.float32)
    try:
        for precision in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            nll(inputs, TREE, backend="triton")
            assert launches[-1].arguments["META"].precision == precision
            expected = tiles(
                (torch.float32, torch.float32), 90, (16, 16), 8, tensor_cores=precision == "tf32"
            )
            assert launches[-1].tile == expected.forward
    finally:
        torch.set_float32_matmul_precision("highest")


def test_seven_launches_of_which_the_host_reads_nothing_back() -> None:
    """On tensors without values every decision of the host must follow from sizes alone."""
    tree, launches = two_level(100_000, 316), list[Launch]()
    meta = Problem.without_values(2000, 48, tree, torch.float32)._replace(bias=None)
    needs, target = Needs(hidden=True, weight=True, bias=False), meta.hidden.new_zeros(2000).long()
    with instrumented(run=launches.append):
        nll, _, saved = BACKENDS["triton"].nll(target, meta, needs)
        d_hidden, d_weight, d_bias = BACKENDS["triton"].backward(nll, meta, saved, needs)
    found = [None if grad is None else grad.shape for grad in (d_hidden, d_weight, d_bias)]
    assert found == [meta.hidden.shape, meta.weight.shape, None]
    assert launches[3].num_programs >= 2000 // 32 + 317
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["_sort", "_merge", "_plan", "_forward", "_errors", "_heavy", "_rows"]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of operations of torch that launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operation.overloadpacket).removeprefix("aten.")
        if not (operation.is_view or "empty" in name or "sqrtlm" in name or name in HOST):
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


HOST = ("promote_types", "detach", "_reshape_alias")
"""Operations on the host."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row_wise", [False, True])
def test_a_step_has_two_operations_of_torch_next_to_its_launches(
    dtype: torch.dtype, row_wise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the losses, and the gradient 1 that `backward` begins with.

    On CUDA also the assertion that targets are words. The scale of gradients in fp16 takes one.
    """
    monkeypatch.setattr(triton_backend, "check_words", lambda *of: None)  # of the CPU
    monkeypatch.setattr("lm.output.functional.eager", lambda *of: True)  # in spite of the mode
    inputs = problem(TREE, 40, size=16, dtype=dtype)
    with instrumented(run=lambda _: None), _Operations() as found:
        loss = nll(inputs, TREE, backend="triton", reduction="sum", row_wise=row_wise)
        torch.autograd.backward(loss)
    scale = ["abs"] * (dtype == torch.float16)
    assert found.names == ["sum", "ones_like", *scale]


def test_batches_of_many_sizes_share_one_compilation() -> None:
    """The memory of lists is the least of several bounds; which of them is no reason to compile."""
    tree, counter = two_level(10_000, 100), CompileCounter()
    weight = torch.zeros(tree.num_rows, 8)

    @torch.compile(fullgraph=True, backend=counter)
    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return hierarchical_cross_entropy(hidden, weight, target, tree, backend="triton")

    with instrumented(run=lambda _: None):
        for num_positions in (1000, 700, 200, 3000, 8193, 33_000):
            loss(torch.zeros(num_positions, 8), torch.zeros(num_positions).long())
    assert counter.frame_count == 2  # one of them for the first size alone


def test_problems_that_the_kernels_cannot_solve_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, target = problem(TREE, 20, size=16, dtype=torch.float32)

    def loss(weight: Tensor = weight) -> Tensor:
        return nll([hidden, weight, bias, target], TREE, backend="triton")

    message = r"requires compute capability 8.0, got 7.5"
    with instrumented(capability=75), pytest.raises(ValueError, match=message):
        loss()
    with pytest.raises(ValueError, match=r"requires a contiguous weight, got strides \(1, 68\)"):
        loss(weight.T.contiguous().T)
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "triton_version", lambda: None)
        with pytest.raises(ValueError, match="backend triton requires Triton: pip install triton"):
            loss()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="backend triton requires a CUDA device, got cpu"):
        loss()


@pytest.mark.parametrize(
    ("version", "refused"),
    [("3.6.0", True), ("3.7.0", True), ("3.7.1", False), ("3.8.0+git", False), ("3.10.0", False)],
)
def test_versions_of_triton_without_fences_are_refused_unless_for_timing(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delenv("SQRTLM_UNSAFE_TRITON", raising=False)
    of, device = Problem.without_values(40, 16, TREE, torch.float32), torch.device("cuda")
    with instrumented(capability=90):
        found = BACKENDS["triton"].obstacle(of, device)
        monkeypatch.setenv("SQRTLM_UNSAFE_TRITON", "1")
        assert BACKENDS["triton"].obstacle(of, device) is None
    assert (found is not None) == refused
    assert found is None or found.startswith("requires Triton 3.7.1 on devices")
    assert found is None or "`pip install --no-deps triton==3.9.0`" in found


def test_plans_are_made_anew_after_many_and_for_other_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "MAX_PLANS", 2)
    monkeypatch.setattr(plan, "_plans", {})
    problems = [Problem.without_values(n, 16, TREE, torch.float32) for n in (1, 2, 1, 3, 1)]
    made = [plan.plan_for(each) for each in problems]
    assert made[0] is made[2]
    assert made[4] is not made[0]
    assert [each.num_positions for each in made] == [1, 2, 1, 3, 1]
    with instrumented(tiles=SMALL_TILES):
        assert plan.plan_for(problems[4]).tiles == SMALL_TILES


@pytest.mark.parametrize("version", [(3, 7, 1), (3, 9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (90, 227), (100, 227)])
def test_what_loops_load_ahead_fits_into_shared_memory(
    capability: int,
    kilobytes: int,
    dtype: torch.dtype,
    version: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tile_shapes, "triton_version", lambda: version)
    tiles.cache_clear()
    powers = (1, 2, 4, 8, 16)
    for rows, *align, width in product({dtype, torch.float32}, powers, powers, (8, 999, 9999)):
        found = tiles((dtype, rows), capability, tuple(align), width, tensor_cores=True)
        forward, heavy, light = found.forward, found.heavy, found.light
        sizes = {
            forward: (forward.v + forward.c) * forward.h,
            heavy: heavy.step * (heavy.c + heavy.h),
            light: 2 * light.c * light.h,
        }
        for tile, size in sizes.items():
            assert tile.stages * size * dtype.itemsize <= 1024 * kilobytes, (rows, align, width)
    tiles.cache_clear()
