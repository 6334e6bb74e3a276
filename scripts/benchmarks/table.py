"""What `bench_output_layer` tells: rows, the table, the plot, and where the figures come from.

Decides what the figures are called and how they are shown; measures nothing.
"""

import importlib
import importlib.util
import platform
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from bench_measure import Ceilings, least_work
from bench_method import Method

from lm.training.environment import processor_name

TOP = Path(__file__).resolve().parent.parent
COLUMNS = (
    ("milliseconds", "seconds_median", 1e-3, 3),
    ("÷ ours", "ratio_to_ours", 1, 2),
    ("÷ floor", "ratio_to_floor", 1, 2),
    ("floor GB", "floor_bytes", 1e9, 3),
    ("floor GFLOP", "floor_flops", 1e9, 2),
    ("peak MiB", "peak_bytes", 2**20, 1),
    ("of which gradient", "gradient_bytes", 2**20, 1),
)
"""Of the table: title, field of the row, its unit, digits."""
KERNELS = ("_forward", "_d_hidden", "_d_weight", "_d_light")
"""What the names of the hierarchical kernels begin with."""


def make_rows(methods: list[Method], peak: Ceilings) -> list[dict[str, Any]]:
    """What is known of each method, for JSON."""
    floors = {m.tree: least_work(m.problem, m.tree) for m in methods if m.tree is not None}
    base = next((m for m in methods if m.backend != "torch" and not m.refused), None)
    base_seconds = base and statistics.median(base.seconds())
    rows = []
    for method in methods:
        seconds, floor = method.seconds(), floors.get(method.tree)
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
                "ratio_to_ours": median / base_seconds if median and base else None,
                "ratio_to_floor": median / floor_seconds if median and floor else None,
                "loss": None if method.refused else float(method.value),
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


def print_table(rows: list[dict[str, Any]]) -> None:
    """What was found for one problem."""
    first = rows[0]
    print(f"\nN = {first['vocab_size']:,}, H = {first['hidden']}, {first['positions']:,} positions")
    print(f"{'method':<20}", *(title.rjust(len(title) + 3) for title, *_ in COLUMNS))
    for row in rows:
        if row["refused"]:
            print(f"{row['label']:<20}    {row['refused']}")
            continue
        cells = [
            cell(row[field], unit, digits).rjust(len(title) + 3)
            for title, field, unit, digits in COLUMNS
        ]
        part = row["timed_positions"]
        if part < row["positions"]:
            cells.append(f" (timed on {part} positions)")
        print(f"{row['label']:<20}", *cells, flush=True)


def cell(value: float | None, unit: float, digits: int) -> str:
    """A number in a unit, or a dash."""
    return "–" if value is None else f"{value / unit:.{digits}f}"


def gigabytes(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 1e9:.3g} GB"


def describe_launches(found: dict[str, list[str]], on_gpu: bool) -> str:
    """One line: the hierarchical kernels by name, and how many others where they were counted."""
    parts = []
    for half, names in found.items():
        moves = [name for name in names if name.startswith(("Memcpy", "Memset"))]
        own = [name for name in names if name.startswith(KERNELS)]
        others = len(names) - len(own) - len(moves)
        what = "routing" if half == "forward" else "other"
        rest = f" + {others} {what} kernels + {len(moves)} copies and fills" if on_gpu else ""
        kernels = f"hierarchical kernel{'s' * (len(own) != 1)} ({', '.join(own)})"
        parts.append(f"{half}: {len(own)} {kernels}{rest}")
    return "; ".join(parts)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Times as long as ours against N, a line for each method; seconds where ours was left out."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = [row for row in rows if not row["refused"]]
    relative = all(row["ratio_to_ours"] for row in measured)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in measured:
        figure = row["ratio_to_ours" if relative else "seconds_median"]
        lines.setdefault(row["label"], []).append((row["vocab_size"], figure))
    _, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for number, (name, points) in enumerate(lines.items()):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10]}
        axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=name, **style)
    axes.set_xlabel("words")
    axes.set_ylabel("time, forward and backward" + (" ÷ ours" if relative else ", seconds"))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    pyplot.savefig(file)
    pyplot.close()


def environment(device: torch.device) -> dict[str, Any]:
    """Where the figures come from."""
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if has_triton else None,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def device_name(device: torch.device) -> str:
    """The model of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return processor_name()


def commit() -> str | None:
    """Of the working tree, "+" if it holds more than that; None outside of git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(TOP), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
