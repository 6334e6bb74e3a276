"""Hazards of asynchronous matrix products, found in the machine code (SASS) of a kernel for sm_90.

A warp-group product (`wgmma`, in SASS `HGMMA`) runs while the instructions after it are executed.
Until a `WARPGROUP.DEPBAR` has waited for it,

  - the registers of its left operand must not be overwritten,
  - its accumulators must be neither read nor overwritten by other instructions.

Before it begins, a `FENCE.VIEW.ASYNC` must make visible what asynchronous copies (`LDGSTS`) wrote
to the shared memory that it reads. Addresses are not followed: reported is a product that comes
after a wait for copies without any fence on the path. Code that breaks one of these rules has
results that depend on timing, so that a green test on a GPU proves nothing.

`hazards` follows every path through the code. On other architectures there is nothing to find:
products are synchronous on sm_80, and on sm_100 accumulators and operands are not in registers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)\b")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.(F32|F16)\S*\s+(?:R(\d+)|RZ),\s*(?:R(\d+)|gdesc)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE\s+gsb0,\s*0x([0-9a-f]+)")
BRANCH = re.compile(r"(?:BRA|CALL|JMP)\b.*?\b0x([0-9a-f]+)$")
WITHOUT_RESULT = re.compile(r"[A-Z]*SETP2?|FCHK|BAR|WARPSYNC|RET|BRX|JMX|NANOSLEEP|HGMMA")
"""Instructions whose first register operand is read."""
MAX_GROUPS = 8
"""Groups of products that may be in flight; more are taken as complete, the oldest first."""


class Instruction(NamedTuple):
    """One instruction of a kernel."""

    address: int
    text: str  # without the predicate
    predicate: str = ""

    @property
    def opcode(self) -> list[str]:
        """The opcode, split at its dots."""
        return self.text.split(" ", 1)[0].split(".")


class Hazard(NamedTuple):
    """A rule that is broken."""

    rule: str
    product: Instruction
    by: Instruction

    def __str__(self) -> str:
        return f"{self.by.address:#x} {self.by.text}: {self.rule} {self.product.address:#x}"


class State(NamedTuple):
    """What is in flight before an instruction: products by their place in the code."""

    groups: tuple[frozenset[int], ...] = ()  # the oldest first
    group: frozenset[int] = frozenset()  # not yet closed
    waited: bool = False  # for asynchronous copies
    fenced: bool = False


def disassemble(cubin: bytes, *command: Path | str) -> str:
    """What a disassembler, with its options, prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        arguments = [*map(str, command), file.name]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def parse_line(line: str) -> Instruction | None:
    """The instruction in a line of a listing; None if there is none."""
    match = LINE.match(line)
    return match and Instruction(int(match[1], 16), match[3], match[2] or "")


def parse(sass: str) -> list[Instruction]:
    """The instructions in a listing of `cuobjdump -sass`."""
    return [each for line in sass.splitlines() if (each := parse_line(line)) is not None]


def written(instruction: Instruction) -> range:
    """The registers that an instruction overwrites."""
    name, *kinds = instruction.opcode
    _, _, operands = instruction.text.partition(" ")
    if WITHOUT_RESULT.fullmatch(name):
        return range(0)
    while match := re.match(r"\s*!?U?P[T0-9]\w*,", operands):  # predicates come first
        operands = operands[match.end() :]
    first = re.match(r"\s*R(\d+)\b", operands)
    if not first:
        return range(0)
    count = 1
    if "128" in kinds or (name == "LDSM" and "4" in kinds) or name in ("IMMA", "DMMA"):
        count = 4
    elif name == "HMMA":
        count = 4 if "F32" in kinds else 2
    elif (
        {"64", "WIDE"} & set(kinds)
        or (name == "LDSM" and "2" in kinds)
        or (name == "CS2R" and "32" not in kinds)
        or name in ("DADD", "DMUL", "DFMA")
        or (name in ("F2F", "I2F") and kinds[:1] == ["F64"])
    ):
        count = 2
    return range(int(first[1]), int(first[1]) + count)


def operands(product: Instruction) -> tuple[range, range]:
    """The registers of a product's accumulators and of its left operand, if that is in registers.

    Raises:
        ValueError: if the product is of an unknown kind.
    """
    match = PRODUCT.match(product.text)
    if not match:
        raise ValueError(f"unknown product: {product.text}")
    count = int(match[1]) // (2 if match[2] == "F32" else 4)
    accumulators = range(int(match[3]), int(match[3]) + count) if match[3] else range(0)
    left = range(int(match[4]), int(match[4]) + 4) if match[4] else range(0)
    return accumulators, left


def successors(code: list[Instruction]) -> list[list[int]]:
    """The places of the instructions that may follow each instruction.

    Raises:
        ValueError: if the target of a branch is not in the code.
    """
    place = {instruction.address: i for i, instruction in enumerate(code)}
    returns = [i + 1 for i, instruction in enumerate(code) if instruction.opcode[0] == "CALL"]
    found = []
    for i, instruction in enumerate(code):
        name, follow = instruction.opcode[0], []
        if name in ("BRA", "CALL", "JMP"):
            target = BRANCH.match(instruction.text)
            if not target or int(target[1], 16) not in place:
                raise ValueError(f"unknown target: {instruction.text}")
            follow.append(place[int(target[1], 16)])
        elif name == "RET":
            follow += returns
        elif name in ("BRX", "JMX"):
            raise ValueError(f"unknown target: {instruction.text}")
        conditional = instruction.predicate or len(instruction.text.split(",")) > 1
        if name not in ("BRA", "CALL", "JMP", "RET", "EXIT") or conditional:
            follow.append(i + 1)
        found.append([j for j in follow if j < len(code)])
    return found


def hazards(sass: str) -> list[Hazard]:
    """The rules that a kernel breaks, one for each pair of instructions.

    Raises:
        ValueError: if the code has a product or a branch that is not understood.
    """
    code = parse(sass)
    follow = successors(code)
    registers = {i: operands(code[i]) for i in range(len(code)) if code[i].opcode[0] == "HGMMA"}
    found: dict[tuple[str, int, int], Hazard] = {}
    waiting: list[tuple[int, State]] = [(0, State())] if code else []
    seen = set(waiting)
    while waiting:
        i, state = waiting.pop()
        for rule, product in _broken(code[i], i, state, registers):
            found[rule, product, i] = Hazard(rule, code[product], code[i])
        after = _after(code[i], i, state)
        for j in follow[i]:
            if (j, after) not in seen:
                seen.add((j, after))
                waiting.append((j, after))
    return [found[key] for key in sorted(found)]


def num_register_operands(sass: str) -> int:
    """Products whose left operand is in registers: where the first rule can be broken."""
    products = [one for one in parse(sass) if one.opcode[0] == "HGMMA"]
    return sum(bool(operands(product)[1]) for product in products)


def _broken(
    instruction: Instruction, place: int, state: State, registers: dict[int, tuple[range, range]]
) -> Iterator[tuple[str, int]]:
    """Rules that an instruction breaks, with the place of the product."""
    if place in registers:
        if state.waited and not state.fenced:
            yield "follows copies without a fence: product", place
        return
    named = {int(number) for number in REGISTER.findall(instruction.text)}
    result = set(written(instruction))
    if not named:
        return
    for product in frozenset().union(*state.groups, state.group):
        accumulators, left = registers[product]
        if result & set(left):
            yield "overwrites an operand of the pending product", product
        if (named | result) & set(accumulators):
            yield "uses an accumulator of the pending product", product


def _after(instruction: Instruction, place: int, state: State) -> State:
    """What is in flight after an instruction."""
    text, opcode = instruction.text, instruction.opcode
    if opcode[0] == "HGMMA":
        group = state.group | {place}
        if "gsb0" not in text:
            return state._replace(group=group)
        return state._replace(groups=(*state.groups, group)[-MAX_GROUPS:], group=frozenset())
    if wait := WAIT.match(text):
        pending = int(wait[1], 16)
        return state._replace(groups=state.groups[len(state.groups) - pending :] if pending else ())
    if opcode[0] == "DEPBAR" and "SB0" in text:
        return state._replace(waited=True)
    if opcode[:3] == ["FENCE", "VIEW", "ASYNC"]:
        return state._replace(fenced=True)
    return state
