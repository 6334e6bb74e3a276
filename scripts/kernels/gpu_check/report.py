"""What the check leaves in its folder: at most seven files, each complete at any moment.

  gpu_check.json      environment, state of each step, acceptance, rows of all logs
  summary.txt         the same in short; also printed last
  logs.tar.gz         the outputs of the steps that have ended, at most 16 MB
  output_layer.jsonl, counters.jsonl, tuning.jsonl   rows as steps wrote them, with their mark

A row that was measured with a version of Triton that the backend refuses by default is marked.
"""

import io
import json
import os
import tarfile
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from scripts import markdown
from scripts.kernels.gpu_check.acceptance import acceptance
from scripts.kernels.gpu_check.plan import LOGS

ARCHIVE_BYTES = 16_000_000
LOG_BYTES = 1_000_000
"""Bytes of the beginning, and of the end, of each log."""
SUMMARY_CHARACTERS = 9_500
FILES = ("gpu_check.json", "summary.txt", "logs.tar.gz", *LOGS)
Row = dict[str, Any]
COLUMNS: dict[str, markdown.Columns] = {
    "output_layer.jsonl": {
        "N:H": "{vocab_size}:{hidden}",
        "method": "{label}",
        "rows": "{rows_dtype}",
        "milliseconds": "{seconds_median:.3f/1e-3}",
        "÷ ours": "{ratio_to_ours:.2f}",
        "÷ floor": "{ratio_to_floor:.2f}",
        "peak MiB": "{peak_bytes:.0f/1048576}",
        "refused": "{refused}",
    },
    "counters.jsonl": {
        "N:H": "{vocab_size}:{hidden}",
        "kernel": "{kernel}",
        "microseconds": "{seconds:.1f/1e-6}",
        "DRAM MB": "{dram_bytes:.1f/1e6}",
        "L2 MB": "{l2_bytes:.1f/1e6}",
        "issue active %": "{issue_active_percent:.1f}",
        "stalls": "{stalls}",
    },
    "tuning.jsonl": {
        "kernel": "{kernel}",
        **{name: f"{{{name}}}" for name in ("v", "c", "h", "warps", "stages", "step")},
        "time ÷ the table's": "{score:.3f}",
    },
}
"""Tables of the summary."""


class Report:
    """The report of one run.

    Args:
        out: the folder of the files; those of an earlier run are replaced.
        work: the folder where steps write their logs.
        facts: fields of the report that are known before the first step.
    """

    def __init__(self, out: Path, work: Path, facts: dict[str, Any]) -> None:
        self.out, self.work = out, work
        self.steps: list[Row] = []
        self.content: dict[str, Any] = {**facts, "steps": self.steps}
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        self.write()

    @property
    def mark(self) -> str | None:
        """What every row says if figures are for timing only."""
        return self.content.get("timing_only")

    def write(self) -> None:
        """Write the JSON, and the rows that steps have logged so far."""
        self.content["rows"] = {name.removesuffix(".jsonl"): self._rows(name) for name in LOGS}
        self.content["acceptance"] = acceptance(self.content["rows"]["output_layer"])
        for name in LOGS:
            if rows := self.content["rows"][name.removesuffix(".jsonl")]:
                _replace(self.out / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        _replace(self.out / "gpu_check.json", (json.dumps(self.content, indent=1) + "\n").encode())

    def archive(self) -> None:
        """Write the archive of logs."""
        for limit in (LOG_BYTES, LOG_BYTES // 8, LOG_BYTES // 64):
            packed = _packed(sorted(self.work.glob("*.log")), limit)
            if len(packed) <= ARCHIVE_BYTES:
                _replace(self.out / "logs.tar.gz", packed)
                return

    def finish(self) -> str:
        """Write all files; returns the summary."""
        self.archive()
        self.write()
        text = self.summary()
        _replace(self.out / "summary.txt", text.encode())
        return text

    def summary(self) -> str:
        """States of the steps, acceptance, and tables, in few characters."""
        known = self.content
        names = ("device", "driver", "torch", "cuda", "triton", "python", "commit", "command")
        lines = ["; ".join(f"{name} {known[name]}" for name in names if known.get(name))]
        lines += [f"** {self.mark} **"] if self.mark else []
        lines += [str(known["obstacle"])] if known.get("obstacle") else []
        for step in self.steps:
            name, last = f"{step['step']:<15} {step['status']:<12}", [*step["last_lines"], ""]
            seconds = f"{step['seconds']:6.0f} s of {step['expected_seconds']:3d}"
            lines.append(f"{name} {seconds}   {last[0][:100]}")
        suffix = f" ({self.mark})" if self.mark else ""
        lines += [f"acceptance: {line}{suffix}" for line in known["acceptance"]]
        for name, columns in COLUMNS.items():
            lines += _table(columns, known["rows"][name.removesuffix(".jsonl")])
        for step in self.steps:
            if step["exit_code"] and step["end_of_output"].strip():
                lines += ["", f"{step['step']}:", step["end_of_output"][:3000].strip()]
        return "\n".join(lines)[:SUMMARY_CHARACTERS] + "\n"

    def _rows(self, name: str) -> list[Row]:
        """Complete rows of a log, each with the mark."""
        path, rows = self.work / name, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last one is being written
                break
        return [{**row, "timing_only": self.mark} if self.mark else row for row in rows]


def _table(columns: markdown.Columns, rows: list[Row]) -> list[str]:
    """Lines of a table; of tile shapes the three best of each kernel."""
    if rows and "score" in rows[0]:
        rows = sorted(rows, key=lambda row: (row["kernel"], row["score"]))
        kernels = groupby(rows, key=lambda row: row["kernel"])
        rows = [row for _, group in kernels for row in islice(group, 3)]
    if not rows:
        return []
    cells = [list(columns), *([markdown.cell(c, row) for c in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["", *(" ".join(map(str.ljust, line, widths)).rstrip() for line in cells)]


def _packed(logs: list[Path], limit: int) -> bytes:
    """A .tar.gz of logs, of each at most `limit` bytes of the beginning and of the end."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in logs:
            content = path.read_bytes()
            if len(content) > 2 * limit:
                content = content[:limit] + b"\n[...]\n" + content[-limit:]
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    temporary = path.with_name("writing.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
