"""Check and measure the fused kernels on a GPU: one command, under eight minutes.

  tests      `pytest -m gpu tests/output`: bf16, fp16, fp32 and tf32 against fp64, bitwise
             repetition, no host synchronisation, CUDA graphs, torch.compile, rows beyond 2^31
             elements
  sanitizer  compute-sanitizer, where it is installed: memory and race checks of a few of these
             tests
  benchmark  scripts.benchmarks.output_layer on the GPU: floors, launches, memory, every peer that
             is installed

Requires torch, triton, numpy and pytest, nothing else. Writes OUT/gpu_check.json,
OUT/output_layer.jsonl and a log of each step; the exit code is 1 if a step failed. `--dry-run` runs
the same steps without a GPU, on tiny shapes in the interpreter.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.reporting import TOP, environment

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
PYTEST += ["-o", "filterwarnings=default"]
GPU_TESTS = "tests/output/backends/test_gpu.py"
SANITIZED = "repeat_bit_for_bit and (17 or 700)"
DRY_TESTS = "default_tile_shapes or one_launch or without_gradients"
TINY = ["--rows", "97:8", "--positions", "32", "--rounds", "1", "--backends", "triton", "reference"]


def steps(out: Path, dry: bool) -> dict[str, tuple[list[str], int]]:
    """Commands by name, with the most seconds that each may take."""
    log = str(out / "output_layer.jsonl")
    bench = [sys.executable, "-m", "scripts.benchmarks.output_layer", "--json", log]
    if dry:
        return {
            "tests": ([*PYTEST, "tests/output/backends/triton", "-k", DRY_TESTS], 300),
            "benchmark": ([*bench, *TINY], 300),
        }
    chosen = {"tests": ([*PYTEST, "-m", "gpu", "tests/output"], 200)}
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            checked = [sanitizer, "--tool", tool, "--error-exitcode", "7", *PYTEST, "-m", "gpu"]
            chosen[tool] = ([*checked, GPU_TESTS, "-k", SANITIZED], 60)
    chosen["benchmark"] = ([*bench, "--device", "cuda"], 200)
    return chosen


def run_step(name: str, command: list[str], limit: int, out: Path, dry: bool) -> dict[str, Any]:
    """Run one step, print its output and write it to a log; exit code 124 is the time limit."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    variables = os.environ | ({"TRITON_INTERPRET": "1"} if dry else {})
    begin, log = time.monotonic(), out / f"{name}.log"
    with open(log, "w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command, cwd=TOP, env=variables, stdout=file, stderr=file, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.monotonic() - begin
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text if name == "benchmark" else text[-1500:], flush=True)
    lines = [line for line in text.splitlines() if line.strip()]
    return {
        "step": name,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "last_line": lines[-1] if lines else "",
    }


def main() -> None:
    """Run the steps and write a report."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not options.dry_run and not on_gpu:
        sys.exit("gpu_check: no CUDA device; --dry-run runs without one")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = [
        run_step(name, command, limit, out, options.dry_run)
        for name, (command, limit) in steps(out, options.dry_run).items()
    ]
    if not options.dry_run and not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not installed: memory and race checks were not made")
    where = environment("cuda" if on_gpu else "cpu")
    report = {"dry_run": options.dry_run, **where, "steps": results}
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        good = "good" if result["exit_code"] == 0 else f"FAILED ({result['exit_code']})"
        print(f"{result['step']:<10} {good:<12} {result['seconds']:6.0f} s   {result['last_line']}")
    print(f"written: {out}/gpu_check.json")
    sys.exit(any(result["exit_code"] for result in results))


if __name__ == "__main__":
    main()
