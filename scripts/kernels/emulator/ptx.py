"""PTX text into instructions, and what can be said of registers before a program runs."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

REGISTER = re.compile(r"%[A-Za-z]\w*(?:\.[xyz])?")
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\n\).*?\.reqntid\s+(\d+).*?\{(.*?)\n\}", re.S)
TOKEN = re.compile(r"\s*(?:(\$?\w+):(?!:)|([{}])(?=\s)|([^;]+);)")
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+) )?(\S+)\s*(.*)")
OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^\s,][^,]*")
NO_DESTINATION = {"st", "red", "bra", "bar", "cp", "stmatrix", "fence"}
"""Instructions whose first operand is not written."""
SUSPENDING = {"bar", "atom"}
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

    @cached_property
    def writes(self) -> frozenset[str]:
        """Registers that the instruction writes."""
        if self.mnemonic in NO_DESTINATION or not self.operands:
            return frozenset()
        return frozenset(REGISTER.findall(self.operands[0]))

    @cached_property
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

    @cached_property
    def blocks(self) -> list[range]:
        """Runs of instructions that are entered at the first and left after the last alone."""
        leaders = {0, len(self.instructions), *self.labels.values()}
        for each in self.instructions:
            if each.mnemonic in {"bra", "ret", *SUSPENDING}:
                leaders.add(each.index + 1)
            if each.mnemonic in SUSPENDING:
                leaders.add(each.index)
        return [range(*pair) for pair in pairwise(sorted(leaders))]

    def block_of(self, index: int) -> range:
        """The block of an instruction."""
        return next(block for block in self.blocks if index in block)

    def after(self, by: Instruction) -> set[int]:
        """Instructions that may follow one."""
        if by.mnemonic == "ret":
            return set()
        if by.mnemonic != "bra":
            return {by.index + 1}
        return {self.labels[by.operands[0]]} | ({by.index + 1} if by.guard else set())

    def local_registers(self) -> set[str]:
        """Registers that are written before they are read, and read in one block alone.

        Where a program does not execute a block, their values mean nothing there.
        """
        home: dict[str, range] = {}
        outside = set()
        for block in self.blocks:
            for each in (self.instructions[i] for i in block):
                outside |= {name for name in each.reads if home.get(name) != block}
                outside |= {name for name in each.writes if home.setdefault(name, block) != block}
        return set(home) - outside


def parse(text: str) -> Kernel:
    """The kernel of a PTX file, which has one."""
    text = re.sub(r"\.loc\b[^\n/]*(?://\s*([^\n;]*))?", r".loc \1;", text)
    found = ENTRY.search(re.sub(r"//[^\n]*", "", text))
    if found is None:
        raise Unsupported("a kernel without a name or a number of threads")
    name, parameters, num_threads, body = found.groups()
    types = re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", parameters)
    registers: dict[str, str] = {}
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
        for each, count in re.findall(r"(%\w+)(?:<(\d+)>)?", names):
            numbered = [f"{each}{i}" for i in range(int(count))] if count else [each]
            registers |= dict.fromkeys(numbered, kind)
    kernel = Kernel(name, int(num_threads), {n: kind for kind, n in types}, registers)
    _read_body(kernel, re.sub(r"\.reg[^;]*;|\n\s*\.(?:file|pragma)[^\n]*", "", body))
    return kernel


def _read_body(kernel: Kernel, body: str) -> None:
    """Add the instructions and labels of a body without declarations and comments."""
    position, source = 0, ""
    while body[position:].strip():
        token = TOKEN.match(body, position)
        if token is None:
            raise Unsupported(f"text {body[position:].strip()[:60]!r}")
        position = token.end()
        if token[1]:
            kernel.labels[token[1]] = len(kernel.instructions)
        text = " ".join((token[3] or "").split())
        if text.startswith(".loc "):
            source = text.removeprefix(".loc ")
        elif parts := INSTRUCTION.fullmatch(text):
            negated, guard, name, rest = parts.groups()
            operands = tuple(each.strip() for each in OPERAND.findall(rest))
            index, fields = len(kernel.instructions), tuple(name.split("."))
            one = Instruction(index, text, fields, operands, guard, bool(negated), source)
            kernel.instructions.append(one)
