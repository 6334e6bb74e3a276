"""What `output_layer` reports: rows of its log, the printed table and the launches."""

import statistics

from scripts.benchmarks.measure import Ceilings, least_work
from scripts.benchmarks.methods import Method
from scripts.benchmarks.reporting import Column, Row

COLUMNS = (
    Column("method", "label", width=20),
    Column("milliseconds", "seconds_median", ".3f", 1e-3),
    Column("÷ ours", "ratio_to_ours", ".2f", width=8),
    Column("÷ floor", "ratio_to_floor", ".2f", width=8),
    Column("floor GB", "floor_bytes", ".3f", 1e9),
    Column("floor GFLOP", "floor_flops", ".2f", 1e9),
    Column("peak MiB", "peak_bytes", ".1f", 2**20),
    Column("gradient MiB", "gradient_bytes", ".1f", 2**20),
)
KERNELS = ("_forward", "_errors", "_heavy", "_rows")
"""Prefixes of the names of this project's kernels, without those of routing."""


def make_rows(methods: list[Method], peak: Ceilings) -> list[Row]:
    """The figures of each method, as the log has them."""
    floors = {m.tree: least_work(m.problem, m.tree) for m in methods if m.tree is not None}
    base = next((m for m in methods if m.backend != "torch" and not m.refused), None)
    base_seconds = base and statistics.median(base.seconds())
    rows = []
    for method in methods:
        seconds = method.seconds()
        floor = None if method.tree is None else floors[method.tree]
        median = statistics.median(seconds) if seconds else None
        floor_seconds = floor and max(floor.bytes / peak.bytes, floor.flops / peak.flops)
        rows.append(
            {
                "vocab_size": method.problem.vocab_size,
                "hidden": method.problem.hidden_size,
                "positions": method.problem.num_positions,
                "method": method.name,
                "backend": method.backend,
                "label": method.label,
                "refused": method.refused,
                "seconds_median": median,
                "seconds_min": min(seconds, default=None),
                "rounds": len(seconds),
                "timed_positions": method.num_positions,
                "ours": base and base.label,
                "ratio_to_ours": median / base_seconds if median and base_seconds else None,
                "ratio_to_floor": median / floor_seconds if median and floor_seconds else None,
                "loss": None if method.refused else float(method.last_loss),
                "peak_bytes": method.peak_bytes,
                "needed_bytes": method.needed_bytes,
                "gradient_bytes": None if method.refused else method.gradient_bytes,
                "floor_bytes": floor and floor.bytes,
                "floor_flops": floor and floor.flops,
                "bytes_per_second": peak.bytes,
                "flops_per_second": peak.flops,
                "cutoffs": method.problem.cutoffs if method.name == "adaptive" else None,
            }
        )
    return rows


def note(row: Row) -> str:
    """What is printed after the figures of a row."""
    scaled = row["timed_positions"] < row["positions"]
    reason: str | None = row["refused"]
    return reason or (f"(timed on {row['timed_positions']} positions)" if scaled else "")


def gigabytes(num_bytes: float) -> str:
    """A size with three significant digits."""
    return f"{num_bytes / 1e9:.3g} GB"


def describe_launches(rows: list[Row], on_gpu: bool) -> list[str]:
    """Lines with this project's kernels by name and, on a GPU, the number of other launches."""
    lines = []
    for row in rows:
        halves = []
        for half, names in row.get("launches", {}).items():
            moves = [name for name in names if name.startswith(("Memcpy", "Memset"))]
            fused = [name for name in names if name.startswith(KERNELS)]
            others = len(names) - len(fused) - len(moves)
            what = "routing" if half == "forward" else "other"
            rest = f" + {others} {what} kernels + {len(moves)} copies and fills" if on_gpu else ""
            kernels = f"hierarchical kernel{'s' * (len(fused) != 1)} ({', '.join(fused)})"
            halves.append(f"{half}: {len(fused)} {kernels}{rest}")
        if halves:
            lines.append(f"launches of {row['label']}: {'; '.join(halves)}")
    return lines
