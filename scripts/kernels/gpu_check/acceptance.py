"""What the kernels must reach, written before they ran on a GPU, and whether rows show it."""

from typing import Any

Row = dict[str, Any]
OURS = "random/triton"
FLOOR_SIZES, MOST_FLOORS = (800_000, 10_000_000), 1.5
"""Vocabularies where forward and backward take at most so many times the lower bound."""
PEER, PEER_SIZE, LEAST_TIMES_FASTER = "cce", 1_000_000, 20
"""A full softmax, cut-cross-entropy, and the vocabulary where it takes at least so many times as
long."""


def acceptance(rows: list[Row]) -> list[str]:
    """A line for each requirement, which begins with met, missed or not measured.

    Args:
        rows: those of `scripts.benchmarks.output_layer`.
    """
    lines = []
    for size in FLOOR_SIZES:
        row = _row(rows, size, OURS)
        floors = float(row["ratio_to_floor"]) if row else None
        claim = f"forward + backward at {size:,} words ≤ {MOST_FLOORS} × floor"
        lines.append(_line(claim, floors, "× floor", met=(floors or 0) <= MOST_FLOORS))
    ours, peer = (_row(rows, PEER_SIZE, label) for label in (OURS, PEER))
    times = peer["seconds_median"] / ours["seconds_median"] if ours and peer else None
    claim = f"≥ {LEAST_TIMES_FASTER} × faster than cut-cross-entropy at {PEER_SIZE:,} words"
    refused = next((row["refused"] for row in rows if _is(row, PEER_SIZE, PEER)), None)
    met = (times or 0) >= LEAST_TIMES_FASTER
    return [*lines, _line(claim, times, "× faster", met=met, refused=refused)]


def _line(
    claim: str, found: float | None, unit: str, *, met: bool, refused: str | None = None
) -> str:
    if found is None:
        return f"not measured: {claim}" + (f" ({refused})" if refused else "")
    return f"{'met' if met else 'missed'}: {claim}: {found:.2f} {unit}"


def _is(row: Row, size: int, label: str) -> bool:
    same = row.get("rows_dtype") in (None, row.get("dtype"))
    return bool(row["vocab_size"] == size and row["label"] == label and same)


def _row(rows: list[Row], size: int, label: str) -> Row | None:
    """The last row of a method that was timed."""
    timed = [row for row in rows if _is(row, size, label) and row["seconds_median"]]
    return timed[-1] if timed else None
