"""Execution of launches: compiled to PTX for an architecture, and run on a CPU."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch import Tensor

from . import tensor_cores, transfers
from .access import Array, Lanes
from .allocations import Allocations, extent, parts, raw_bytes
from .decoder import BITS, Decoder
from .global_memory import SPACING, Buffer, GlobalMemory
from .programs import Programs, Scheduler
from .ptx import Unsupported
from .shared_memory import SharedMemory
from .trace import Trace

BUILT_BY = (tensor_cores, transfers)
"""Modules that define instructions, with those of `arithmetic`, which they import."""
NUM_LANES = 8192
"""Threads of the programs that run together."""


def compiled(kernel: Any, capability: int, *args: Any, **kwargs: Any) -> Any:
    """The compiled kernel of a launch, without a GPU; this process can launch none afterwards.

    Args:
        kernel: a function decorated with `triton.jit`.
        capability: compute capability x 10 of the architecture.
        args: arguments of the launch. Tensors may be anywhere; their memory is taken to be aligned
            to 16 bytes.
        kwargs: further arguments, and options of the compiler.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    def mocked(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            fields = map(mocked, value)
            return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
        return MockTensor(value.dtype) if isinstance(value, Tensor) else value

    device = SimpleNamespace(  # the part of a driver of Triton that compiling needs
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # a number by which kernels are kept
        get_current_stream=lambda device: 0,
    )
    driver.set_active(device)
    named = {name: mocked(value) for name, value in kwargs.items()}
    return kernel.warmup(*map(mocked, args), grid=(1,), **named)


@cache
def decoded(text: str) -> Decoder:
    """The kernel of a PTX file, decoded once."""
    return Decoder(text)


class Request(NamedTuple):
    """A launch of a compiled kernel."""

    text: str  # PTX
    num_programs: int
    num_shared_bytes: int
    tensors: list[Buffer]
    values: list[Any]  # of the parameters: addresses and numbers

    def copy(self) -> "Request":
        """The request with the values that the tensors have now."""
        copied = [
            each._replace(contents=each.contents.copy(), has_values=each.has_values.copy())
            for each in self.tensors
        ]
        return self._replace(tensors=copied)


def requested(
    binary: Any, arguments: dict[str, Any], num_programs: int, allocations: Allocations
) -> Request:
    """The launch of a compiled kernel with arguments by name, in the order of its parameters.

    A tensor within another one is a part of it.
    """
    if binary.metadata.global_scratch_size:
        raise Unsupported(f"scratch memory of {binary.name}")
    passed = list(flat(arguments, binary.src.signature))
    given = [(n, each) for n, each in passed if isinstance(each, Tensor)]
    given.sort(key=lambda pair: (extent(pair[1])[0], -extent(pair[1])[1]))
    addresses: dict[str, int] = {}
    tensors: list[Buffer] = []
    begin, end, base = 0, 0, 0
    for argument, tensor in given:
        first, last = extent(tensor)
        if first == last:
            addresses[argument] = 0
            continue
        if first >= end:
            begin, end, base = first, last, base + SPACING
            for part in parts(tensor):
                written, address = allocations.written(part), base + extent(part)[0] - begin
                item = part.element_size()
                tensors.append(Buffer(argument, raw_bytes(part), written, item, address))
        elif last > end:
            raise Unsupported(f"{argument}: a tensor that overlaps another one")
        addresses[argument] = base + first - begin
    values = [addresses.get(n, x) for n, x in passed]
    return Request(binary.asm["ptx"], num_programs, binary.metadata.shared, tensors, values)


def flat(arguments: dict[str, Any], signature: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of the arguments that are no constants, of tuples those of their elements.

    Elements of a NamedTuple have the names of its fields, others their numbers.
    """
    for name, value in arguments.items():
        kind = signature[name]
        if isinstance(kind, tuple):
            names = getattr(value, "_fields", [f"{name}.{i}" for i in range(len(value))])
            kinds = dict(zip(names, kind, strict=True))
            yield from flat(dict(zip(names, value, strict=True)), kinds)
        elif kind != "constexpr":
            yield name, value


class Run:
    """The execution of a request, from the values that its tensors have now; they are not changed.

    Attributes:
        request: what was executed.
        memory: after the execution.
        num_instructions: executed, by one or several programs at a time.
        reached: first instructions of the blocks that were executed.
        useful: as in `SharedMemory`.
        checksums: of all accesses of global and of shared memory and what they store, if counting.
    """

    def __init__(
        self,
        request: Request,
        code: Decoder,
        order: str = "together",
        counting: bool = False,
        limit: int = 1 << 60,
        trace: Trace | None = None,
    ) -> None:
        num_programs = request.num_programs
        self.memory = GlobalMemory(num_programs, request.tensors, counting=counting)
        self.num_instructions = 0
        self.reached: set[int] = set()
        self.useful: set[int] = set()
        self.checksums: dict[str, list[int]] = {"global": [], "shared": []} if counting else {}
        self.request, self._code, self._random = request, code, np.random.default_rng(0)
        ids = np.arange(num_programs)
        if order == "backward":
            ids = ids[::-1]
        elif order == "interleaved":
            self._random.shuffle(ids)
        step = max(1, NUM_LANES // code.kernel.num_threads)
        with np.errstate(all="ignore"):
            for begin in range(0, len(ids), step):
                lanes = Lanes(
                    code.kernel.name, ids[begin : begin + step], code.kernel.num_threads, trace
                )
                self._run(lanes, order, limit)

    def _run(self, lanes: Lanes, order: str, limit: int) -> None:
        """Execute some programs together."""
        code = self._code
        registers: list[Any] = list(code.initial)
        given = {
            "%tid.x": np.arange(lanes.num_threads, dtype=np.uint32)[None],
            "%ctaid.x": lanes.ids[:, None].astype(np.uint32),
            "%nctaid.x": np.full((1, 1), self.request.num_programs, np.uint32),
            **self._parameters(),
        }
        for name, value in given.items():
            registers[code.slots[name]] = value
        lanes.checksums = dict.fromkeys(self.checksums, 0)
        shared = SharedMemory(lanes, self.request.num_shared_bytes, code.element_bytes)
        programs = Programs(code.kernel, lanes, self.memory, shared, registers, code.slots)
        scheduler = Scheduler(programs, code.blocks, order, self._random, limit)
        scheduler.run()
        self.num_instructions += scheduler.num_instructions
        self.reached |= scheduler.reached
        self.useful |= shared.useful
        for space, sums in self.checksums.items():
            sums.append(lanes.checksums[space])

    def _parameters(self) -> dict[str, Array]:
        types = self._code.kernel.parameters
        # there is no scratch memory
        values = [*self.request.values, *[0] * (len(types) - len(self.request.values))]
        parameters: dict[str, Array] = {}
        for (name, kind), value in zip(types.items(), values, strict=True):
            if isinstance(value, float):
                value = int(np.float32(value).view(np.uint32))
            size = 8 * np.dtype(BITS[kind]).itemsize
            parameters[name] = np.full((1, 1), value & ((1 << size) - 1), BITS[kind])
        return parameters


@dataclass
class Emulator:
    """While active, as a context manager, executes all launches of Triton kernels on a CPU.

    Tensors are those of a CPU. What torch allocates meanwhile is followed, so that reads of memory
    without values are found; memory that was allocated before counts as written.

    Attributes:
        capability: compute capability x 10 for which kernels are compiled: 80 or 90.
        order: of the programs, as in `Scheduler`: together, forward, backward, interleaved.
        recording: whether every run is counted, and added to the history with the values before it.
        history: the recorded runs.
        allocations: what tensors have values.
    """

    capability: int = 90
    order: str = "together"
    recording: bool = False
    history: list[Run] = field(default_factory=list)
    allocations: Allocations = field(default_factory=Allocations)
    _active: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Emulator":
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise RuntimeError("kernels are interpreted, not compiled: TRITON_INTERPRET is 1")
        from triton.runtime.jit import JITFunction

        compile_or_run = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if warmup:
                return compile_or_run(kernel, *args, grid=grid, warmup=True, **kwargs)
            return self._launch(kernel, grid, *args, **kwargs)

        self._active.enter_context(mock.patch.object(JITFunction, "run", run))
        self._active.enter_context(self.allocations)
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.close()

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Compile a kernel and execute it."""
        if not isinstance(grid, tuple) or len(grid) != 1:
            raise Unsupported(f"a grid that is not a tuple of one number: {grid}")
        (num_programs,) = grid
        if not num_programs:
            return
        named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **named)
        bound.apply_defaults()
        binary = compiled(kernel, self.capability, *args, **kwargs)
        request = requested(binary, bound.arguments, num_programs, self.allocations)
        before = request.copy() if self.recording else request
        run = Run(before, decoded(request.text), self.order, self.recording)
        for i, each in enumerate(request.tensors):
            start = run.memory.start[i]
            each.contents[:] = run.memory.data[start : start + len(each.contents)]
            each.has_values[:] = run.memory.written(i)
        if self.recording:
            self.history.append(run)
