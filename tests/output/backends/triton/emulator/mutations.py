"""Faults put into compiled kernels on purpose: which of them the emulator sees.

`python -m tests.output.backends.triton.emulator.mutations` prints how many of each kind. A fault is
seen if the execution of its launch raises, or writes other values, or loads or stores other bytes.
A predicate whose removal none of these shows is true for every thread that reaches it, or keeps
threads from repeating what another thread of the program does: the mutant is equivalent.
"""

import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import as_completed
from itertools import product
from typing import NamedTuple

import numpy as np

from .access import Fault
from .allocations import Allocations
from .cases import Case, emulated, inputs, pool
from .execution import Code, Emulator, Request, Run, decoded

PATTERNS = {
    "barrier": re.compile(r"\tbar\.sync\s+0;"),
    "wait for copies": re.compile(r"\tcp\.async\.wait_group\s+\d+;"),
    "wait for products": re.compile(r"\twgmma\.wait_group\.sync\.aligned\s+\d+;"),
    "proxy fence": re.compile(r"\tfence\.proxy\.async[^\n]*;"),
    "memory order": re.compile(r"\.acq_rel(?=\.)"),
    "predicate": re.compile(r"@!?%p\d+\s+(?=(?:ld\.global|st\.global|cp\.async|atom)\b)"),
}
"""What is removed; a memory order becomes relaxed."""
MANY = 20
"""Times as many instructions as without a fault are taken for an endless loop."""


class Mutant(NamedTuple):
    """A kernel without one of its instructions."""

    kind: str
    launch: int  # of those of forward and backward
    begin: int  # in the PTX
    end: int

    def text(self, text: str) -> str:
        """The PTX with the fault."""
        instead = ".relaxed" if self.kind == "memory order" else ""
        return text[: self.begin] + instead + text[self.end :]


def recorded(case: Case) -> list[Request]:
    """The launches of a case, with the values before each."""
    emulator = Emulator(case.capability, Allocations(), requests=[])
    emulated(case, inputs(case), emulator)
    assert emulator.requests is not None
    return emulator.requests


def mutants(requests: list[Request]) -> list[Mutant]:
    """All faults of all kinds in the kernels of the launches, each kernel once."""
    found, seen = [], set()
    for i, request in enumerate(requests):
        if request.text not in seen:
            seen.add(request.text)
            found += [
                Mutant(kind, i, match.start(), match.end())
                for kind, pattern in PATTERNS.items()
                for match in pattern.finditer(request.text)
            ]
    return found


class Judge:
    """Executes mutants of the launches of a case."""

    def __init__(self, case: Case) -> None:
        self.requests = recorded(case)
        self._expected: dict[int, Run] = {}

    def verdict(self, mutant: Mutant) -> str:
        """How a fault is seen: "fault", "values", "bytes", or "not"."""
        request = self.requests[mutant.launch]
        if mutant.launch not in self._expected:
            right = Run(request, decoded(request.text), counting=True)
            self._expected[mutant.launch] = right
        expected = self._expected[mutant.launch]
        limit = MANY * expected.num_instructions
        try:
            found = Run(request, Code(mutant.text(request.text)), counting=True, limit=limit)
        except Fault:
            return "fault"
        if not np.array_equal(found.memory.data, expected.memory.data):
            return "values"
        one, other = found.memory, expected.memory
        return "not" if (one.loaded, one.stored) == (other.loaded, other.stored) else "bytes"


def judged(case: Case, share: slice, per_kind: int | None = None) -> list[tuple[Mutant, str, str]]:
    """Every mutant of a share: it, its instruction and how it is seen.

    Given a number, only so many of each kind, at random.
    """
    judge = Judge(case)
    chosen = mutants(judge.requests)
    if per_kind is not None:
        random.Random(0).shuffle(chosen)
        by_kind = [[each for each in chosen if each.kind == kind] for kind in PATTERNS]
        chosen = [each for of_kind in by_kind for each in of_kind[:per_kind]]
    found = []
    for mutant in chosen[share]:
        request = judge.requests[mutant.launch]
        line = request.text[mutant.begin :].lstrip().partition("\n")[0]
        place = f"{request.kernel} {request.text[: mutant.begin].count(chr(10)) + 1}: {line}"
        found.append((mutant, place, judge.verdict(mutant)))
    return found


def sampled(capability: int, per_kind: int) -> list[tuple[Mutant, str, str]]:
    """Some mutants of the kernels for an architecture, without the kinds that may be equivalent."""
    return judged(_case(capability), slice(None), per_kind)


def _case(capability: int) -> Case:
    return Case(capability, "bf16", positions=70)


def table(verdicts: Iterable[tuple[str, str]]) -> str:
    """Of every kind: how many mutants there are, are seen, and in which way."""
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in PATTERNS}
    for kind, verdict in verdicts:
        by_kind[kind][verdict] += 1
    lines = [f"{'':18}{'all':>6}{'seen':>6}{'fault':>7}{'values':>7}{'bytes':>7}"]
    for kind, counts in by_kind.items():
        seen = counts["fault"], counts["values"], counts["bytes"]
        lines.append(f"{kind:18}{counts.total():6}{sum(seen):6}" + "".join(f"{n:7}" for n in seen))
    return "\n".join(lines)


def main() -> None:
    """Print the table of two architectures, and what is not seen."""
    begin, num_shares = time.time(), 8
    found = []
    with pool() as executor:
        work = product((80, 90), range(num_shares))
        futures = [
            executor.submit(judged, _case(capability), slice(share, None, num_shares))
            for capability, share in work
        ]
        for future in as_completed(futures):
            found += future.result()
            print(table((mutant.kind, verdict) for mutant, _, verdict in found), flush=True)
    for mutant, place, verdict in found:
        if verdict == "not":
            print(f"not seen: {mutant.kind} in {place}")
    print(f"{time.time() - begin:.0f} s")
    seen = Counter(mutant.kind for mutant, _, verdict in found if verdict != "not")
    every = Counter(mutant.kind for mutant, *_ in found)
    enough = all(
        seen[kind] >= every[kind] * (0.9 if kind == "barrier" else 1)
        for kind in PATTERNS
        if kind != "predicate"
    )
    sys.exit(not enough)


if __name__ == "__main__":
    main()
