"""Execution of launches: compiled to PTX for an architecture, and run on a CPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lm.output.backends.triton.launch import Launch
from scripts.benchmarks.kernel_report import compiled

from . import arithmetic, tensor_cores, transfers, warp
from .access import Array
from .allocations import Allocations, extent, raw_bytes
from .decoder import Decoder
from .global_memory import BASE, GlobalMemory
from .parser import Kernel, Unsupported, parse
from .programs import BITS, Programs, Scheduler

BUILT_BY = (arithmetic, tensor_cores, transfers, warp)
"""Modules that define instructions."""
NUM_LANES = 4096
"""Threads of the programs that run together."""


class Code:
    """A kernel that is ready to run."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kernel: Kernel = parse(text)
        self.decoder = Decoder(self.kernel)
        self.blocks = self.decoder.actions()
        widths = [
            transfers.WIDTH[each.fields[-1]]
            for each in self.kernel.instructions
            if each.mnemonic in {"ld", "st"} and "shared" in each.text.split("::")[0].split(".")[1]
        ]
        self.element_bytes = min([2, *widths])  # of shared memory, the least that is accessed


@dataclass
class Emulator:
    """Executes launches, as `run` of `instrumented`.

    Attributes:
        capability: compute capability x 10 for which kernels are compiled.
        allocations: what tensors have values.
        order: of the programs, as in `Scheduler`.
        seed: of the order "interleaved".
        edit: changes the PTX of a kernel, given its name.
        counting: whether `loaded` and `stored` are counted.
    """

    capability: int
    allocations: Allocations
    order: str = "together"
    seed: int = 0
    edit: Callable[[str, str], str] | None = None
    counting: bool = False
    codes: dict[tuple[str, str], Code] = field(default_factory=dict)
    loaded: list[tuple[str, Counter[str]]] = field(default_factory=list)  # bytes, by launch
    stored: list[tuple[str, Counter[str]]] = field(default_factory=list)
    num_instructions: int = 0

    def run(self, launch: Launch) -> None:
        """Compile and execute a launch."""
        if not launch.num_programs:
            return
        binary = compiled(launch, self.capability)
        if binary.metadata.global_scratch_size:
            raise Unsupported(f"scratch memory of {launch.kernel.__name__}")
        code = self.code(launch.kernel.__name__, binary.asm["ptx"])
        memory = GlobalMemory(launch.num_programs)
        memory.counting = self.counting
        addresses, regions = self._regions(memory, launch.arguments)
        memory.seal()
        values = [
            addresses[name] if isinstance(launch.arguments[name], Tensor) else launch.arguments[name]
            for name in launch.kernel.arg_names
            if binary.src.signature[name] != "constexpr"
        ]
        self._execute(code, memory, values, binary.metadata.shared)
        for i, (contents, written) in enumerate(regions):
            start = memory.start[i]
            contents[:] = memory.data[start : start + len(contents)]
            written[:] = memory.written(i)
        if self.counting:
            self.loaded.append((launch.kernel.__name__, memory.loaded))
            self.stored.append((launch.kernel.__name__, memory.stored))

    def code(self, name: str, text: str) -> Code:
        """The code of a kernel's PTX, edited."""
        if self.edit is not None:
            text = self.edit(name, text)
        if (name, text) not in self.codes:
            self.codes[name, text] = Code(text)
        return self.codes[name, text]

    def _regions(
        self, memory: GlobalMemory, arguments: dict[str, Any]
    ) -> tuple[dict[str, int], list[tuple[Array, Array]]]:
        """Add the tensors to memory: their addresses by name; bytes, and which have values.

        A tensor within another one is a part of it.
        """
        tensors = [(name, each) for name, each in arguments.items() if isinstance(each, Tensor)]
        tensors.sort(key=lambda pair: (extent(pair[1])[0], -extent(pair[1])[1]))
        addresses: dict[str, int] = {}
        regions: list[tuple[Array, Array]] = []
        begin, end, address = 0, 0, BASE
        for name, tensor in tensors:
            first, last = extent(tensor)
            if first == last:
                addresses[name] = BASE
                continue
            if first >= end:
                begin, end = first, last
                regions.append((raw_bytes(tensor), self.allocations.written(tensor)))
                address = memory.add(name, *regions[-1], tensor.element_size())
            elif last > end:
                raise Unsupported(f"{name}: a tensor that overlaps another one")
            addresses[name] = address + first - begin
        return addresses, regions

    def _execute(self, code: Code, memory: GlobalMemory, values: list[Any], shared: int) -> None:
        kernel, random = code.kernel, np.random.default_rng(self.seed)
        types = kernel.parameters
        values += [0] * (len(types) - len(values))  # scratch memory, of which there is none
        parameters = {}
        for (name, kind), value in zip(types.items(), values, strict=True):
            bits = BITS[kind]
            if isinstance(value, float):
                value = int(np.array(value, arithmetic.TYPES[kind]).view(bits))
            size = 8 * np.dtype(bits).itemsize
            parameters[name] = np.full((1, 1), value & ((1 << size) - 1), bits)
        ids = np.arange(memory.num_programs)
        if self.order == "backward":
            ids = ids[::-1]
        elif self.order == "interleaved":
            random.shuffle(ids)
        step = max(1, NUM_LANES // kernel.num_threads)
        for begin in range(0, len(ids), step):
            chosen = ids[begin : begin + step]
            registers: list[Any] = list(code.decoder.initial)
            thread = np.arange(kernel.num_threads, dtype=np.uint32)[None]
            for name, value in {
                "%tid.x": thread,
                "%laneid": thread % np.uint32(32),
                "%ntid.x": np.full((1, 1), kernel.num_threads, np.uint32),
                "%ctaid.x": chosen[:, None].astype(np.uint32),
                "%nctaid.x": np.full((1, 1), memory.num_programs, np.uint32),
            }.items():
                registers[code.decoder.slots[name]] = value
            programs = Programs(
                kernel=kernel, ids=chosen, memory=memory, num_shared_bytes=shared,
                element_bytes=code.element_bytes, registers=registers,
                slots=code.decoder.slots, parameters=parameters,
            )  # fmt: skip
            scheduler = Scheduler(programs, code.blocks, self.order, random)
            with np.errstate(all="ignore"):
                scheduler.run()
            self.num_instructions += scheduler.num_instructions
