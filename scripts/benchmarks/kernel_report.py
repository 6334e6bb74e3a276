#!/usr/bin/env python
"""Compile the fused kernels for sm_80, sm_90 and sm_100, without a GPU, and report what the
compiler says.

For every kernel, dtype and size: registers of a thread, bytes spilled, shared memory, programs that
fit on a processor at a time, and which tensor-core instruction the products became. The exit code
is 1 if a kernel spills, exceeds the shared memory of its architecture, or multiplies without tensor
cores where it should use them.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lm.output import ClassTree
from lm.output.backends.triton import backend as fused
from lm.output.backends.triton.tile_shapes import Tile, compiler_options
from lm.output.backends.visits import Schedule, Visits, schedule_sizes

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


class Launch(NamedTuple):
    """One launch as `fused` asks for it."""

    kernel: Any
    tile: Tile
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel, and what is asked for that the dense backward does without."""
        sparse = self.arguments.get("written_row") is not None
        return self.kernel.__name__ + (", sparse" if sparse else "")


def launches(hidden_size: int, dtype: torch.dtype, capability: int) -> list[Launch]:
    """The launches of one forward and backward, and the one that sparse gradients have of their
    own, on tensors without memory.

    16,384 positions of a tree of two levels.
    """
    tree = ClassTree.two_level(torch.arange(100_000) // 317)
    positions, depth = 16_384, tree.depth
    groups, heavy = schedule_sizes(positions, tree.num_nodes, depth)

    def meta(*shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    arrays = tree.arrays._make(meta(*array.shape) for array in tree.arrays)
    flat, table = meta(positions), meta(depth, positions)
    visits = Visits(flat, flat, table, table)
    plan = Schedule(table, flat, meta(groups), meta(heavy))
    hidden = meta(positions, hidden_size, kind=dtype)
    weight, bias = meta(tree.num_rows, hidden_size, kind=dtype), meta(tree.num_rows, kind=dtype)
    taken: list[Launch] = []
    original = fused._launch, fused._capability
    fused._capability = lambda hidden: capability
    fused._launch = lambda kernel, n, tile, **rest: taken.append(Launch(kernel, tile, rest))
    try:
        nll, state = fused.forward(
            hidden, weight, bias, visits, plan, arrays, tree.max_path_columns, True
        )
        batch = visits, plan, arrays, state
        grads = fused.backward(nll, hidden, weight, bias, *batch, [True] * 3)
        first_row = meta(tree.num_nodes)
        fused._launch_backward(nll, hidden, weight, *batch, grads, first_row)
    finally:
        fused._launch, fused._capability = original
    return taken[:4] + taken[-1:]  # the sparse backward shares all but its last with the dense one


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel, specialised as at run time: aligned pointers, multiples of 16, constants."""
    names = launch.kernel.arg_names
    constexpr = {launch.kernel.arg_names[i] for i in launch.kernel.constexprs}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value = launch.arguments[name]
        if name in constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=compiler_options(launch.tile))


def assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, from the assembler that Triton itself takes."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        assembler = get_ptxas(capability).path
        command = [assembler, "-v", f"-arch={target[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers
    assert spills
    return int(registers[1]), int(spills[1]) + int(spills[2])


def occupancy(registers: int, shared: int, warps: int, capability: int) -> int:
    """Programs that fit on a processor at a time."""
    by_registers = PROCESSOR_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = PROCESSOR_SHARED_BYTES[capability] // (shared + 1024)
    return min(by_registers, by_shared, PROCESSOR_THREADS // (32 * warps), PROCESSOR_PROGRAMS)


def report(
    sizes: list[int], dtypes: list[str], capabilities: list[int]
) -> Iterator[dict[str, Any]]:
    """One row for each kernel, dtype, size and architecture."""
    for capability in capabilities:
        for dtype in dtypes:
            torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
            kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
            for size in sizes:
                for launch in launches(size, kind, capability):
                    yield row(launch, capability, dtype, size)


def row(launch: Launch, capability: int, dtype: str, size: int) -> dict[str, Any]:
    """What is to be known of one compiled kernel."""
    binary = compiled(launch, capability)
    registers, spilled = assembled(binary.asm["ptx"], capability)
    shared, warps = binary.metadata.shared, launch.tile.warps
    found = sorted(set(TENSOR_CORES.findall(binary.asm["ptx"])))
    return {
        "sm": capability,
        "kernel": launch.name,
        "dtype": dtype,
        "H": size,
        "tile": f"{launch.tile.v}x{launch.arguments['BLOCK_C']}x{launch.tile.h}",
        "warps": warps,
        "stages": launch.tile.stages,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": occupancy(registers, shared, warps, capability),
        "tensor_cores": "+".join(found) or "none",
        "good": spilled == 0
        and shared <= SHARED_BYTES[capability]
        and (bool(found) or dtype == "fp32"),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 650, 1024], metavar="H")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["bf16", "fp16", "tf32", "fp32"],
        help="tf32: fp32 tensors with torch.set_float32_matmul_precision('high')",
    )
    parser.add_argument("--sm", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    options = parser.parse_args()
    rows = []
    for each in report(options.sizes, options.dtypes, options.sm):
        if not rows:
            print("  ".join(each))
        rows.append(each)
        print("  ".join(str(value) for value in each.values()), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(each) + "\n" for each in rows))
    bad = [each for each in rows if not each["good"]]
    print(f"{len(rows)} kernels compiled, {len(bad)} of them not as they should be")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
