"""Problems whose forward and backward the emulator executes, and what must be true of the results.

The functions run in processes of `pool`, where kernels are compiled, not interpreted.
"""

import mmap
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import SLOT, VARYING, Launch, execute, instrumented
from lm.output.backends.triton.plan import tiles_for
from lm.output.backends.visits import route
from lm.output.decoding import fused
from lm.output.decoding.positions import Positions
from lm.output.rowwise import RowGradient
from scripts.benchmarks import measure
from scripts.kernels.compilation import CONSTANTS, values
from scripts.kernels.emulator import Emulator
from scripts.kernels.emulator.execution import Run
from scripts.kernels.emulator.judge import Judge

from ...decoding.truth import trials
from ...definition import assert_errors_are_small, gradients, two_level, zipf_targets

DTYPES = {n: measure.DTYPES.get(n, torch.float32) for n in ("bf16", "fp16", "tf32", "fp32")}
EPSILON = {name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()} | {"tf32": 2**-10}
TREES: dict[str, Callable[[], ClassTree]] = {
    "two levels": lambda: ClassTree.two_level(torch.arange(300) * 17 // 300),
    "root only": lambda: ClassTree.full(100),
    "three levels": lambda: ClassTree.balanced(300, 7),
    "binary": lambda: ClassTree.balanced(40, 2),
    "classes of one word": lambda: ClassTree.two_level(
        (torch.arange(62) - 12).clamp(min=-1) // 10 + 1
    ),
    "shortlist": lambda: ClassTree.two_level(torch.arange(300) % 15, 40),
    "wide classes": lambda: ClassTree.two_level(torch.arange(900) % 6),
    "classes of 1 to 300 words": lambda: ClassTree.two_level(
        torch.arange(6).repeat_interleave(torch.tensor([1, 3, 10, 30, 100, 300]))
    ),
}
FAR = 1 << 24
"""Elements from row to row: within a tile of 128 rows, offsets have 32 bits."""
ORDERS = ("forward", "backward", "interleaved")


class Case(NamedTuple):
    """A problem, and how it is executed."""

    capability: int = 90
    dtype: str = "bf16"
    tree: str = "two levels"
    size: int = 64  # H
    further: int = 0  # columns of weight rows after the first H
    positions: int = 90
    row_wise: bool = False
    orders: tuple[str, ...] = ("together",)
    bias: bool = True
    target: str = "some ignored"
    rows: str = ""  # dtype of weight and bias, by default that of hidden
    switched: bool = False  # one loop over blocks of children and of H
    chunk: int = 64  # least number of visits whose products a program adds up

    def __str__(self) -> str:
        values = self._asdict().items()
        return ", ".join(f"{k} {v}" for k, v in values if v != self._field_defaults[k])


Inputs = tuple[list[Tensor], Tensor, ClassTree, Tensor]
"""hidden, weight and perhaps bias; target; tree; gradient of the nll of every position."""


def inputs(case: Case) -> Inputs:
    """Random numbers, the same for every case of these sizes."""
    torch.manual_seed(0)
    tree, dtype = TREES[case.tree](), DTYPES[case.rows or case.dtype]
    hidden = torch.randn(case.positions, case.size).to(DTYPES[case.dtype])
    weight = (torch.randn(tree.num_rows, case.size + case.further) * 0.1).to(dtype)
    tensors = [hidden, weight] + [torch.randn(tree.num_rows).to(dtype)] * case.bias
    target = zipf_targets(tree, case.positions)
    target[::17], target[-1:] = -100, tree.vocab_size - 1
    if case.target == "all ignored":
        target.fill_(-100)
    return tensors, target, tree, torch.randn(case.positions)


def as_dense(rows: list[Any]) -> list[Tensor]:
    """Gradients of weight and bias as ordinary tensors."""
    return [each.to_dense() if isinstance(each, RowGradient) else each for each in rows]


def emulated(
    case: Case,
    given: Inputs,
    emulator: Emulator,
    run: Callable[[Launch], None] | None = None,
    use: Callable[[list[Any]], list[Tensor]] = as_dense,
) -> list[Tensor]:
    """nll, d_hidden and what `use` makes of the other gradients, by the compiled kernels."""
    (hidden, weight, *bias), target, tree, upstream = given
    with torch.autocast("cpu", hidden.dtype, enabled=bool(case.rows)):
        problem = Problem.of(hidden, weight, target, tree, bias[0] if bias else None)
    needs = Needs(hidden=True, weight=True, bias=case.bias, row_wise=case.row_wise)
    backend = TritonBackend()
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    with instrumented(capability=case.capability):
        tiles = tiles_for(problem)._replace(chunk=case.chunk)
    tiles = tiles._replace(forward=tiles.forward._replace(flatten=case.switched))
    hooks: dict[str, Any] = {"run": run, "tiles": tiles}
    with emulator, instrumented(capability=case.capability, **hooks):
        nll, _, saved = backend.nll(problem, needs)
        d_hidden, *rows = backend.backward(upstream, problem, saved, needs)
        assert d_hidden is not None
        found = [nll, d_hidden, *use([each for each in rows if each is not None])]
    torch.set_float32_matmul_precision("highest")
    missing = [emulator.allocations.unwritten_elements(each) for each in found]
    assert not any(missing), f"elements of nll and gradients that nobody wrote: {missing}"
    return found


def in_all_orders(
    case: Case, given: Inputs, use: Callable[[list[Any]], list[Tensor]] = as_dense
) -> list[Tensor]:
    """The results of `emulated`, which must be the same in all orders of programs."""
    torch.set_num_threads(1)
    results: list[list[Tensor]] = []
    for order in case.orders:
        torch.manual_seed(1)  # for the rounding of rows
        results.append(emulated(case, given, Emulator(case.capability, order), use=use))
        same = [torch.equal(a, b) for a, b in zip(results[-1], results[0], strict=True)]
        assert all(same), f"results in order {order} equal those in {case.orders[0]}: {same}"
    return results[0]


def check(case: Case) -> None:
    """Execute a case and raise unless the results are right."""
    tensors, target, tree, upstream = given = inputs(case)
    found = in_all_orders(case, given)
    baseline, truth = (
        gradients([each.to(kind) for each in tensors], target, tree, upstream, "reference")
        for kind in (DTYPES[case.dtype], torch.float64)
    )
    assert_errors_are_small([found, baseline, truth], 8 * EPSILON[case.dtype])


def check_far(case: Case) -> list[Run]:
    """Raise unless results are the same if the rows of saved tensors are far apart.

    Their rows are then `FAR` elements apart, in memory that takes no space where it is not written,
    so that offsets of the last ones need more than 32 bits. All other arguments are the same.

    Returns:
        The runs of launches with such rows.
    """
    torch.set_num_threads(1)
    given, emulator = inputs(case), Emulator(case.capability, recording=True)
    moved: dict[int, Tensor] = {}  # by address of what it takes the place of

    def far(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in moved:
            size, item = (len(tensor) * FAR, tensor.element_size())
            with TemporaryFile() as file:  # whose pages exist when they are written
                file.truncate(size * item)
                memory = mmap.mmap(file.fileno(), size * item)
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=size)
            moved[tensor.data_ptr()] = flat.as_strided(tensor.shape, (FAR, 1))
        return moved[tensor.data_ptr()]

    def run(launch: Launch) -> None:
        names = {"exp_logits", "errors", "block_max"} & values(launch).keys()
        changes: dict[str, Any] = {name: far(values(launch)[name]) for name in names}
        changes |= {"path_slots": FAR // SLOT, "path_blocks": FAR}
        arguments: dict[str, Any] = dict(launch.arguments)
        for name in arguments.keys() - CONSTANTS:
            fields = getattr(group := arguments[name], "_fields", ())
            if fields:
                arguments[name] = group._replace(**{n: changes[n] for n in fields if n in changes})
        execute(launch._replace(arguments=arguments))

    found = emulated(case, given, emulator, run)
    expected = emulated(case, given, Emulator(case.capability))
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert all(same), f"results with rows far apart are those of dense rows: {same}"
    return [each for each in emulator.history if len(each.request.tensors) > case.positions]


def check_bytes(case: Case) -> None:
    """Execute a case without a bias, and raise if a large tensor is moved more often than needed.

    Rows are read in the forward and for d_hidden, those of visited nodes alone; hidden vectors are
    read where they are sorted, and gradients written, once.
    """
    emulator = Emulator(case.capability, recording=True)
    given = (hidden, weight), *_ = inputs(case)
    emulated(case, given, emulator)
    found: Counter[str] = sum((run.memory.once() for run in emulator.history), Counter())
    expected = {"weight": 2 * num_visited_rows(given) * weight[0].nbytes, "hidden": hidden.nbytes}
    expected |= {"d_weight": weight.nbytes, "d_hidden": hidden.nbytes}
    assert {name: found[name] for name in expected} == expected


def num_visited_rows(given: Inputs) -> int:
    """The children of all nodes that targets visit."""
    (hidden, weight, *_), target, tree, _ = given
    problem = Problem.of(hidden.float(), weight.float(), target, tree)
    node = route(problem.target, problem.tree, problem.depth, problem.ignore_index).node
    return int(problem.tree.num_children[torch.unique(node[node >= 0])].sum())


def drawn(
    case: Case, emulator: Emulator, power: float, impossible: int | None = None
) -> tuple[Positions, Tensor]:
    """What the compiled kernel draws words for, and these; not all words at a temperature.

    Row `impossible` has logits of -∞.
    """
    (hidden, weight, *bias), _, tree, _ = inputs(case)
    positions = Positions(hidden.float(), weight, tree, bias[0] if bias else None)
    if bias and impossible is not None:
        bias[0][impossible] = -torch.inf
    if power != 1:
        positions.excluded = tree.row_of_word[: tree.vocab_size // 8]
    with emulator:
        return positions, fused.launch_draws(positions, torch.arange(len(hidden)), power)


def check_draws(case: Case, power: float) -> None:
    """Raise unless the compiled kernel draws the words of the trials, the same in all orders."""
    torch.set_num_threads(1)
    every = [drawn(case, Emulator(case.capability, order), power) for order in case.orders]
    (positions, words), *_ = every
    assert all(torch.equal(words, other) for _, other in every)
    assert positions.bias is not None
    hidden, weight, bias = (
        x.double() for x in (positions.hidden, positions.weight, positions.bias)
    )
    excluded = positions.excluded if positions.excluded is not None else words[:0]
    expected = [
        trials((h[None], weight, positions.tree, bias), seed, power, excluded, fused.NUM_TRIALS)
        for seed, h in enumerate(hidden)
    ]
    num_other = sum(map(int.__ne__, words.tolist(), expected))
    assert num_other <= 1, f"{num_other} of {len(hidden)} words differ"  # by rounding


def num_compilations(num_words: int, sizes: list[int]) -> int:
    """How many kernels Triton would compile for batches of several sizes.

    It compiles a kernel for the dtypes of tensors, for constants, and for numbers that are 1 or
    multiples of 16, unless these are not to be specialised.
    """
    tree = two_level(num_words, round(num_words**0.5))
    found = set()

    def compile_for(launch: Launch) -> None:
        key: list[object] = [launch.kernel.__name__, launch.tile]
        key += [x for name, x in launch.arguments.items() if name in CONSTANTS]
        for name, value in values(launch).items():
            if isinstance(value, Tensor):
                key.append(value.dtype)
            elif value is None:
                key.append(value)
            else:
                special = name not in VARYING
                key.append((value >= 2**31, special and (value == 1 or value % 16 == 0)))
        found.add(tuple(map(str, key)))

    for num_positions in sizes:
        problem = Problem.without_values(num_positions, 300, tree, torch.bfloat16)
        needs = Needs(hidden=True, weight=True, bias=True)
        with instrumented(run=compile_for, capability=90):
            nll, _, saved = TritonBackend().nll(problem, needs)
            TritonBackend().backward(nll, problem, saved, needs)
    return len(found)


def faults(
    capability: int, cases: list[Case], most: int | None, share: slice
) -> list[tuple[str, str, str]]:
    """Kind and name of a share of the faults put into the kernels, and how they are seen."""
    history = []
    for case in cases:
        emulator = Emulator(capability, recording=True)
        emulated(case._replace(capability=capability), inputs(case), emulator)
        history += emulator.history
    for impossible in (None, 0, -1):
        emulator = Emulator(capability, recording=True)
        drawn(cases[1]._replace(tree="shortlist", positions=24), emulator, 0.6, impossible)
        history += emulator.history
    judge = Judge(history)
    return [(one.kind, str(one), judge.verdict(one)) for one in judge.mutants(most)[share]]


def narrowed_products(case: Case) -> list[tuple[str, str]]:
    """Name of the narrowed products in kernels whose rows are far apart, and how they are seen."""
    judge = Judge(check_far(case))
    products = [each for each in judge.mutants() if each.kind == "narrowed product"]
    return [(str(one), judge.verdict(one)) for one in products[::5]]


def pool() -> ProcessPoolExecutor:
    """Processes in which kernels are compiled, not interpreted."""
    compiled = "import os; os.environ.pop('TRITON_INTERPRET', None)"  # before kernels are imported
    spawn = get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), spawn, initializer=exec, initargs=(compiled,))
