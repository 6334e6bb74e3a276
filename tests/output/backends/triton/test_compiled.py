"""The kernels as they are compiled for a GPU, executed by an emulator that checks for races, memory
errors and asynchronous operations that are not waited for.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product

import pytest

pytest.importorskip("triton")

from .emulator.cases import DTYPES, ORDERS, Case, check, pool
from .emulator.mutations import NOT_REACHED, PATTERNS, judged

KINDS = list(product((80, 90), DTYPES))
SIZES = (136, 33, 264)
CASES = [
    Case(
        capability,
        dtype,
        tree,
        SIZES[j % 3],
        row_wise=(i + j) % 2 == 1,
        orders=ORDERS if i == 0 else ("together",),
    )
    for i, tree in enumerate(
        ("two levels", "root only", "three levels", "binary", "classes of one word")
    )
    for j, (capability, dtype) in enumerate(KINDS)
]
"""Every dtype and architecture for every tree, all orders of programs for the first one; widths and
kinds of gradients in turn.
"""
CASES += [Case(90, "bf16", target="all ignored"), Case(80, "bf16", bias=False, row_wise=True)]
NUM_MUTANTS = 2
"""Of each kind, in the kernels of each architecture."""

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


def test_faults_put_into_the_kernels_are_seen(executor: ProcessPoolExecutor) -> None:
    """Some of those that are reached are not faults: what they remove has no effect there."""
    futures = [executor.submit(judged, sm, slice(None), NUM_MUTANTS) for sm in (80, 90)]
    found = [each for future in futures for each in future.result()]
    reached = [(mutant.kind, verdict) for mutant, verdict in found if verdict != NOT_REACHED]
    seen = Counter(kind for kind, verdict in reached if verdict != "not")
    assert set(seen) == set(PATTERNS)
    assert seen.total() >= 0.7 * len(reached)
