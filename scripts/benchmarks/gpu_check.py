#!/usr/bin/env python
"""Check and measure the fused kernels on a machine with a GPU: one command, under eight minutes.

  tests      `pytest -m gpu tests/output`: bf16, fp16, fp32 and tf32 against fp64, bitwise
             repetition, no waiting for the host, CUDA graphs, torch.compile, rows beyond 2^31
             elements
  sanitizer  compute-sanitizer, where it is installed: memory and race checks of a few of these
             tests
  benchmark  scripts/bench_output_layer on the GPU: floors, launches, memory, every peer that is
             installed

Needs torch, triton, numpy and pytest, nothing else. Writes OUT/gpu_check.json,
OUT/bench_output_layer.jsonl and a log of each step; the exit code is 1 if a step failed.
`--dry-run` goes the same way without a GPU: tiny shapes, in the interpreter.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-o",
    "filterwarnings=default",
    "-p",
    "no:cacheprovider",
]
SANITIZED = "repeat_bit_for_bit and (17 or 700)"


def steps(out: Path, dry: bool) -> dict[str, tuple[list[str], int]]:
    """Commands by name, and the most seconds that each may take."""
    bench = [
        sys.executable,
        "scripts/bench_output_layer",
        "--json",
        str(out / "bench_output_layer.jsonl"),
    ]
    if dry:
        few = "shipped or one_launch or without_gradients"
        tiny = [
            "--rows",
            "97:8",
            "--positions",
            "32",
            "--rounds",
            "1",
            "--backends",
            "triton",
            "reference",
        ]
        return {
            "tests": ([*PYTEST, "tests/output/backends/test_triton.py", "-k", few], 300),
            "benchmark": ([*bench, *tiny], 300),
        }
    chosen: dict[str, tuple[list[str], int]] = {
        "tests": ([*PYTEST, "-m", "gpu", "tests/output"], 200)
    }
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer:
        for tool in ("memcheck", "racecheck"):
            checked = [sanitizer, "--tool", tool, "--error-exitcode", "7", *PYTEST, "-m", "gpu"]
            chosen[tool] = ([*checked, "tests/output/backends/test_gpu.py", "-k", SANITIZED], 60)
    chosen["benchmark"] = ([*bench, "--device", "cuda"], 200)
    return chosen


def run(name: str, command: list[str], limit: int, out: Path, dry: bool) -> dict[str, Any]:
    """Run one step; its output goes to the terminal and to a log."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if dry else {})
    begin, log = time.monotonic(), out / f"{name}.log"
    with open(log, "w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.monotonic() - begin
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text if name == "benchmark" else text[-1500:], flush=True)
    return {
        "step": name,
        "exit_code": code,
        "seconds": round(seconds, 1),
        "last_line": last_line(text),
    }


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def machine() -> dict[str, Any]:
    """What it ran on, and which commit."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": git.stdout.strip(),
    }


def main() -> None:
    """Run the steps and write what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("gpu_check: no CUDA device; --dry-run goes without")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = [
        run(name, command, limit, out, options.dry_run)
        for name, (command, limit) in steps(out, options.dry_run).items()
    ]
    if not options.dry_run and not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not installed: memory and race checks were not made")
    report = {"dry_run": options.dry_run, **machine(), "steps": results}
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        good = "good" if result["exit_code"] == 0 else f"FAILED ({result['exit_code']})"
        print(f"{result['step']:<10} {good:<12} {result['seconds']:6.0f} s   {result['last_line']}")
    print(f"written: {out}/gpu_check.json")
    sys.exit(any(result["exit_code"] for result in results))


if __name__ == "__main__":
    main()
