"""PTX text into instructions, and what can be said of registers before a program runs."""

import re
from dataclasses import dataclass, field
from itertools import pairwise

REGISTER = re.compile(r"%[A-Za-z]\w*(?:\.[xyz])?")
NO_DESTINATION = {
    "st", "bra", "bar", "barrier", "cp", "stmatrix", "red", "fence",
}  # fmt: skip
"""Instructions whose first operand is not written."""
SUSPENDING = {"bar", "barrier", "atom", "red"}
"""Instructions at which a program may wait for others."""


class Unsupported(Exception):
    """An instruction, or a form of one, that the emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard fields operands`."""

    index: int
    text: str
    fields: tuple[str, ...]  # of the name: ("ld", "global", "b32")
    operands: tuple[str, ...]
    guard: str | None  # the predicate register, without `!`
    guard_is_negated: bool
    source: str  # "file:line:column", with the calls that it is inlined at; "" if not known

    def __str__(self) -> str:
        return f"#{self.index}: {self.text}" + (f" ({self.source})" if self.source else "")

    @property
    def mnemonic(self) -> str:
        """The first field of the name."""
        return self.fields[0]

    def has(self, field: str) -> bool:
        """Whether a field of the name is `field`."""
        return field in self.fields

    @property
    def writes(self) -> frozenset[str]:
        """Registers that the instruction writes."""
        if self.mnemonic in NO_DESTINATION or not self.operands:
            return frozenset()
        return frozenset(REGISTER.findall(self.operands[0]))

    @property
    def reads(self) -> frozenset[str]:
        """Registers that the instruction reads."""
        keeps = self.mnemonic in NO_DESTINATION or self.mnemonic == "wgmma"
        names = REGISTER.findall(" ".join(self.operands[0 if keeps else 1 :]))
        return frozenset(names if self.guard is None else [*names, self.guard])


@dataclass
class Kernel:
    """A parsed kernel."""

    name: str
    num_threads: int
    parameters: dict[str, str]  # name to type
    registers: dict[str, str]  # name to type
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # to the index of an instruction

    def blocks(self) -> list[range]:
        """Runs of instructions that are entered at the first and left after the last alone."""
        leaders = {0, len(self.instructions), *self.labels.values()}
        for each in self.instructions:
            if each.mnemonic in {"bra", "ret", "exit", *SUSPENDING}:
                leaders.add(each.index + 1)
            if each.mnemonic in SUSPENDING:
                leaders.add(each.index)
        ordered = sorted(leaders)
        return [range(*pair) for pair in pairwise(ordered)]

    def local_registers(self) -> set[str]:
        """Registers that are written before they are read, and read in one block alone.

        Where a program does not execute a block, their values mean nothing there.
        """
        home: dict[str, range] = {}
        outside = set()
        for block in self.blocks():
            for each in (self.instructions[i] for i in block):
                for name in each.reads:
                    if home.get(name) != block:
                        outside.add(name)
                for name in each.writes:
                    if home.setdefault(name, block) != block:
                        outside.add(name)
        return set(home) - outside


def parse(text: str) -> Kernel:
    """The kernel of a PTX file, which has one."""
    text = re.sub(r"\.loc\b[^\n/]*(?://\s*([^\n;]*))?", r".loc \1;", text)
    text = re.sub(r"//[^\n]*", "", text)
    head = text[text.index(".entry") :]
    opening, closing = head.index("("), head.index("\n)")
    parameters = {}
    for part in head[opening + 1 : closing].split(","):
        found = re.search(r"\.param\s+\.(\w+).*?(\w+)\s*$", part.strip(), re.S)
        if found is None:
            raise Unsupported(f"parameter {part.strip()!r}")
        parameters[found[2]] = found[1]
    threads = re.search(r"\.reqntid\s+(\d+)", head)
    name = re.match(r"\.entry\s+(\w+)", head)
    if threads is None or name is None:
        raise Unsupported("a kernel without a name or a number of threads")
    body = head[head.index("{", closing) + 1 :]
    body = body[: body.index("\n}")]
    kernel = Kernel(name[1], int(threads[1]), parameters, _registers(body))
    body = re.sub(r"\.reg[^;]*;|\n\s*\.(?:file|pragma)[^\n]*", "", body)
    _read_body(kernel, body)
    return kernel


def _registers(body: str) -> dict[str, str]:
    registers = {}
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
        for name in names.split(","):
            many = re.fullmatch(r"\s*(%\w+?)<(\d+)>\s*", name)
            if many is None:
                registers[name.strip()] = kind
                continue
            registers |= {f"{many[1]}{i}": kind for i in range(int(many[2]))}
    return registers


def _read_body(kernel: Kernel, body: str) -> None:
    """Add the instructions and labels of a body without declarations and comments."""
    tokens = re.compile(r"\s*(?:(\$?\w+):(?!:)|([{}])(?=\s)|([^;]+);)")
    position, source = 0, ""
    while body[position:].strip():
        token = tokens.match(body, position)
        if token is None:
            raise Unsupported(f"text {body[position:].strip()[:60]!r}")
        position = token.end()
        if token[1]:
            kernel.labels[token[1]] = len(kernel.instructions)
        text = " ".join((token[3] or "").split())
        if text.startswith(".loc "):
            source = text.removeprefix(".loc ")
        elif text:
            kernel.instructions.append(_instruction(len(kernel.instructions), text, source))


def _instruction(index: int, text: str, source: str) -> Instruction:
    guarded = re.match(r"@(!?)(%\w+) (.*)", text)
    guard, negated = (guarded[2], bool(guarded[1])) if guarded else (None, False)
    name, _, rest = (guarded[3] if guarded else text).partition(" ")
    operands, depth, begin = [], 0, 0
    for i, character in enumerate(rest):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            operands.append(rest[begin:i].strip())
            begin = i + 1
    if rest[begin:].strip():
        operands.append(rest[begin:].strip())
    fields = tuple(name.split("."))
    return Instruction(index, text, fields, tuple(operands), guard, negated, source)
