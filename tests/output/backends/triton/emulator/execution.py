"""Execution of launches: compiled to PTX for an architecture, and run on a CPU."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lm.output.backends.triton.launch import Launch
from scripts.benchmarks.kernel_compilation import compiled

from . import arithmetic, conversions, tensor_cores, transfers, warp
from .access import Array
from .allocations import Allocations, extent, raw_bytes
from .decoder import Decoder
from .global_memory import BASE, GlobalMemory
from .parser import Instruction, Kernel, Unsupported, parse
from .programs import BITS, Programs, Scheduler
from .shared_memory import PIECE
from .trace import Trace

BUILT_BY = (arithmetic, conversions, tensor_cores, transfers, warp)
"""Modules that define instructions."""
NUM_LANES = 8192
"""Threads of the programs that run together."""


class Code:
    """A kernel that is ready to run."""

    def __init__(self, text: str) -> None:
        self.kernel: Kernel = parse(text)
        self.decoder = Decoder(self.kernel)
        self.blocks = self.decoder.actions()
        self.element_bytes = min([PIECE, *map(transfers.shared_width, self.kernel.instructions)])

    def changed(self, by: Instruction) -> "Code":
        """The same with another instruction in the place of the one with its index."""
        other, instructions = copy(self), [*self.kernel.instructions]
        instructions[by.index] = by
        other.kernel = replace(self.kernel, instructions=instructions)
        block = next(block for block in self.kernel.blocks() if by.index in block)
        actions = self.decoder.block([instructions[i] for i in block])
        other.blocks = self.blocks | {block.start: (actions, block.stop)}
        return other


@cache
def decoded(text: str) -> Code:
    """The code of a PTX file, decoded once."""
    return Code(text)


class Request(NamedTuple):
    """A launch of a compiled kernel."""

    kernel: str
    text: str  # PTX
    num_programs: int
    num_shared_bytes: int
    tensors: list[tuple[str, Array, Array, int]]  # name, bytes, which have values, element size
    values: list[tuple[int | None, Any]]  # of the parameters: offset into a tensor, or a number

    def copy(self) -> "Request":
        """The same, with the values that the tensors have now."""
        copied = [(name, raw.copy(), has.copy(), item) for name, raw, has, item in self.tensors]
        return self._replace(tensors=copied)


def requested(launch: Launch, capability: int, allocations: Allocations) -> Request:
    """Compile the kernel of a launch.

    A tensor within another one is a part of it.
    """
    binary = compiled(launch, capability)
    name = launch.kernel.__name__
    if binary.metadata.global_scratch_size:
        raise Unsupported(f"scratch memory of {name}")
    given = [(n, each) for n, each in launch.arguments.items() if isinstance(each, Tensor)]
    given.sort(key=lambda pair: (extent(pair[1])[0], -extent(pair[1])[1]))
    places: dict[str, tuple[int | None, Any]] = {}
    tensors: list[tuple[str, Array, Array, int]] = []
    begin, end = 0, 0
    for argument, tensor in given:
        first, last = extent(tensor)
        if first == last:
            places[argument] = (None, BASE)
            continue
        if first >= end:
            begin, end = first, last
            has_values = allocations.written(tensor)
            tensors.append((argument, raw_bytes(tensor), has_values, tensor.element_size()))
        elif last > end:
            raise Unsupported(f"{argument}: a tensor that overlaps another one")
        places[argument] = (len(tensors) - 1, first - begin)
    values = [
        places.get(n, (None, launch.arguments[n]))
        for n in launch.kernel.arg_names
        if binary.src.signature[n] != "constexpr"
    ]
    shared = binary.metadata.shared
    return Request(name, binary.asm["ptx"], launch.num_programs, shared, tensors, values)


class Run:
    """The execution of a request, from the values that its tensors have now; they are not changed.

    Attributes:
        request: what was executed.
        memory: after the execution.
        ambiguous: as in `SharedMemory`.
        num_products: multiply-adds of tensor cores.
        num_instructions: executed, by one or several programs at a time.
        reached: first instructions of the blocks that were executed.
        useful: waits and fences that found something to order.
    """

    def __init__(
        self,
        request: Request,
        code: Code,
        order: str = "together",
        seed: int = 0,
        counting: bool = False,
        limit: int = 1 << 60,
        trace: Trace | None = None,
    ) -> None:
        self.memory = GlobalMemory(
            request.num_programs, request.tensors, counting=counting, trace=trace
        )
        self.ambiguous: Counter[str] = Counter()
        self.num_products = self.num_instructions = 0
        self.reached: set[int] = set()
        self.useful: set[int] = set()
        self.request, self._code, self._random = request, code, np.random.default_rng(seed)
        ids = np.arange(request.num_programs)
        if order == "backward":
            ids = ids[::-1]
        elif order == "interleaved":
            self._random.shuffle(ids)
        step = max(1, NUM_LANES // code.kernel.num_threads)
        with np.errstate(all="ignore"):
            for begin in range(0, len(ids), step):
                self._run(ids[begin : begin + step], order, limit)

    def _run(self, ids: Array, order: str, limit: int) -> None:
        code, request = self._code, self.request
        registers: list[Any] = list(code.decoder.initial)
        thread = np.arange(code.kernel.num_threads, dtype=np.uint32)[None]
        for name, value in {
            "%tid.x": thread,
            "%laneid": thread % np.uint32(32),
            "%ntid.x": np.full((1, 1), code.kernel.num_threads, np.uint32),
            "%ctaid.x": ids[:, None].astype(np.uint32),
            "%nctaid.x": np.full((1, 1), request.num_programs, np.uint32),
        }.items():
            registers[code.decoder.slots[name]] = value
        programs = Programs(
            kernel=code.kernel, ids=ids, memory=self.memory, registers=registers,
            num_shared_bytes=request.num_shared_bytes, element_bytes=code.element_bytes,
            slots=code.decoder.slots, parameters=self._parameters(),
        )  # fmt: skip
        scheduler = Scheduler(programs, code.blocks, order, self._random, limit)
        scheduler.run()
        self.ambiguous += programs.shared.ambiguous
        self.num_products += programs.num_products
        self.num_instructions += scheduler.num_instructions
        self.reached |= scheduler.reached
        self.useful |= programs.shared.useful

    def _parameters(self) -> dict[str, Array]:
        types = self._code.kernel.parameters
        values = self.request.values
        values = values + [(None, 0)] * (
            len(types) - len(values)
        )  # of scratch memory there is none
        parameters: dict[str, Array] = {}
        for (name, kind), (tensor, value) in zip(types.items(), values, strict=True):
            bits = BITS[kind]
            if tensor is not None:
                value += BASE + self.memory.start[tensor]
            if isinstance(value, float):
                value = int(np.array(value, arithmetic.TYPES[kind]).view(bits))
            size = 8 * np.dtype(bits).itemsize
            parameters[name] = np.full((1, 1), value & ((1 << size) - 1), bits)
        return parameters


@dataclass
class Emulator:
    """Executes launches, as `run` of `instrumented`.

    Attributes:
        capability: compute capability x 10 for which kernels are compiled.
        allocations: what tensors have values.
        order: of the programs, as in `Scheduler`.
        seed: of the order "interleaved".
        counting: whether bytes are counted.
        history: if not None, every run is added to it, with the values before it in its request.
        ambiguous: as in `SharedMemory`.
    """

    capability: int
    allocations: Allocations
    order: str = "together"
    seed: int = 0
    counting: bool = False
    history: list[Run] | None = None
    ambiguous: Counter[str] = field(default_factory=Counter)

    def run(self, launch: Launch) -> None:
        """Compile and execute a launch."""
        if not launch.num_programs:
            return
        request = requested(launch, self.capability, self.allocations)
        before = request if self.history is None else request.copy()
        run = Run(before, decoded(request.text), self.order, self.seed, self.counting)
        for i, (_, contents, has_values, _) in enumerate(request.tensors):
            start = run.memory.start[i]
            contents[:] = run.memory.data[start : start + len(contents)]
            has_values[:] = run.memory.written(i)
        self.ambiguous += run.ambiguous
        if self.history is not None:
            self.history.append(run)
