"""Laws of the output layer, and the ways to compute it that must obey them, on any device.

A way is a backend, a form of the call and a setting of the backend; a case is a problem to compute.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lm.output import ClassTree
from lm.output.backends.triton.launch import instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.inputs import compute_dtype
from lm.output.rowwise import RowGradient

from .definition import SMALL_TILES, H, definition, nll, two_level, zipf_targets

Results = list[Tensor]
"""nll of every position, and the gradients of hidden, weight and perhaps bias."""
HALF = (torch.bfloat16, torch.float16)
UNEQUAL_TILES = Tiles(
    Tile(32, 16, 32, 4, 1), Tile(16, 16, 0, 4, 1), Tile(64, 32, 32, 4, 1, 16),
    Tile(16, 32, 64, 4, 1), chunk=20,
)  # fmt: skip
Loss = Callable[..., Tensor]


class Case(NamedTuple):
    """A problem: random numbers, and words of which half are drawn by inverse rank."""

    tree: ClassTree
    positions: int = 36
    size: int = H
    dtype: torch.dtype = torch.float64
    further: int = 0  # columns of the weight after the first H, whose numbers must not matter
    bias: bool = True
    rows: torch.dtype | None = None  # dtype of weight and bias under autocast to `dtype`
    device: str = "cpu"

    def __str__(self) -> str:
        further = [f"W {self.size + self.further}"] * bool(self.further)
        further += ["no bias"] * (not self.bias) + [f"rows {self.rows}"] * bool(self.rows)
        sizes = f"{self.tree.vocab_size} words, {self.tree.num_nodes} nodes, P {self.positions}"
        return ", ".join([sizes, f"H {self.size}", str(self.dtype), *further]).replace("torch.", "")

    def autocast(self) -> AbstractContextManager[Any]:
        """In which rows of a higher precision are accepted."""
        return torch.autocast(self.device, self.dtype, enabled=self.rows is not None)


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which the loss is a registered op."""

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _recorded(loss: Loss, *inputs: Tensor) -> Any:
    with Recorded():  # type: ignore[no-untyped-call]
        return loss(*inputs)


def _compiled(loss: Loss, *inputs: Tensor) -> Any:
    """For more positions than at first, so that the size may be a symbol."""
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled(inputs[0].detach()[:5], *inputs[1:-1], inputs[-1][:5])
    return compiled(*inputs)


def _traced(loss: Loss, *inputs: Tensor) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(loss, inputs)(*inputs)  # type: ignore[no-untyped-call]


def _strided(loss: Loss, *inputs: Tensor) -> Any:
    """Tensors of several dimensions with gaps; rows without, as kernels require."""
    hidden, weight, *others = inputs
    hidden, *bias, target = (torch.stack([x, x], -1)[..., 0] for x in (hidden, *others))
    return loss(hidden[:, None], weight, *bias, target[:, None])[:, 0]


FORMS: dict[str, Callable[..., Any]] = {
    "dense": lambda loss, *inputs: loss(*inputs),
    "row-wise": lambda loss, *inputs: loss(*inputs),
    "op": _recorded,
    "torch.compile": _compiled,
    "exported": lambda loss, *of: torch.export.export(Called(loss), of).module()(*of),
    "traced": _traced,
    "checkpointed": lambda loss, *inputs: checkpoint(loss, *inputs, use_reentrant=False),
    "strided": _strided,
}
"""Forms of a call: functions of a loss and its arguments hidden, weight, perhaps bias, target."""


@contextmanager
def _patched(values: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch(f"lm.output.backends.{name}", value))
        yield


NO_ERRORS = ("SAVED_ELEMENTS", "SAVED_ELEMENTS_OF_ONE_NODE", "FULL_SAVED_ELEMENTS")
THREE_PARTS = {
    "division.LEAST_COLUMNS": 0, "division._in_threads": lambda *_: None, "passes.LEAST_ZEROS": 0,
    "memory.LARGE_BYTES": 1 << 12, "division.torch.get_num_threads": lambda: 3,
}  # fmt: skip
SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "blocks": lambda: _patched({"nodes.CAST_ELEMENTS": 37, "nodes.BLOCK_ELEMENTS": 37}),
    "errors are not saved": lambda: _patched({f"compiled.memory.{n}": 0 for n in NO_ERRORS}),
    "three parts": lambda: _patched({f"compiled.{n}": value for n, value in THREE_PARTS.items()}),
    "tiles": lambda: instrumented(tiles=SMALL_TILES, num_splits=1),
    "tiles, 2 splits": lambda: instrumented(tiles=SMALL_TILES, num_splits=2),
    "tiles, 5 splits": lambda: instrumented(tiles=SMALL_TILES, num_splits=5),
    "unequal tiles": lambda: instrumented(tiles=UNEQUAL_TILES, num_splits=1),
    "parts of the batch": lambda: _patched({"triton.backend.MAX_SAVED_BYTES": 1 << 14}),
}
"""Settings of backends that make a small case as various as a large one."""


class Way(NamedTuple):
    backend: Any = "auto"
    form: str = "dense"
    setting: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))

    def nll(self, tree: ClassTree, *inputs: Tensor, **options: Any) -> Tensor:
        """The nll of every position, unless a reduction is given; within the setting."""
        options = {"backend": self.backend, "row_wise": self.form == "row-wise"} | options

        def loss(*inputs: Tensor) -> Tensor:
            return nll([*inputs], tree, **options)

        found: Tensor = FORMS[self.form](loss, *inputs)
        return found

    def solve(
        self, case: Case, inputs: list[Tensor], upstream: Tensor, needs: int = 7, repeats: int = 0,
        **options: Any,
    ) -> Results:  # fmt: skip
        """The loss and gradients of tensors, which precede the target; of those of bits `needs`."""
        *tensors, target = inputs
        leaves = [x.detach().requires_grad_(bool(needs >> i & 1)) for i, x in enumerate(tensors)]
        with SETTINGS[self.setting]():
            with case.autocast():
                found = self.nll(case.tree, *leaves, target, **options)
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            assert found.requires_grad == bool(asked)
            for _ in range(repeats):
                torch.autograd.grad(found, asked, upstream, retain_graph=True)
            gradients = torch.autograd.grad(found, asked, upstream) if asked else ()
        is_row_wise = [isinstance(gradient, RowGradient) for gradient in gradients]
        assert is_row_wise == [self.form == "row-wise" and leaf is not leaves[0] for leaf in asked]
        assert [each.dtype for each in gradients] == [each.dtype for each in asked]
        return [found.detach(), *(gradient.to_dense() for gradient in gradients)]


def problem_of(case: Case) -> tuple[list[Tensor], Tensor]:
    """hidden, weight, perhaps bias, and the target, with ignored ones; the gradient of the nll."""
    torch.manual_seed(0)
    tree, positions, device = case.tree, case.positions, case.device
    shapes = (positions, case.size), (tree.num_rows, case.size + case.further), (tree.num_rows,)
    hidden, weight, bias = (torch.randn(shape, device=device) for shape in shapes)
    weight *= 0.1 if case.size > 32 else case.size**-0.5
    parameters = [table.to(case.rows or case.dtype) for table in (weight, bias)]
    target = zipf_targets(tree, positions)
    target[1::17], target[-1:] = -100, tree.vocab_size - 1
    inputs = [hidden.to(case.dtype), *parameters[: 1 + case.bias], target.to(device)]
    return inputs, torch.randn(positions, device=device).to(compute_dtype(case.dtype))


def by_definition(case: Case, inputs: list[Tensor], upstream: Tensor, dtype: Any) -> Results:
    """What `Way.solve` should return, computed in a dtype."""
    *tensors, target = inputs
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    hidden, weight, *bias = leaves
    each = definition(hidden, weight, bias[0] if bias else None, target, case.tree)
    return [each.detach(), *torch.autograd.grad(each, leaves, upstream.to(each.dtype))]


def equals_the_definition(way: Way, case: Case, inputs: list[Tensor], upstream: Tensor) -> None:
    """Errors are within twice those of plain PyTorch in the same dtype."""
    found = way.solve(case, inputs, upstream)
    truth = by_definition(case, inputs, upstream, torch.float64)
    exact = case.dtype == torch.float64
    base = truth if exact else by_definition(case, inputs, upstream, case.dtype)
    assert found[0].dtype == compute_dtype(case.dtype)
    assert not found[2][:, case.size :].any()
    slack = (8 if case.dtype in HALF else 64) * torch.finfo(case.dtype).eps
    names = ["nll", "d_hidden", "d_weight", "d_bias"][: len(found)]
    for what, *results, true in zip(names, found, base, truth, strict=True):
        error, baseline = ((each.double() - true).abs().max() for each in results)
        allowed = 2 * baseline + slack * true.abs().max()
        assert error <= allowed, f"{what}: off by {error}, plain torch by {baseline}"


Law = Callable[[Way, Case], None]


def impossible_children_have_no_part(way: Way, case: Case) -> None:
    """A bias of -inf bans all words and classes that no target's path has, of whole blocks."""
    inputs, upstream = problem_of(case := case._replace(tree=two_level(240, 80).to(case.device)))
    rows = torch.arange(case.tree.num_rows, device=case.device)
    inputs[2][~torch.isin(rows, case.tree.rows_on_path(inputs[-1].clamp(min=0)))] = -torch.inf
    equals_the_definition(way, case, inputs, upstream)


def depth_one_is_cross_entropy(way: Way, case: Case) -> None:
    """All reductions, for no, some and only ignored positions, and for none at all."""
    case = case._replace(tree=ClassTree.full(case.tree.vocab_size).to(case.device), positions=9)
    (hidden, weight, bias, target), _ = problem_of(case)
    target = torch.where(target < 0, -7, target)
    batches = [target, target.clamp(min=0), target.clamp(max=-7), target[:0]]
    for reduction, words in [*product(["mean"], batches), ("sum", target), ("none", target)]:
        tensors = [each.requires_grad_() for each in (hidden[: len(words)].detach(), weight, bias)]
        options: dict[str, Any] = {"reduction": reduction, "ignore_index": -7}
        truth = F.cross_entropy(F.linear(tensors[0], weight, bias), words, **options)
        expected = [truth.detach(), *torch.autograd.grad(truth, tensors, torch.ones_like(truth))]
        if reduction == "mean" and not (words >= 0).any():
            expected = [torch.zeros_like(each) for each in expected]  # 0 instead of 0 / 0
        found = way.solve(case, [*tensors, words], torch.ones_like(truth), **options)
        torch.testing.assert_close(found, expected)


def nothing_to_predict_costs_nothing(way: Way, case: Case) -> None:
    (hidden, *tables, target), _ = problem_of(case)
    for each, words in ((hidden, target.clamp(max=-100)), (hidden[:0], target[:0])):
        upstream = torch.ones((), dtype=compute_dtype(case.dtype), device=case.device)
        found = way.solve(case, [each, *tables, words], upstream, reduction="mean")
        assert not any(each.any() for each in found)


def any_subset_of_the_gradients_may_be_asked_for(way: Way, case: Case) -> None:
    inputs, upstream = problem_of(case)
    nll, *every = way.solve(case, inputs, upstream)
    for subset in (1, 2, 4) if way.backend == "triton" else range(7):
        chosen = [each for i, each in enumerate(every) if subset >> i & 1]
        found = way.solve(case, inputs, upstream, subset)
        torch.testing.assert_close(found, [nll, *chosen], rtol=1e-5, atol=1e-6)


def a_gradient_of_an_ignored_position_is_not_used(way: Way, case: Case) -> None:
    inputs, upstream = problem_of(case)
    expected = way.solve(case, inputs, upstream)
    upstream[inputs[-1] == -100] = torch.nan
    upstream[1] = torch.inf
    assert all(map(torch.equal, way.solve(case, inputs, upstream), expected))


def positions_are_independent(way: Way, case: Case) -> None:
    """The results of others stay the same bit for bit if some are not numbers; all repeat."""
    inputs, upstream = problem_of(case)
    expected = way.solve(case, inputs, upstream)
    assert all(map(torch.equal, way.solve(case, inputs, upstream, repeats=1), expected))
    broken = torch.arange(case.positions, device=case.device) % 9 == 3
    inputs[0][broken] = torch.nan
    for found, before in zip(way.solve(case, inputs, upstream)[:2], expected, strict=False):
        assert torch.equal(found[~broken], before[~broken])
        assert found[broken & (inputs[-1] >= 0)].isnan().all()


def a_row_that_is_no_number_is_seen_where_its_node_is_visited(way: Way, case: Case) -> None:
    inputs, upstream = problem_of(case)
    target, tree = inputs[-1], case.tree
    node = int(tree.node_of_row[tree.row_of_word[target[0]]])
    visits = torch.tensor([node in dict(tree.path(w)) for w in target.clamp(min=0).tolist()])
    inputs[1][int(tree.first_row[node])] = torch.nan
    nll = way.solve(case, inputs, upstream)[0].cpu()
    assert torch.equal(nll.isnan(), visits & (target >= 0).cpu())


def huge_logits_stay_finite(way: Way, case: Case) -> None:
    inputs, upstream = problem_of(case)
    for scale in (1e4, -1e4):
        scaled = [inputs[0] * scale, *inputs[1:]]
        nll, *gradients = way.solve(case, scaled, upstream)
        truth = by_definition(case, scaled, upstream, torch.float64)[0]
        torch.testing.assert_close(nll.double(), truth, rtol=1e-5, atol=0.2)
        assert all(each.isfinite().all() for each in gradients)


def confident_predictions_keep_their_gradient(way: Way, case: Case) -> None:
    """Here q - 1 is -1e-6: 0 for a probability in bf16, and less than fp32 rounds an lse of 114."""
    least = 100.0 if way.backend != "triton" and case.dtype == torch.float32 else 0.0
    case = case._replace(tree=ClassTree.full(2).to(case.device), size=1, positions=1)
    (hidden, weight, bias, target), upstream = problem_of(case)
    hidden[:], bias[:], target[:], upstream[:] = 1, 0, 0, 1
    weight[:] = torch.tensor([[least + 13.8125], [least]])
    error = way.solve(case, [hidden, weight, bias, target], upstream)[2][0, 0].cpu().double()
    truth = -torch.sigmoid(torch.tensor(-13.8125, dtype=torch.float64))
    torch.testing.assert_close(error, truth, rtol=0.1, atol=0)


def gradients_of_a_small_loss_survive_half_precision(way: Way, case: Case) -> None:
    """d nll = 1e-8 times an error is 0 in fp16, unless it is divided by its maximum."""
    inputs, upstream = problem_of(case)
    expected, found = (way.solve(case, inputs, upstream * scale)[2] for scale in (1, 1e-8))
    near = 1e-3 * float(expected.abs().max())
    torch.testing.assert_close(found * 1e8, expected, rtol=0.01, atol=near)


LAWS: dict[Law, tuple[torch.dtype, torch.dtype | None]] = {
    impossible_children_have_no_part: (torch.float16, None),
    depth_one_is_cross_entropy: (torch.float32, None),
    nothing_to_predict_costs_nothing: (torch.float16, None),
    any_subset_of_the_gradients_may_be_asked_for: (torch.float16, None),
    a_gradient_of_an_ignored_position_is_not_used: (torch.float16, None),
    positions_are_independent: (torch.float16, None),
    a_row_that_is_no_number_is_seen_where_its_node_is_visited: (torch.float32, None),
    huge_logits_stay_finite: (torch.float32, None),
    confident_predictions_keep_their_gradient: (torch.float32, None),
    gradients_of_a_small_loss_survive_half_precision: (torch.float16, torch.float32),
}
"""Further laws, and the dtypes of hidden vectors and, under autocast, rows that they are for."""
