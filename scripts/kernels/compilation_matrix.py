"""Compile the fused kernels for several architectures without a GPU, and report what they became.

For every kernel, dtype and size: registers of a thread, bytes spilled, shared memory, programs that
fit on a processor at a time, which tensor-core instruction the products became, products with an
operand in registers, and hazards of asynchronous products (`scripts.kernels.sass`). The exit
code is 1 if a kernel spills, has a hazard, exceeds the shared memory of its architecture, or does
not multiply with tensor cores where it should. Architectures on which the backend refuses the
version of Triton are left out, with its sentence.

`--triton 3.7.1 3.9.0` reports other versions of Triton than the installed one: pip puts them side
by side into the cache of the user, and each runs in its own process.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from lm.output.backends.base import row_size
from lm.output.backends.triton.launch import Launch
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.reporting import TOP, Table, benchmark_parser
from scripts.kernels import sass
from scripts.kernels.compilation import (
    compiled_launch,
    draws,
    launches,
    make_problem,
    obstacle,
    values,
)

PROCESSOR_SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Shared memory of a processor, of which each program takes 1 KiB."""
PROCESSOR_REGISTERS, PROCESSOR_THREADS, PROCESSOR_PROGRAMS = 65_536, 2048, 32
KINDS = ["bf16", "fp16", "tf32", "fp32", "bf16*fp32", "fp16*fp32"]
TENSOR_CORES = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")
VERSIONS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "triton_versions"


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
    found = re.search(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) reg", printed, re.S
    )
    assert found
    return int(found[3]), int(found[1]) + int(found[2])


def occupancy(registers: int, shared: int, warps: int, capability: int) -> int:
    """Programs that fit on a processor, given registers of a thread and bytes of shared memory."""
    by_registers = PROCESSOR_REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = PROCESSOR_SHARED_BYTES[capability] // (shared + 1024)
    return min(by_registers, by_shared, PROCESSOR_THREADS // (32 * warps), PROCESSOR_PROGRAMS)


def report(
    sizes: list[int],
    dtypes: list[str],
    capabilities: list[int],
    kernels: list[str] | None = None,
    words: int = 100_000,
) -> Iterator[dict[str, Any]]:
    """One row for each kernel, dtype, size and architecture; of all kernels if none are named.

    With rows of the weight as the layer has them and, where these are longer, as long as hidden
    vectors.
    """
    rows = [(size, columns) for size in sizes for columns in sorted({size, row_size(size)})]
    for capability, dtype, (size, columns) in product(capabilities, dtypes, rows):
        seen: set[str] = set()
        torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
        kinds = [DTYPES.get(name, torch.float32) for name in dtype.split("*")]
        problem = make_problem(
            words, size, 16_384, kinds[0], weight_dtype=kinds[-1], columns=columns, bias=True
        )
        of_step = launches(problem, capability, row_wise=(False, True))
        for launch in [*of_step, *draws(kinds[-1], columns)]:
            name = launch.kernel.__name__
            if kernels is not None and name not in kernels:
                continue
            binary = compiled_launch(launch, capability)
            if binary.hash not in seen:
                name = _described(launch, seen)
                seen |= {binary.hash, name}
                found = resources(launch, binary, capability, dtype == "fp32")
                key = {"sm": capability, "kernel": name, "dtype": dtype}
                yield {**key, "N": words, "H": size, "W": columns, **found}


def _described(launch: Launch, seen: set[str]) -> str:
    """The kernel and what it is for; dense gradients come first."""
    name: str = launch.kernel.__name__
    given = {key for key, value in values(launch).items() if value is not None}
    if name == "_draw":
        return name + ", temperature" * (not launch.arguments["EXACT"])
    if name != "_update":
        alone = "d_bias" in given and not {"d_hidden", "d_weight"} & given
        return name + (", row-wise" + " bias" * alone) * (name in seen)
    rules = {"total": "Adagrad", "mean": "Adam", "table": "SGD"}
    rule = next((rule for key, rule in rules.items() if key in given), "norm")
    rule += ", norms given" * (rule == "Adagrad" and "squares" in given)
    return f"{name}, {rule}" + " of a bias" * ("sorted_hidden" not in given)


def resources(launch: Launch, binary: Any, capability: int, exact: bool) -> dict[str, Any]:
    """The resources and hazards of one compiled kernel; `exact` ones need no tensor cores."""
    registers, spilled = assembled(binary.asm["ptx"], capability)
    shared, warps = binary.metadata.shared, launch.tile.warps
    programs = occupancy(registers, shared, warps, capability)
    found = sorted(set(TENSOR_CORES.findall(binary.asm["ptx"])))
    misses_tensor_cores = "tt.dot" in binary.asm["ttir"] and not found and not exact
    code = sass.disassemble(binary.asm["cubin"], knobs.nvidia.cuobjdump.path, "-sass")
    hazards = sass.hazards(code)
    for hazard in hazards[:3]:
        print(f"{launch.kernel.__name__}: {hazard}", file=sys.stderr)
    return {
        "triton": triton.__version__,
        "tile": f"{launch.tile.v}x{launch.tile.c}x{launch.tile.h}",
        "warps": warps,
        "stages": launch.tile.stages,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": programs,
        "tensor_cores": "+".join(found) or "none",
        "register_operands": sass.num_register_operands(code),
        "hazards": len(hazards),
        "good": not (spilled or hazards or misses_tensor_cores) and programs > 0,
    }


def unpacked(version: str) -> Path:
    """The folder of a version of Triton for this Python; downloaded if it is not there yet."""
    folder = VERSIONS / version
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), f"triton=={version}"], check=True)
    return folder


def main() -> None:
    """Print the table, and write a log if asked; exit code 1 if a kernel is not as it should be."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--triton", nargs="*", metavar="VERSION", help="default: the installed version")
    add("--sizes", type=int, nargs="+", default=[300, 650, 1024], metavar="H")
    kinds = "tf32: fp32 with torch.set_float32_matmul_precision('high'); bf16*fp32: fp32 weights"
    add("--dtypes", nargs="+", default=KINDS, help=kinds)
    add("--sm", type=int, nargs="+", default=[80, 90, 100])
    add("--kernels", nargs="+", metavar="NAME", help="such as _forward; default: all")
    add("--words", type=int, default=100_000, metavar="N", help="tile shapes follow √N on sm_90")
    options = parser.parse_args()
    if options.triton:  # in a process for each version, with the option that comes last
        command = [sys.executable, "-m", "scripts.kernels.compilation_matrix"]
        codes = []
        for version in options.triton:
            path = os.pathsep.join([str(unpacked(version)), str(TOP)])
            variables = os.environ | {"PYTHONPATH": path}
            arguments = [*sys.argv[1:], "--triton"]
            codes.append(subprocess.run([*command, *arguments], env=variables).returncode)
        sys.exit(any(codes))
    table = Table(log=options.json)
    supported = []
    for sm in options.sm:
        if sentence := obstacle(sm):
            print(f"sm_{sm}: left out, the backend {sentence}")
        else:
            supported.append(sm)
    for found in report(options.sizes, options.dtypes, supported, options.kernels, options.words):
        table.add(found)
    num_bad = sum(not found["good"] for found in table.rows)
    num_hazards = sum(found["hazards"] for found in table.rows)
    print(
        f"Triton {triton.__version__}: {len(table.rows)} kernels compiled, {num_bad} of them not as"
        f" they should be, {num_hazards} hazards"
    )
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
