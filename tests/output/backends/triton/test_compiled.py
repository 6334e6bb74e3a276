"""The kernels as they are compiled for a GPU, executed by an emulator, with checks for races,
memory errors and asynchronous operations that are not waited for.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product

import pytest

pytest.importorskip("triton")

from .emulator.cases import DTYPES, ORDERS, Case, check, pool

SIZES = (64, 33, 40)
CASES = [
    Case(capability, dtype, tree, SIZES[i % 3], row_wise=i % 2 == 1)
    for i, (tree, capability, dtype) in enumerate(
        product(
            ("two levels", "root only", "three levels", "binary", "classes of one word"),
            (80, 90),
            DTYPES,
        )
    )
]
"""Every dtype and architecture for every tree; widths and kinds of gradients in turn."""
CASES += [Case(capability, dtype, orders=ORDERS) for capability in (80, 90) for dtype in DTYPES]
CASES += [Case(90, "bf16", target="all ignored"), Case(80, "bf16", bias=False, row_wise=True)]

Results = dict[Case, "Future[Counter[str]]"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """Of the cases whose tests run, computed by other processes in that order."""
    parameters = [
        item.callspec.params for item in request.session.items if hasattr(item, "callspec")
    ]
    cases = dict.fromkeys(each["case"] for each in parameters if "case" in each)
    with pool() as executor:
        yield {case: executor.submit(check, case) for case in cases}
        executor.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels_are_right(case: Case, results: Results) -> None:
    results[case].result()
