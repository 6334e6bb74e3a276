"""The steps of the check: their order, commands, and expected times."""

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[3]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
PYTEST += ["-o", "filterwarnings=default", "-p", "scripts.kernels.pytest_shard"]
GPU_TESTS = "tests/output/backends/test_gpu.py"
FIRST = "bfloat16 and errors and (two_level or shortlist or huffman) and (300 or 1024)"
FIRST += " or three_kernels or nothing_to_predict"
REPEATED = "repeat_bit_for_bit or thousand_steps"
SANITIZED = "repeat_bit_for_bit and (17 or 700)"
MEMCHECK = ["memcheck", "--report-api-errors", "no"]
"""Failing calls of the driver are no errors of kernels: libraries try what a driver may lack."""
DRY_TESTS = "tests/output/backends/triton/test_kernels.py"
DRY_CHOICE = "empty_batch or nan_in_the_weight"
METHODS = ["random", "graph", "full", "chunked", "cce", "liger", "adaptive", "grouped"]
FULL_SOFTMAX = ["random", "graph", "chunked", "cce"]
LARGEST = ["random", "graph", "cce", "adaptive", "grouped"]
"""Without full softmaxes that hold logits, or that go through all rows for few positions at a time.
"""
MIXED = ["random", "clustered", "graph", "full", "adaptive"]


class Size(NamedTuple):
    """A problem of the benchmark."""

    rows: str  # N:H
    expected: int  # seconds
    methods: list[str] = METHODS
    options: tuple[str, ...] = ()


BENCHMARKS = {
    "benchmark-33k": Size("33278:650", 30),
    "benchmark-268k": Size("267735:1024", 35),
    "benchmark-mixed": Size("33278:650", 25, MIXED, ("--rows-dtype", "fp32")),
    "benchmark-tf32": Size("33278:650", 40, MIXED, ("--dtype", "fp32", "--tf32")),
    "benchmark-few": Size("33278:650", 25, MIXED, ("--positions", "1024")),
    "benchmark-800k": Size("800000:1024", 35),
    "benchmark-1m": Size("1000000:1024", 30, FULL_SOFTMAX),
    "benchmark-10m": Size("10000000:300", 75, LARGEST),
}
COUNTED = ["33278:650", "267735:1024"]
CANDIDATES = TOP / "scripts/results/tile_tuning.jsonl"
"""Tile shapes by their time in a model: see `scripts.kernels.tile_tuning`."""
LOGS = ("output_layer.jsonl", "counters.jsonl", "tuning.jsonl")
"""JSON lines that steps write."""


class Step(NamedTuple):
    """One step of the check."""

    name: str
    commands: list[list[str]]  # run at the same time
    expected: int  # seconds, with 16 cores and an H200; an estimate until it has been run there
    limit: int  # seconds
    variables: dict[str, str] = {}  # noqa: RUF012 (never written)
    skipped: str | None = None  # why it cannot run here


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of `scripts`."""
    return [sys.executable, "-m", f"scripts.{name}", *arguments]


def benchmark(work: Path, methods: list[str], *options: str) -> list[str]:
    """The command of the benchmark of the layer and its peers."""
    log = ["--json", str(work / "output_layer.jsonl")]
    return module("benchmarks.output_layer", *options, "--methods", *methods, *log)


def preflight(work: Path, *, dry: bool = False, timing_only: bool = False) -> Step:
    """The step before all others."""
    options = ["--dry-run"] * dry + ["--timing-only"] * timing_only
    options += ["--json", str(work / "preflight.json")]
    return Step("preflight", [module("kernels.gpu_check.preflight", *options)], 8, 90)


def names(*, dry: bool) -> list[str]:
    """The names of all steps, in their order."""
    found = dry_steps(Path(), 90) if dry else steps(Path(), 90)
    return ["preflight", *(step.name for step in found)]


def steps(work: Path, capability: int, chosen: list[str] | None = None) -> list[Step]:
    """The chosen steps on a GPU, all by default, in their order; `work` is for files that they add.

    The first one compiles for those that follow.
    """
    found = [*_first_steps(work), *_longer_steps(work, capability)]
    found = [step for step in found if chosen is None or step.name in chosen]
    if chosen is None or "compile" in chosen:
        names = {step.name for step in found}
        sizes = [size.rows for name, size in BENCHMARKS.items() if name in names]
        sizes += COUNTED if "counters" in names else []
        sizes = list(dict.fromkeys(sizes or COUNTED))
        command = module("kernels.compilation", "--sm", str(capability), "--rows", *sizes)
        command += ["--rows-dtypes", "bf16", "fp32"] * ("benchmark-mixed" in names)
        found.insert(0, Step("compile", [command], 45, 90))
    return found


def _first_steps(work: Path) -> list[Step]:
    names = ("benchmark-33k", "benchmark-268k", "benchmark-mixed")
    sizes = [_benchmark_step(work, name) for name in names]
    log = ["--json", str(work / "counters.jsonl")]
    counters = module("kernels.gpu_check.counters", "--rows", *COUNTED, *log)
    return [
        Step(
            "correctness",
            [
                [*PYTEST, "-m", "gpu", GPU_TESTS, "-k", FIRST],
                module("kernels.gpu_check.preflight", "--dtypes", "bf16", "fp16", "fp32"),
            ],
            40,
            90,
        ),
        *sizes,
        Step("counters", [counters], 60, 120),
    ]


def _longer_steps(work: Path, capability: int) -> list[Step]:
    num_parts = max(1, min(12, (os.cpu_count() or 1) - 2))
    tests = [*PYTEST, "-m", "gpu", GPU_TESTS, "-k", f"not ({REPEATED})", "--shard"]
    sanitizer = shutil.which("compute-sanitizer") or ""
    check = [sanitizer, "--error-exitcode", "7", "--tool"]
    some = [*PYTEST, "-m", "gpu", GPU_TESTS, "-k", SANITIZED]
    tuning = ["--candidates", str(CANDIDATES), "--seconds", "60"]
    tuning += ["--json", str(work / "tuning.jsonl")]
    return [
        Step("tests", [[*tests, f"{i}/{num_parts}"] for i in range(num_parts)], 155, 260),
        Step("repeat", [[*PYTEST, "-m", "gpu", GPU_TESTS, "-k", REPEATED]], 45, 90),
        Step(
            "sanitizer",
            [[*check, *tool, *some] for tool in (MEMCHECK, ["racecheck"])],
            60,
            120,
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # whose blocks hide accesses between tensors
            skipped=None if sanitizer else "compute-sanitizer is not installed",
        ),
        *(
            _benchmark_step(work, f"benchmark-{name}")
            for name in ("tf32", "few", "800k", "1m", "10m")
        ),
        Step(
            "tuning",
            [module("kernels.tile_tuning", *tuning)],
            100,
            120,
            skipped=None if capability == 90 else "candidates are for compute capability 9.0",
        ),
    ]


def _benchmark_step(work: Path, name: str) -> Step:
    size = BENCHMARKS[name]
    options = ["--device", "cuda", "--rows", size.rows, *size.options]
    options += ["--backends", "triton", "reference"]  # also where auto would not take the kernels
    command = benchmark(work, size.methods, *options)
    return Step(name, [command], size.expected, 3 * size.expected)


def dry_steps(work: Path, capability: int, chosen: list[str] | None = None) -> list[Step]:
    """The steps without a GPU, tiny and interpreted; arguments are those of `steps`."""
    tests = [*PYTEST, DRY_TESTS, "-k", DRY_CHOICE, "--shard", "0/1"]
    tiny = ["--rows", "97:8", "--positions", "32"]
    options = [*tiny, "--rounds", "1", "--backends", "triton", "reference"]
    interpreted = {"TRITON_INTERPRET": "1"}
    log = ["--json", str(work / "counters.jsonl")]
    found = [
        Step("compile", [module("kernels.compilation", "--sm", str(capability), *tiny)], 30, 900),
        Step("correctness", [tests], 45, 900, interpreted),
        Step("benchmark-97", [benchmark(work, METHODS, *options)], 25, 900, interpreted),
        Step("counters", [module("kernels.gpu_check.counters", *tiny, *log)], 15, 900, interpreted),
    ]
    return [step for step in found if chosen is None or step.name in chosen]
