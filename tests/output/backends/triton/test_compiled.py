"""The kernels as they are compiled for a GPU, executed by an emulator that checks for races, memory
errors and asynchronous operations that are not waited for.
"""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product

import pytest

pytest.importorskip("triton")

from scripts.kernels.emulator.judge import NOT_SEEN, ORDERING, SEEN
from scripts.kernels.emulator.mutations import KINDS

from .cases import (
    DTYPES,
    ORDERS,
    TREES,
    Case,
    check,
    check_bytes,
    check_draws,
    faults,
    narrowed_products,
    num_compilations,
    pool,
)
from .steps import check_step, check_updates

KINDS_OF_CODE = list(product((80, 90), DTYPES))
ROWS = {"bf16": "fp32", "fp16": "fp32", "tf32": "", "fp32": ""}
UNEQUAL = Case(tree="classes of 1 to 300 words", size=136, positions=200)
LONGER = UNEQUAL._replace(size=160, positions=333, rows="fp32")
CASES = [
    Case(80, "bf16", size=136),
    Case(80, "fp16", size=33, further=7, row_wise=True, orders=ORDERS),
    Case(80, "tf32", size=136),
    Case(80, "fp32", size=136, row_wise=True, orders=ORDERS),
    Case(90, "bf16", size=33, further=7, orders=ORDERS),
    Case(90, "fp16", size=264, row_wise=True),
    Case(90, "tf32", size=136, orders=ORDERS, switched=True),
    Case(90, "fp32", size=33, further=7, row_wise=True),
    Case(80, "fp16", "three levels", 33, 7, row_wise=True, rows="fp32"),
    Case(80, "fp32", "classes of one word", 136, row_wise=True),
    Case(90, "bf16", "three levels", 33, 7, rows="fp32"),
    Case(90, "tf32", "classes of one word", 136, switched=True),
    LONGER._replace(capability=80, bias=False),
    LONGER,
    LONGER._replace(dtype="fp16"),
    Case(90, "bf16", size=33, further=7, target="all ignored"),
]
"""Every dtype and architecture with two levels, half of them in all orders of programs; then other
trees, and classes of unequal sizes, whose children take several splits and blocks. `GRID` has all
combinations.
"""
GRID = [
    Case(*kind, tree, size, -size % 8 * row_wise, 90 if row_wise else 200, row_wise, ORDERS)
    for kind, tree, size, row_wise in product(
        KINDS_OF_CODE, TREES, (64, 33, 40, 100), (False, True)
    )
]
for kind in KINDS_OF_CODE:
    GRID += [
        Case(*kind, size=300, positions=1000, tree="wide classes"),
        *(Case(*kind, tree, 300, 4, 333, rows=ROWS[kind[1]]) for tree in TREES),
        Case(*kind, bias=False),
        Case(*kind, target="all ignored"),
        Case(*kind, positions=1),
    ]
"""Every dtype and architecture, tree, width and kind of gradient, in all orders."""
STEPS = [
    (Case(80, "bf16", size=72, row_wise=True, rows="fp32", orders=ORDERS), "adagrad"),
    (Case(90, "bf16", row_wise=True, rows="fp32", further=16, orders=ORDERS), "adam"),
    (Case(80, "fp32", "three levels", 40, 16, row_wise=True), "adam"),
    (Case(90, "fp32", "classes of one word", 33, 7, row_wise=True), "adagrad, clipped"),
    (Case(90, "bf16", "shortlist", 72, row_wise=True), "sgd"),
    (Case(80, "fp16", "classes of 1 to 300 words", 33, 7, positions=200, row_wise=True), "sgd"),
    (Case(90, "tf32", "two levels", 72, row_wise=True, target="all ignored"), "adagrad, clipped"),
    (Case(90, "bf16", "two levels", 72, row_wise=True, orders=ORDERS), "adagrad, clipped"),
]
"""Problems and the optimizer whose step is made from the factors of their gradients. Powers of two
that divide their sizes are those of `CASES`, so that most kernels are compiled once for both.
"""
COUNTED = [
    Case(tree="classes of 1 to 300 words", size=128, positions=200, bias=False, rows="fp32"),
    Case(80, tree="three levels", size=128, positions=150, bias=False),
]
THREE_LEVELS = Case(tree="three levels", size=136)
WIDE = Case(tree="wide classes", size=136, positions=97)
MUTATED = [THREE_LEVELS, UNEQUAL]
ALL_MUTATED = [
    THREE_LEVELS._replace(positions=200),
    WIDE,
    UNEQUAL,
    WIDE._replace(target="all ignored"),
    WIDE._replace(size=160, rows="fp32"),
    LONGER._replace(chunk=128),
    WIDE._replace(size=160, rows="fp32", target="all ignored"),
]
"""Problems that reach most of the kernels; a fault must be seen in one of them. Those with rows of
one dtype have one size, so that their kernels are the same. The smaller ones come first. With rows
in fp32, a step of a chunk takes 64 visits: what is copied ahead of the last step of two, and
overwrites what follows unless it is waited for, exists in chunks of more than 64 alone.
"""
NUM_MUTANTS, ALL_MUTANTS = 2, 3
"""Mutants of each kind in each kernel of an architecture."""
SCAN = "(standard.py:"
"""Where a scan is written: in Triton."""

Results = dict[Case, "Future[None]"]


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessPoolExecutor]:
    """Processes in which kernels are compiled."""
    with pool() as processes:
        yield processes
        processes.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, executor: ProcessPoolExecutor) -> Results:
    """Results of the cases whose tests run, in that order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = [each["case"] for each in parameters if isinstance(each.get("case"), Case)]
    return {case: executor.submit(check, case) for case in cases if isinstance(case, Case)}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in GRID)], ids=str
)
def test_compiled_kernels_are_right(case: Case, results: Results) -> None:
    results[case].result()


@pytest.mark.parametrize(
    ("step_of", "name"),
    [
        *STEPS[:3:2],
        STEPS[-1],
        *(pytest.param(*each, marks=pytest.mark.long) for each in [STEPS[1], *STEPS[3:-1]]),
    ],
    ids=str,
)
def test_steps_from_factors_are_right(
    step_of: Case, name: str, executor: ProcessPoolExecutor
) -> None:
    executor.submit(check_step, step_of, name).result()


@pytest.mark.parametrize(
    ("drawing", "power"),
    [
        (UNEQUAL._replace(positions=40, orders=ORDERS), 1.0),
        (Case(80, "fp16", "three levels", 33, positions=24, orders=ORDERS), 1.0),
        (Case(80, "fp32", "wide classes", 136, positions=12, orders=ORDERS), 0.6),
    ],
    ids=str,
)
def test_compiled_draws_are_right(
    drawing: Case, power: float, executor: ProcessPoolExecutor
) -> None:
    executor.submit(check_draws, drawing, power).result()


@pytest.mark.parametrize(
    ("step_of", "name"),
    [
        (Case(90, tree="classes of 1 to 300 words", positions=333, rows="fp32"), "adagrad"),
        pytest.param(
            Case(90, tree="three levels", size=72, positions=150), "adam", marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_updates_read_and_write_visited_rows_once(
    step_of: Case, name: str, executor: ProcessPoolExecutor
) -> None:
    executor.submit(check_updates, step_of._replace(row_wise=True), name).result()


@pytest.mark.parametrize("num_words", [33_278, 10_000_000])
def test_batches_of_many_sizes_share_compiled_kernels(
    num_words: int, executor: ProcessPoolExecutor
) -> None:
    """The seven kernels, and the sort once more for each length of runs."""
    generator = random.Random(0)
    sizes = [int(2 ** generator.uniform(0, 16)) for _ in range(200)]
    assert executor.submit(num_compilations, num_words, sizes).result() <= 12


@pytest.mark.parametrize(
    "counted",
    [COUNTED[0], *(pytest.param(case, marks=pytest.mark.long) for case in COUNTED[1:])],
    ids=str,
)
def test_rows_are_read_twice_and_gradients_written_once(
    counted: Case, executor: ProcessPoolExecutor
) -> None:
    executor.submit(check_bytes, counted).result()


@pytest.mark.parametrize(
    ("cases", "most", "shares"),
    [(MUTATED, NUM_MUTANTS, 1), pytest.param(ALL_MUTATED, ALL_MUTANTS, 4, marks=pytest.mark.long)],
)
def test_faults_put_into_the_kernels_are_seen(
    cases: list[Case], most: int, shares: int, executor: ProcessPoolExecutor
) -> None:
    """Some predicates have no effect: see `scripts.kernels.emulator.judge`.

    Nor have most faults in the scans of `_plan`: of the lists of heavy nodes, a warp has at most
    one entry, since a heavy node has more visits than a warp has threads; the rest adds zeros.
    """
    futures = [
        executor.submit(faults, capability, cases, most, slice(share, None, shares))
        for share, capability in product(range(shares), (80, 90))
    ]
    every = [each for future in futures for each in future.result()]
    found = [
        (kind, name, verdict)
        for kind, name, verdict in every
        if verdict != NOT_SEEN or not ("in _plan" in name and SCAN in name)
    ]
    missed = Counter(kind for kind, _, verdict in found if verdict == NOT_SEEN)
    seen = Counter(kind for kind, _, verdict in found if verdict in SEEN)
    names = [name for kind, name, verdict in found if verdict == NOT_SEEN and kind != "predicate"]
    assert not any(missed[kind] for kind in ORDERING - {"barrier"}), names
    assert all(seen[kind] for kind in KINDS if kind != "narrowed product"), seen
    assert seen["barrier"] >= 0.9 * (seen["barrier"] + missed["barrier"]), names
    changed = {*KINDS} - ORDERING - {"predicate"}
    num_seen, num_missed = (sum(count[kind] for kind in changed) for count in (seen, missed))
    assert num_seen >= 0.95 * (num_seen + num_missed), names


@pytest.mark.long
def test_products_narrowed_to_32_bits_are_seen_if_rows_are_far_apart(
    executor: ProcessPoolExecutor,
) -> None:
    found = executor.submit(narrowed_products, Case(tree="wide classes", positions=140)).result()
    assert sum(verdict in SEEN for _, verdict in found) >= 4
    assert not [name for name, verdict in found if verdict == NOT_SEEN]
