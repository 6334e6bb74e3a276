"""The loops of a compiled kernel: how many machine instructions one iteration of each issues.

The disassembler names the source lines that an instruction comes from, the function that it is
written in first and then the calls that it is inlined at. A loop of the machine code is attributed
to the loop of the source that most of its instructions are written in.
"""

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import triton

from scripts.kernels.sass import Instruction, disassemble, parse_line, written

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
TOP, SOURCES = Path(__file__).resolve().parents[2], "/lm/output/"
WARPS_PER_GROUP = 4
"""Warps that issue a wgmma together."""
_LINE = re.compile(r'File "([^"]+)", line (\d+)( inlined at)?')
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA.*?`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\b(?:UR|R|UP|P)\d+\b")
_GLOBAL_LOAD = re.compile(r"(LDG|LDGSTS|ATOMG|UTMALDG|LD)\b")
_MATRIX = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)|\bHMMA\.(16)(8)(\d+)")

Place = tuple[str, int]
"""File and line."""


class Loop(NamedTuple):
    """A loop of the machine code, without the loops inside it."""

    name: str  # of the source loop: "function:variable"; of the function outside of all loops
    instructions: int  # of an iteration
    matrix_flops: int  # of an iteration, a warp's share, on tensor cores
    waits: int  # loads from global memory that wait for one another
    innermost: bool = False  # whether no other loop is inside it


class Located(NamedTuple):
    """An instruction, and where in the source it comes from."""

    instruction: Instruction
    places: tuple[Place, ...]  # innermost function first


@lru_cache(64)
def loops(cubin: bytes) -> list[Loop]:
    """What is outside of all loops, by function, and the loops in the order of their addresses.

    Functions are those that the kernel itself calls, in the order of the calls; "" is the kernel.
    """
    located, labels = _disassembled(cubin)
    merged: dict[int, int] = {}  # first address to last
    for address, text, _ in (each.instruction for each in located):
        branch = _BRANCH.search(text)
        begin = labels[branch[1]] if branch else address
        if begin < address:  # a `continue` jumps to the head as well
            merged[begin] = max(address, merged.get(begin, 0))
    inside: dict[int | None, list[Located]] = {begin: [] for begin in merged}
    inside[None] = []
    for each in located:
        address = each.instruction.address
        around = [begin for begin, end in merged.items() if begin <= address <= end]
        inside[max(around, default=None)].append(each)
    parts: dict[tuple[int, str], list[Located]] = {}
    for each in _without_unrolled(inside.pop(None), inside):
        parts.setdefault(_part(each.places), []).append(each)
    found = [Loop(name, len(body), 0, waits(body)) for (_, name), body in sorted(parts.items())]
    for begin in sorted(merged):
        body = inside[begin]
        depth = sum(first <= begin <= last for first, last in merged.items())
        innermost = not any(begin < other <= merged[begin] for other in merged)
        flops = sum(_matrix_flops(each.instruction.text) for each in body)
        found.append(Loop(_name(body, depth), len(body), flops, waits(body), innermost))
    return found


def _without_unrolled(
    outside: list[Located], inside: Mapping[int | None, list[Located]]
) -> list[Located]:
    """What is outside of all loops, without whole iterations of loops that are there as well."""
    length: Counter[str] = Counter()
    for body in inside.values():
        name = _name(body, 1)
        length[name] = min(length[name] or len(body), len(body))
    written = Counter(_source_loops(each.places)[-1] for each in outside)
    unrolled = {name for name in length if ":" in name and written[name] >= length[name]}
    return [each for each in outside if _source_loops(each.places)[-1] not in unrolled]


def _part(places: tuple[Place, ...]) -> tuple[int, str]:
    """Line of the call in the kernel and function called; 0 and "" for the kernel itself."""
    if len(places) < 2 or Path(places[-1][0]).parent != Path(places[-2][0]).parent:
        return 0, ""
    return places[-1][1], _function(*places[-2])


def _name(body: list[Located], depth: int) -> str:
    # a prologue of the loops inside is written in them, but cannot be in more loops than this one
    chains = Counter(_source_loops(each.places)[:depth] for each in body)
    return chains.most_common(1)[0][0][-1]


def waits(body: Sequence[Located]) -> int:
    """The longest chain of global loads whose addresses depend on one another.

    In the order of the code; shared memory counts as a single register. What a predicate skips may
    leave the result of an earlier load.
    """
    chain: dict[str, int] = {}
    for each in (located.instruction for located in body):
        operation, *operands = (_REGISTER.findall(part) for part in each.text.split(","))
        target, sources = operation[:1], operation[1:] + [r for part in operands for r in part]
        target += [f"R{number}" for number in written(each)]
        if each.opcode[0].startswith("ST") or each.opcode[0] == "LDGSTS":
            target, sources = ["shared"] if "STS" in each.text else [], target + sources
        if each.opcode[0] in ("LDS", "LDSM"):
            sources.append("shared")
        sources += _REGISTER.findall(each.predicate)
        depth = max((chain.get(register, 0) for register in sources), default=0)
        depth += bool(_GLOBAL_LOAD.match(each.text))
        for register in target:
            chain[register] = max(depth, chain.get(register, 0) if each.predicate else 0)
    return max(chain.values(), default=0)


def _matrix_flops(text: str) -> int:
    found = _MATRIX.search(text)
    if not found:
        return 0
    m, n, k = (int(size) for size in found.groups() if size is not None)
    return 2 * m * n * k // (WARPS_PER_GROUP if "HGMMA" in text else 1)


def _disassembled(cubin: bytes) -> tuple[list[Located], dict[str, int]]:
    located: list[Located] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    places: list[Place] = []
    complete = True
    for line in disassemble(cubin, DISASSEMBLER, "-c", "-gi").splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif place := _LINE.search(line):
            places = [*([] if complete else places), (_source(place[1]), int(place[2]))]
            complete = place[3] is None
        elif found := parse_line(line):
            labels |= dict.fromkeys(waiting, found.address)
            waiting = []
            located.append(Located(found, tuple(places)))
    return located, labels


def _source_loops(places: tuple[Place, ...]) -> tuple[str, ...]:
    """The source loops around an instruction, outermost first."""
    return tuple(
        name
        for file, line in reversed(places)
        for first, last, name in _loops_of_file(file)
        if first <= line <= last
    ) or ("",)


def _source(file: str) -> str:
    """A file of this copy of the project; a kernel may have been compiled in another copy."""
    _, package, rest = file.rpartition(SOURCES)
    return str(TOP / package.strip("/") / rest) if package else file


@cache
def _function(file: str, line: int) -> str:
    """The function around a line."""
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return ""


@cache
def _loops_of_file(file: str) -> list[tuple[int, int, str]]:
    """First and last line and name of each loop of a file that is not unrolled."""
    found = []
    for function in ast.walk(ast.parse(Path(file).read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.For) and "static_range" not in ast.unparse(node.iter):
                name = ast.unparse(node.target)
            elif isinstance(node, ast.While):
                name = "while"
            else:
                continue
            found.append((node.lineno, node.end_lineno or 0, f"{function.name}:{name}"))
    return sorted(found)
