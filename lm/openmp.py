"""How long idle OpenMP threads spin: chosen once, before torch loads its OpenMP library.

After each parallel region, idle threads of libgomp spin for `GOMP_SPINCOUNT` iterations before they
sleep. On a quiet computer this saves wake-ups. On a busy one it takes processor time from threads
that have work, and libgomp's default of 300,000 iterations makes training up to a hundred times
slower. The spin count changes no result, unlike the number of threads, which orders sums.

This module does not import torch and does nothing when it is imported.
"""

import os
import statistics
import time
from pathlib import Path

QUIET_SPIN_COUNT = 10_000  # where a processor is free for each thread
BUSY_SPIN_COUNT = 0  # where other programs use the processors: threads sleep at once
_LOADAVG = Path("/proc/loadavg")


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT` by the present load, unless the user has set it or `OMP_WAIT_POLICY`.

    Has an effect only before torch is imported.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(spin_count())


def spin_count() -> int:
    """The spin count for the present load."""
    is_busy = num_running() >= (os.cpu_count() or 1) / 2
    return BUSY_SPIN_COUNT if is_busy else QUIET_SPIN_COUNT


def num_running() -> float:
    """The median number of threads of other programs that are running or ready to run.

    Where the kernel does not tell it, the load average of the last minute.
    """
    if not _LOADAVG.exists():
        return os.getloadavg()[0]
    samples = []
    for _ in range(5):
        running = _LOADAVG.read_text().split()[3].partition("/")[0]
        samples.append(int(running) - 1)  # this thread itself
        time.sleep(0.002)
    return statistics.median(samples)


if __name__ == "__main__":
    print(spin_count())
