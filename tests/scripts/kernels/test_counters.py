"""Hardware counters are read from the table that ncu writes, and its refusal is one sentence."""

import os
import subprocess
import sys
from pathlib import Path

from scripts.kernels.gpu_check.counters import rows

TOP = Path(__file__).resolve().parents[3]
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TABLE = "\n".join(
    [
        "==PROF== Connected to process 12 (/usr/bin/python3.12)",
        '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum",'
        '"gpu__time_duration.sum","lts__t_bytes.sum",'
        '"smsp__issue_active.avg.pct_of_peak_sustained_active",'
        + ",".join(
            f'"{STALLS.format(name)}"'
            for name in ("barrier", "gmma", "wait", "long_scoreboard", "membar")
        ),
        '"","","","byte","byte","nsecond","byte","%","inst","inst","inst","inst","inst"',
        '"0","12","_forward","1,000,000","24,576","35,200","5,000,000","21.5",'
        '"0.25","3.5","1.5","2.25","n/a"',
        '"1","12","_rows","n/a","64","1,000","128","3.5","0","0","0","0","0"',
    ]
)


def test_counters_are_read_in_base_units_with_the_longest_stalls() -> None:
    first, second = rows(TABLE)
    assert first == {
        "kernel": "_forward",
        "seconds": 35_200 * 1e-9,
        "dram_bytes": 1_024_576.0,
        "l2_bytes": 5_000_000.0,
        "issue_active_percent": 21.5,
        "stalls": "gmma 3.5, long_scoreboard 2.2, wait 1.5",
    }
    assert (second["kernel"], second["dram_bytes"], second["stalls"]) == ("_rows", None, "")


def counters(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """The run of the program with a script in place of ncu, or without ncu."""
    if script:
        (folder / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "ncu").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.kernels.gpu_check.counters", "--rows", "97:8"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=TOP,
        env=environment | {"PATH": f"{folder}:/usr/bin:/bin"},
    )  # fmt: skip


def test_where_counters_are_not_permitted_one_sentence_says_so(tmp_path: Path) -> None:
    done = counters(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "counters: ncu is not permitted here, hardware counters are not read\n"


def test_a_failure_of_ncu_is_shown(tmp_path: Path) -> None:
    done = counters(tmp_path, "echo '==ERROR== something else'; exit 1")
    assert done.returncode == 1
    assert "counters: ncu reported no kernel:\n==ERROR== something else" in done.stderr
