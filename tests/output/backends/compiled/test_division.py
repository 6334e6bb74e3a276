"""The division of compiled loops among threads."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.compiled import division

from ...definition import gradients, nll, problem, two_level


@pytest.fixture(params=["OpenMP's threads", "others"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What divides work: the threads of PyTorch's OpenMP library, or without it others."""
    if request.param == "others":
        monkeypatch.setattr(division, "_openmp", lambda _: None)
    elif sys.platform != "linux" or {"OMP_THREAD_LIMIT", "OMP_DYNAMIC"} & os.environ.keys():
        pytest.skip("on Linux, with as many threads as asked for")
    return str(request.param)


@pytest.mark.parametrize(
    ("threads", "dtype"),
    [("OpenMP's threads", torch.bfloat16), ("others", torch.float32)],
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "LEAST_COLUMNS", 0)
    tree = ClassTree.balanced(3000, 12)
    *inputs, target = problem(tree, 333, size=37, dtype=dtype)
    upstream, found = torch.randn(333), []
    for num_threads in (1, 2, 3, 7):
        torch.set_num_threads(num_threads)
        found.append(gradients(inputs, target, tree, upstream, "compiled"))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_parts_run_side_by_side_and_hold_nothing_afterwards(threads: str) -> None:
    class Argument:
        pass

    barrier, parts, names = threading.Barrier(3, timeout=60), [], set()

    def loops(begin: int, end: int, argument: Argument) -> None:
        barrier.wait()
        parts.append((begin, end))
        names.add(threading.current_thread().name.split("_")[0])

    argument = Argument()
    reference = weakref.ref(argument)
    gc.disable()
    try:
        division.divide([0, 4, 5, 9], loops, argument)
        del argument
        assert reference() is None
    finally:
        gc.enable()
    assert sorted(parts) == [(0, 4), (4, 5), (5, 9)]
    assert ("sqrtlm" in names) == (threads == "others")


def test_parts_that_no_thread_took_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    monkeypatch.setattr(division, "_in_threads", lambda *_: None)
    division.divide([0, 4, 5], lambda *part: parts.append(part))
    assert parts == [(0, 4), (4, 5)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_any_thread_is_raised(failing: int) -> None:
    def loops(begin: int, end: int) -> None:
        if begin == failing:
            raise KeyboardInterrupt(begin)

    with pytest.raises(KeyboardInterrupt, match=str(failing)):
        division.divide([0, 1, 2, 3], loops)


def test_no_interrupt_is_lost() -> None:
    """A signal is handled at any time; without its error all parts have run.

    Not with threads of our own: what `concurrent.futures` does with an interrupt is its own.
    """
    if division._openmp(os.getpid()) is None:
        pytest.skip("requires OpenMP's threads")
    parts, raised, num = [], 0, 200

    def loops(begin: int, end: int) -> None:
        time.sleep(5e-4)
        parts.append(begin)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    gc.disable()  # Python drops errors that are raised within finalizers
    try:
        for turn in range(num):
            try:
                parts.clear()
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 20 * 3e-5)
                division.divide([0, 1, 2, 3, 4], loops)
                assert sorted(parts) == [0, 1, 2, 3]
                for _ in range(1000):  # another thread may have got the signal
                    time.sleep(1e-3)
            except KeyboardInterrupt:
                raised += 1
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert raised == num


def _loss() -> float:
    torch.manual_seed(1)
    tree = two_level(4000, 60)
    *inputs, target = problem(tree, 600, dtype=torch.float32)
    return float(nll([*inputs, target], tree, reduction="mean", backend="compiled").detach())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # OpenMP's would not survive a fork
    expected, context = _loss(), multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(_loss()))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join()
