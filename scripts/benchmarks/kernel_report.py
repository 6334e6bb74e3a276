"""Compile the fused kernels for sm_80, sm_90 and sm_100, without a GPU, and report their resources.

For every kernel, dtype and size: registers of a thread, bytes spilled, shared memory, programs that
fit on a processor at a time, and which tensor-core instruction the products became. The exit code
is 1 if a kernel spills, exceeds the shared memory of its architecture, or does not multiply with
tensor cores where it should.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.tile_shapes import compiler_options
from scripts.benchmarks.reporting import Table, benchmark_parser

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory of one program."""
PROCESSOR_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
PROCESSOR_REGISTERS, PROCESSOR_THREADS, PROCESSOR_PROGRAMS = 65_536, 2048, 32
TENSOR_CORES = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}


def launches(hidden_size: int, dtype: torch.dtype, capability: int) -> list[Launch]:
    """The launches of one forward and backward, and those that row-wise gradients change.

    For 16,384 positions of a tree of two levels; nothing is executed.
    """
    tree = ClassTree.two_level(torch.arange(100_000) // 317)
    target = torch.arange(16_384) % tree.vocab_size
    hidden = torch.empty(len(target), hidden_size, dtype=dtype)
    weight = torch.empty(tree.num_rows, hidden_size, dtype=dtype)
    bias = torch.empty(tree.num_rows, dtype=dtype)
    problem = Problem.of(hidden, weight, bias, target, tree)
    backend, needs = TritonBackend(), Needs(hidden=True, weight=True, bias=True)
    recorded: list[Launch] = []
    with instrumented(run=recorded.append, capability=capability):
        nll, saved = backend.forward(problem, needs)
        for each in (needs, needs._replace(row_wise=True)):
            backend.backward(nll, problem, saved, each)
    return recorded[:7] + recorded[-2:]  # the errors are the same for both


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel, specialised as at run time: aligned pointers, multiples of 16, constants."""
    names = launch.kernel.arg_names
    constexpr = {names[i] for i in launch.kernel.constexprs}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value = launch.arguments[name]
        is_tensor = isinstance(value, torch.Tensor)
        if name in constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = TYPES[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=compiler_options(launch.tile))


def assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, from the assembler that Triton uses."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        assembler = get_ptxas(capability).path
        command = [assembler, "-v", f"-arch={target[1]}", file.name, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", printed)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    assert registers
    assert spills
    return int(registers[1]), int(spills[1]) + int(spills[2])


def occupancy(registers: int, shared: int, warps: int, capability: int) -> int:
    """Programs that fit on a processor, given registers of a thread and bytes of shared memory."""
    by_registers = PROCESSOR_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = PROCESSOR_SHARED_BYTES[capability] // (shared + 1024)
    return min(by_registers, by_shared, PROCESSOR_THREADS // (32 * warps), PROCESSOR_PROGRAMS)


def report(
    sizes: list[int], dtypes: list[str], capabilities: list[int], kernels: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """One row for each kernel, dtype, size and architecture; of all kernels if none are named."""
    for capability, dtype, size in product(capabilities, dtypes, sizes):
        torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
        for launch in launches(size, kind, capability):
            if kernels is None or launch.kernel.__name__ in kernels:
                yield row(launch, capability, dtype, size)


def row(launch: Launch, capability: int, dtype: str, size: int) -> dict[str, Any]:
    """The resources of one compiled kernel."""
    binary = compiled(launch, capability)
    registers, spilled = assembled(binary.asm["ptx"], capability)
    shared, warps = binary.metadata.shared, launch.tile.warps
    found = sorted(set(TENSOR_CORES.findall(binary.asm["ptx"])))
    sparse = launch.arguments.get("written_row") is not None  # writes rows of visited nodes only
    return {
        "sm": capability,
        "kernel": launch.kernel.__name__ + (", sparse" if sparse else ""),
        "dtype": dtype,
        "H": size,
        "tile": f"{launch.tile.v}x{launch.tile.c}x{launch.tile.h}",
        "warps": warps,
        "stages": launch.tile.stages,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": occupancy(registers, shared, warps, capability),
        "tensor_cores": "+".join(found) or "none",
        "good": spilled == 0
        and shared <= SHARED_BYTES[capability]
        and (bool(found) or dtype == "fp32" or not launch.tile.h),
    }


def main() -> None:
    """Print the table, and write a log if asked; exit code 1 if a kernel is not as it should be."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[300, 650, 1024], metavar="H")
    high = "tf32: fp32 tensors with torch.set_float32_matmul_precision('high')"
    add("--dtypes", nargs="+", default=["bf16", "fp16", "tf32", "fp32"], help=high)
    add("--sm", type=int, nargs="+", default=[80, 90, 100])
    add("--kernels", nargs="+", metavar="NAME", help="such as _forward; default: all")
    options = parser.parse_args()
    table = Table(log=options.json)
    for found in report(options.sizes, options.dtypes, options.sm, options.kernels):
        table.add(found)
    num_bad = sum(not found["good"] for found in table.rows)
    print(f"{len(table.rows)} kernels compiled, {num_bad} of them not as they should be")
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
