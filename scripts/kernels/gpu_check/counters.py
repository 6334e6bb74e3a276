"""Hardware counters of the three largest kernels, read by Nsight Compute (`ncu`).

  python -m scripts.kernels.gpu_check.counters --rows 33278:650 267735:1024 --json counters.jsonl

profiles one forward and backward of each problem: bytes to and from memory and the second-level
cache, the share of cycles in which an instruction is issued, and the three longest stalls of warps
in cycles per instruction. Where ncu is not installed or not permitted, one sentence says so and the
exit code is 0. Kernels under a profiler run one after the other, with clocks as they are.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size

KERNELS = ("_forward", "_heavy", "_rows")
SECONDS, ISSUE = "gpu__time_duration.sum", "smsp__issue_active.avg.pct_of_peak_sustained_active"
DRAM, L2 = ("dram__bytes_read.sum", "dram__bytes_write.sum"), "lts__t_bytes.sum"
METRICS = (SECONDS, *DRAM, L2, ISSUE)
STALL = re.compile(r"issue_stalled_(\w+?)_per_(?:issue|warp)_active\.")
NOT_PERMITTED = re.compile(r"ERR_NVGPUCTRPERM|Failed to initialize the profiler|LibraryNotLoaded")
PLACES = "/usr/local/cuda/bin:/opt/nvidia/nsight-compute"


def workload(size: tuple[int, int], num_positions: int, device: str) -> None:
    """Two forwards and backwards; the first one loads what the second one launches."""
    import torch

    from lm.output.backends.triton.launch import execute
    from scripts.kernels.compilation import launches, make_problem, moved

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problem = moved(make_problem(*size, num_positions, dtype), device)
    problem.hidden.normal_()
    problem.weight.normal_(std=size[1] ** -0.5)
    for _ in range(2):
        launches(problem, run=execute)
    if device == "cuda":
        torch.cuda.synchronize()


def profiled(command: list[str], ncu: str) -> tuple[str, str]:
    """The table of counters of a command as CSV, and what ncu printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        options = ["--clock-control", "none", "--target-processes", "all", "--log-file", str(log)]
        options += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})$"]
        options += ["--launch-skip", str(len(KERNELS)), "--launch-count", str(len(KERNELS))]
        options += ["--section", "WarpStateStats", "--metrics", ",".join(METRICS)]
        options += ["--csv", "--page", "raw", "--print-units", "base"]
        done = subprocess.run(
            [ncu, *options, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text = log.read_text(errors="replace") if log.exists() else ""
    return text, f"{text}{done.stdout}"


def rows(text: str) -> Iterator[dict[str, Any]]:
    """A row for each kernel in a table of ncu, in base units; the line of units has no ID."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for found in csv.DictReader(lines):
        if not found["ID"]:
            continue
        stalls = {
            match[1]: _number(value)
            for name, value in found.items()
            if (match := STALL.search(name)) and "not_issued" not in name
        }
        longest = sorted(stalls.items(), key=lambda item: -(item[1] or 0))[:3]
        seconds, *dram = (_number(found.get(name)) for name in (SECONDS, *DRAM))
        yield {
            "kernel": found["Kernel Name"].split("(")[0],
            "seconds": seconds and seconds * 1e-9,
            "dram_bytes": None if None in dram else sum(filter(None, dram)),
            "l2_bytes": _number(found.get(L2)),
            "issue_active_percent": _number(found.get(ISSUE)),
            "stalls": ", ".join(f"{name} {value:.1f}" for name, value in longest if value),
        }


def _number(text: str | None) -> float | None:
    """A number with commas; None for "n/a" and for a counter that is not in the table."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def find_ncu() -> str | None:
    """The program ncu, in PATH or where it is usually installed."""
    found = shutil.which("ncu") or shutil.which("ncu", path=PLACES)
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
    return found or (str(installed[-1]) if installed else None)


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", required=True, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--workload", action="store_true", help="only run what is profiled, without ncu")
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.workload or interpreted:
        for size in options.rows:
            workload(size, options.positions, "cpu" if interpreted else "cuda")
        print("counters: run without ncu")
        return
    ncu = find_ncu()
    if ncu is None:
        print("counters: ncu is not installed, hardware counters are not read")
        return
    table = Table(log=options.json, device="cuda")
    for vocab_size, hidden in options.rows:
        command = [sys.executable, "-m", "scripts.kernels.gpu_check.counters", "--workload"]
        command += ["--rows", f"{vocab_size}:{hidden}", "--positions", str(options.positions)]
        text, printed = profiled(command, ncu)
        if NOT_PERMITTED.search(printed):
            print("counters: ncu is not permitted here, hardware counters are not read")
            return
        found = list(rows(text))
        for row in found:
            table.add({"vocab_size": vocab_size, "hidden": hidden, **row})
        if not found:
            sys.exit(f"counters: ncu reported no kernel:\n{printed[-3000:]}")


if __name__ == "__main__":
    main()
