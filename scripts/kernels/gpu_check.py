"""Check and measure the fused kernels on a GPU: one command, under ten minutes.

  compile      kernels of the steps below, in parallel, for Triton's cache
  tests        `pytest -m gpu tests/output` in parallel parts: bf16, fp16, fp32 and tf32 against
               fp64, 1,000 steps bit for bit, no host synchronisation, CUDA graphs, torch.compile,
               rows beyond 2^31 elements
  sanitizer    compute-sanitizer, where it is installed: memory and race checks of a few tests
  benchmark    scripts.benchmarks.output_layer, from the smallest vocabulary to the largest:
               floors, launches, memory, every peer that is installed
  tuning       on compute capability 9.0: the tile shapes that the performance model finds best,
               scripts.kernels.tile_tuning

Requires torch, triton, numpy and pytest, nothing else. OUT/gpu_check.json, a log of each step and
the JSON lines of the benchmarks are written as soon as a step ends. A step ends at its own limit,
and all at --seconds. The exit code is 1 if a step failed or had no time. `--dry-run` prints the
plan and runs the steps without a GPU, on tiny shapes in the interpreter.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.reporting import TOP, environment

PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
PYTEST += ["-o", "filterwarnings=default", "-p", "scripts.kernels.pytest_shard"]
GPU_TESTS = "tests/output/backends/test_gpu.py"
SANITIZED = "repeat_bit_for_bit and (17 or 700)"
DRY_TESTS = "tests/output/backends/triton/test_kernels.py"
DRY_CHOICE = "empty_batch or nan_in_the_weight"
METHODS = ["random", "graph", "full", "chunked", "cce", "liger", "adaptive", "grouped"]
SIZES = {"33278:650": 25, "267735:1024": 30, "800000:1024": 35, "10000000:300": 75}
"""Expected seconds of the benchmark by N:H."""
CANDIDATES = TOP / "scripts/results/tile_tuning.jsonl"
"""Written by `python -m scripts.kernels.tile_tuning --model`."""
MIN_SECONDS = 5
"""A step is not begun with less time."""


class Step(NamedTuple):
    """One step of the check."""

    name: str
    commands: list[list[str]]  # run at the same time
    expected: int  # seconds, with 16 cores and an H200; an estimate until it has been run there
    limit: int  # seconds
    interpreted: bool = False


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of `scripts`."""
    return [sys.executable, "-m", f"scripts.{name}", *arguments]


def benchmark(out: Path, *options: str) -> list[str]:
    """The command of the benchmark of the layer and its peers."""
    log = ["--json", str(out / "output_layer.jsonl")]
    return module("benchmarks.output_layer", *options, "--methods", *METHODS, *log)


def steps(out: Path, capability: int) -> list[Step]:
    """The steps on a GPU."""
    num_parts = max(1, min(12, (os.cpu_count() or 1) - 2))
    tests = [*PYTEST, "-m", "gpu", "tests/output", "--shard"]
    compilation = module("kernels.compilation", "--sm", str(capability), "--rows", *SIZES)
    chosen = [
        Step("compile", [compilation], 45, 90),
        Step("tests", [[*tests, f"{i}/{num_parts}"] for i in range(num_parts)], 155, 260),
    ]
    if sanitizer := shutil.which("compute-sanitizer"):
        check = [sanitizer, "--error-exitcode", "7", "--tool"]
        some = [*PYTEST, "-m", "gpu", GPU_TESTS, "-k", SANITIZED]
        commands = [[*check, tool, *some] for tool in ("memcheck", "racecheck")]
        chosen.append(Step("sanitizer", commands, 60, 75))
    for size, expected in SIZES.items():
        command = benchmark(out, "--device", "cuda", "--rows", size)
        chosen.append(Step(f"benchmark {size}", [command], expected, 2 * expected))
    if capability == 90:
        tuning = ["--candidates", str(CANDIDATES), "--seconds", "60"]
        log = ["--json", str(out / "tuning.jsonl")]
        chosen.append(Step("tuning", [module("kernels.tile_tuning", *tuning, *log)], 100, 120))
    return chosen


def dry_steps(out: Path) -> list[Step]:
    """The steps without a GPU."""
    tests = [*PYTEST, DRY_TESTS, "-k", DRY_CHOICE, "--shard", "0/1"]
    tiny = ["--rows", "97:8", "--positions", "32"]
    command = benchmark(out, *tiny, "--rounds", "1", "--backends", "triton", "reference")
    return [
        Step("compile", [module("kernels.compilation", "--sm", "90", *tiny)], 30, 900),
        Step("tests", [tests], 45, 900, interpreted=True),
        Step("benchmark 97:8", [command], 25, 900, interpreted=True),
    ]


def run_step(step: Step, seconds: float, out: Path) -> dict[str, Any]:
    """Run the commands of a step with a log each; exit code 124 is the time limit."""
    print(f"== {step.name}: {' '.join(step.commands[0])}", flush=True)
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"TRITON_INTERPRET": "1"} if step.interpreted else {}
    begin, running, codes, lines = time.monotonic(), [], [], []
    for i, command in enumerate(step.commands):
        log = out / f"{step.name.replace(' ', '_').replace(':', '_')}.{i}.log"
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, cwd=TOP, env=variables, stdout=file, stderr=file, start_new_session=True
            )
        running.append((process, log))
    for process, log in running:
        codes.append(_wait(process, begin + seconds))
        text = log.read_text(encoding="utf-8", errors="replace")
        print(text if step.name.startswith("benchmark") else text[-1500:], flush=True)
        lines += [line for line in text.splitlines() if line.strip()][-1:]
    return {
        "step": step.name,
        "exit_code": next((code for code in codes if code), 0),
        "seconds": round(time.monotonic() - begin, 1),
        "expected_seconds": step.expected,
        "last_lines": lines,
    }


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    """The exit code of a process; at the deadline it is killed with its children: 124."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


def run_all(chosen: list[Step], seconds: float, out: Path, dry: bool) -> list[dict[str, Any]]:
    """Run the steps in turn; the report is written after each."""
    deadline = time.monotonic() + seconds
    results: list[dict[str, Any]] = []
    on_gpu = torch.cuda.is_available()
    report = {"dry_run": dry, **environment("cuda" if on_gpu else "cpu"), "steps": results}
    for step in chosen:
        remaining = deadline - time.monotonic()
        if remaining < MIN_SECONDS:
            results.append({"step": step.name, "exit_code": 124, "seconds": 0.0, "last_lines": []})
        else:
            results.append(run_step(step, min(step.limit, remaining), out))
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    return results


def print_plan(chosen: list[Step]) -> None:
    """Print the steps on a GPU with the seconds expected of each."""
    print("expected with 16 cores and one H200 (estimated, not measured), in seconds:")
    for step in chosen:
        print(f"  {step.name:<24} {step.expected:4d}   limit {step.limit:4d}")
    print(f"  {'all':<24} {sum(step.expected for step in chosen):4d}")


def main() -> None:
    """Run the steps and write a report."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    add("--seconds", type=float, default=570, help="for all steps; default: %(default)s")
    add("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("gpu_check: no CUDA device; --dry-run runs without one")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    capability = 90
    if not options.dry_run:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    chosen = steps(out, capability)
    print_plan(chosen)
    if options.dry_run:
        chosen = dry_steps(out)
    elif not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not installed: memory and race checks are not made")
    results = run_all(chosen, options.seconds, out, options.dry_run)
    for result in results:
        good = "good" if result["exit_code"] == 0 else f"FAILED ({result['exit_code']})"
        last = result["last_lines"][-1:] or [""]
        print(f"{result['step']:<24} {good:<12} {result['seconds']:6.0f} s   {last[0]}")
    print(f"written: {out}/gpu_check.json")
    sys.exit(any(result["exit_code"] for result in results))


if __name__ == "__main__":
    main()
