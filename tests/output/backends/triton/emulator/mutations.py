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
CASES = [
    Case(tree="two levels", positions=200, size=264),
    Case(tree="wide classes", positions=200, size=136),
    Case(tree="three levels", positions=200, size=136),
]
"""Problems that reach most of the kernels; a fault must be seen in one of them."""
MANY = 20
"""Times as many instructions as without a fault are taken for an endless loop."""


NOT_REACHED = "not reached"
"""Or a wait that never finds anything in flight."""


class Mutant(NamedTuple):
    """A kernel without one of its instructions, or with a weaker one."""

    kind: str
    kernel: str
    text: str  # PTX without the fault
    begin: int
    end: int

    @property
    def faulty(self) -> str:
        """The PTX with the fault."""
        instead = ".relaxed" if self.kind == "memory order" else ""
        return self.text[: self.begin] + instead + self.text[self.end :]

    @property
    def place(self) -> str:
        """Kernel, line and instruction."""
        before, line = self.text[: self.begin], self.text[self.begin :].lstrip()
        return f"{self.kernel} {before.count(chr(10)) + 1}: {line.partition(chr(10))[0]}"


class Judge:
    """Executes mutants of the launches of some cases."""

    def __init__(self, cases: list[Case]) -> None:
        self._requests: dict[str, list[Request]] = {}  # by PTX
        for case in cases:
            emulator = Emulator(case.capability, Allocations(), requests=[])
            emulated(case, inputs(case), emulator)
            for request in emulator.requests or []:
                self._requests.setdefault(request.text, []).append(request)
        self._expected: dict[str, list[Run]] = {}

    def mutants(self) -> list[Mutant]:
        """All faults of all kinds in the kernels of the launches."""
        return [
            Mutant(kind, requests[0].kernel, text, match.start(), match.end())
            for text, requests in self._requests.items()
            for kind, pattern in PATTERNS.items()
            for match in pattern.finditer(text)
        ]

    def verdict(self, mutant: Mutant) -> str:
        """How a fault is seen, in the first launch that shows it: "fault", "values", "bytes"."""
        requests, text = self._requests[mutant.text], mutant.text
        if text not in self._expected:
            self._expected[text] = [Run(each, decoded(text), counting=True) for each in requests]
        instruction = _instruction_at(mutant)
        block = next(b for b in decoded(text).kernel.blocks() if instruction in b)
        verdict = NOT_REACHED
        for request, expected in zip(requests, self._expected[text], strict=True):
            if block.start in expected.reached:
                verdict = _compared(request, mutant.faulty, expected)
                if verdict != "not":
                    break
        waits = verdict == "not" and mutant.kind.startswith("wait")
        idle = waits and not any(instruction in run.useful for run in self._expected[text])
        return NOT_REACHED if idle else verdict


def _instruction_at(mutant: Mutant) -> int:
    """The index of the instruction that is changed."""
    head = mutant.text[: mutant.begin]
    whole = decoded(mutant.text).kernel.instructions
    body = head[head.index("{", head.index(".entry")) :]
    body = re.sub(r"//[^\n]*|\.reg[^;]*;|\n\s*\.(?:loc|file|pragma)[^\n]*", "", body)
    index = body.count(";")
    assert 0 <= index < len(whole)
    return index


def _compared(request: Request, faulty: str, expected: Run) -> str:
    limit = MANY * expected.num_instructions
    try:
        found = Run(request, Code(faulty), counting=True, limit=limit)
    except Fault:
        return "fault"
    one, other = found.memory, expected.memory
    if not np.array_equal(one.data, other.data):
        return "values"
    return "not" if (one.loaded, one.stored) == (other.loaded, other.stored) else "bytes"


def judged(capability: int, share: slice, per_kind: int | None = None) -> list[tuple[Mutant, str]]:
    """Every mutant of a share, and how it is seen.

    Given a number, only so many of each kind, at random.
    """
    judge = Judge([case._replace(capability=capability) for case in CASES])
    chosen = judge.mutants()
    if per_kind is not None:
        random.Random(0).shuffle(chosen)
        by_kind = [[each for each in chosen if each.kind == kind] for kind in PATTERNS]
        chosen = [each for of_kind in by_kind for each in of_kind[:per_kind]]
    return [(mutant, judge.verdict(mutant)) for mutant in chosen[share]]


def table(verdicts: Iterable[tuple[str, str]]) -> str:
    """Of every kind: how many mutants are reached and seen, and in which way."""
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in PATTERNS}
    for kind, verdict in verdicts:
        by_kind[kind][verdict] += 1
    ways = ("fault", "values", "bytes", "not")
    lines = [f"{'':18}{'all':>6}{'reached':>9}{'seen':>6}" + "".join(f"{w:>8}" for w in ways)]
    for kind, counts in by_kind.items():
        reached = counts.total() - counts[NOT_REACHED]
        numbers = "".join(f"{counts[way]:8}" for way in ways)
        seen = reached - counts["not"]
        lines.append(f"{kind:18}{counts.total():6}{reached:9}{seen:6}{numbers}")
    return "\n".join(lines)


def main() -> None:
    """Print the table of two architectures, and what is not seen.

    An argument is how many of each kind are taken at random; all without one.
    """
    begin, num_shares = time.time(), 4
    per_kind = int(sys.argv[1]) if len(sys.argv) > 1 else None
    found = []
    with pool() as executor:
        futures = [
            executor.submit(judged, capability, slice(share, None, num_shares), per_kind)
            for share, capability in product(range(num_shares), (80, 90))
        ]
        for future in as_completed(futures):
            found += future.result()
            print(table((mutant.kind, verdict) for mutant, verdict in found), flush=True)
    for mutant, verdict in found:
        if verdict in {"not", NOT_REACHED}:
            print(f"{verdict} seen: {mutant.kind} in {mutant.place}")
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
