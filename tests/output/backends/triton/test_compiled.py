"""The kernels as they are compiled for a GPU, executed by an emulator that checks for races, memory
errors and asynchronous operations that are not waited for.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product

import pytest

pytest.importorskip("triton")

from ....scripts.benchmarks.test_kernel_model import GRADIENTS, LARGE
from .emulator.cases import DTYPES, ORDERS, Case, check, pool
from .emulator.counts import counts
from .emulator.mutations import KINDS, NOT_SEEN, SEEN, judged, summary

KINDS_OF_CODE = list(product((80, 90), DTYPES))
SIZES = (136, 33, 136, 136, 33, 264, 136, 33)
OTHER_TREES = ("root only", "three levels", "binary", "classes of one word")
FIRST = [
    Case(*kind, size=size, further=-size % 8, row_wise=i % 2 == 1, orders=ORDERS)
    for i, (kind, size) in enumerate(zip(KINDS_OF_CODE, SIZES, strict=True))
]
CASES = [
    *FIRST,
    *(
        case._replace(tree=OTHER_TREES[(i + i // 4) % 4], orders=("together",))
        for i, case in enumerate(FIRST)
    ),
    FIRST[4]._replace(orders=("together",), target="all ignored"),
    Case(90, "bf16", size=128, bias=False),
]
"""Every dtype and architecture with two levels, in all orders of programs, and with one other tree,
so that each tree is with both architectures; widths and kinds of gradients in turn. The longer grid
is `python -m tests.output.backends.triton.emulator.cases`.
"""
COUNTED = [
    Case(tree="two levels", size=128, bias=False),
    Case(tree="three levels", size=128, positions=150, bias=False),
]
"""Rows are sectors of the caches, in the dtype and on the architecture of the model."""
MUTATED = [Case(size=264, positions=120), Case(tree="three levels", size=136)]
NUM_MUTANTS = 2
"""Of each kind in each kernel of an architecture."""

Results = dict[Case, "Future[Counter[str]]"]


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessPoolExecutor]:
    """Processes in which kernels are compiled."""
    with pool() as processes:
        yield processes
        processes.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, executor: ProcessPoolExecutor) -> Results:
    """Of the cases whose tests run, in that order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [each["case"] for each in parameters if isinstance(each.get("case"), Case)]
    return {case: executor.submit(check, case) for case in cases if isinstance(case, Case)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels_are_right(case: Case, results: Results) -> None:
    assert not results[case].result(), "threads of a warp wrote different values to one place"


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_counts_of_the_model_are_those_of_the_compiled_kernels(
    case: Case, executor: ProcessPoolExecutor
) -> None:
    """Of `node_of_row`, the compiler loads what it needs in two layouts twice."""
    found = executor.submit(counts, case).result()
    assert sum(each.products > 0 for each in found) >= 3
    for each in found:
        assert each.products == pytest.approx(each.model_products, rel=1e-9), each.kernel
        if not each.model.memory:
            continue
        names = (*LARGE, "hidden")
        loaded = sum(each.loaded[name] for name in names) + each.once["node_of_row"]
        assert loaded == each.model.loaded, each.kernel
        once = sum(each.once[name] for name in (*names, *GRADIENTS, "block_max", "node_of_row"))
        assert once == each.model.memory, each.kernel
        for name in ("sorted_hidden", "weight", "errors", "exp_logits", "hidden"):
            assert each.sectors[name] == each.loaded[name], f"{each.kernel}: {name}"


def test_faults_put_into_the_kernels_are_seen(executor: ProcessPoolExecutor) -> None:
    """Some predicates have no effect: see `emulator.mutations`."""
    futures = [executor.submit(judged, sm, MUTATED, NUM_MUTANTS) for sm in (80, 90)]
    found = [each for future in futures for each in future.result()]
    missed = [name for kind, name, verdict in found if verdict == NOT_SEEN and kind != "predicate"]
    assert not [name for name in missed if not name.startswith("barrier")]
    seen = {kind: sum(counts[each] for each in SEEN) for kind, counts in summary(found).items()}
    assert all(seen[kind] for kind in KINDS)
    assert seen["barrier"] >= 0.9 * (seen["barrier"] + len(missed))
