"""How long idle OpenMP threads spin, which is set before torch loads its OpenMP library.

After each parallel region, idle threads of libgomp spin for `GOMP_SPINCOUNT` iterations before they
sleep. On a quiet computer this saves wake-ups. On a busy one it takes processor time from threads
that have work: libgomp's default of 300,000 iterations makes training up to a hundred times slower
there. `SPIN_COUNT` loses little on either. It changes no result, unlike the number of threads,
which orders sums.
"""

import os

SPIN_COUNT = 1_000


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT`, unless the user has set it or `OMP_WAIT_POLICY`.

    Has an effect only before torch is imported.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
