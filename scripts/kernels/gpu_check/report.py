"""What the check leaves in its folder: four files, each complete at any moment.

  gpu_check.json      environment, state of each step, acceptance, rows of all logs
  summary.txt         the same in short; also printed last
  rows.jsonl          the rows, a line each, with the name of their log as "what"
  logs.tar.gz         the outputs of the steps that have ended, of each at most 500 kB

A row that was measured with a version of Triton that the backend refuses by default is marked.
"""

import io
import json
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from scripts import markdown
from scripts.kernels.gpu_check.acceptance import acceptance
from scripts.kernels.gpu_check.plan import LOGS

LOG_BYTES = 250_000
"""Bytes of the beginning, and of the end, of each log."""
SUMMARY_CHARACTERS = 11_000
FILES = ("gpu_check.json", "summary.txt", "rows.jsonl", "logs.tar.gz")
ENDED = ("passed", "failed", "timed out", "skipped")
"""States of steps that a continuation does not run again."""
Row = dict[str, Any]
COLUMNS: dict[str, markdown.Columns] = {
    "layer": {
        "N:H": "{vocab_size}:{hidden}",
        "method": "{label}",
        "milliseconds": "{seconds_median:.3f/1e-3}",
        "÷ ours": "{ratio_to_ours:.2f}",
        "÷ floor": "{ratio_to_floor:.2f}",
        "peak MiB": "{peak_bytes:.0f/1048576}",
        "refused": "{refused}",
    },
    "training": {
        "batch": "{batch_size} × {seq_len}",
        "output layer": "{tree:.24}",
        "graph": "{graph}",
        "tokens/s": "{tokens_per_second_median:,.0f}",
        "ms a step": "{step_seconds:.3f/1e-3}",
        "kernels, ms": "{device_seconds:.3f/1e-3}",
    },
    "scale": {
        "N": "{vocab_size}",
        "row-wise": "{method}",
        "outcome": "{outcome}",
        "ms a step": "{seconds:.2f/1e-3}",
        "captured": "{graph_seconds:.2f/1e-3}",
        "peak GB": "{device_peak_bytes:.1f/1e9}",
    },
    "commands": {
        "lm": "{command}",
        "graph": "{cuda_graph}",
        "tokens/s": "{tokens_per_second:,.0f}",
    },
    "decode": {
        "N": "{vocab_size}",
        "distribution": "{distribution}",
        "way": "{way}",
        "ms": "{seconds:.2f/1e-3}",
        "÷ all": "{ratio_to_all:.2f}",
        "same": "{same}",
    },
}
"""Tables of the summary."""


class Report:
    """The report of one run.

    Args:
        out: the folder of the files; those of an earlier run are replaced.
        work: the folder where steps write their logs.
        facts: fields of the report that are known before the first step.
        repeated: None, or the steps that run again, if the earlier run is continued: its other
            steps that have ended, and its rows and logs, remain.
    """

    def __init__(
        self, out: Path, work: Path, facts: dict[str, Any], repeated: Collection[str] | None = None
    ) -> None:
        self.out, self.work = out, work
        self.steps: list[Row] = []
        self.content: dict[str, Any] = {**facts, "steps": self.steps}
        out.mkdir(parents=True, exist_ok=True)
        if repeated is not None and (out / "gpu_check.json").exists():
            self._continue(("preflight", *repeated))
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        self.write()

    def _continue(self, repeated: Collection[str]) -> None:
        earlier = json.loads((self.out / "gpu_check.json").read_text(encoding="utf-8"))
        rows = (row for row in earlier["steps"] if row["status"] in ENDED)
        self.steps += [row for row in rows if row["step"] not in repeated]
        for name, logged in earlier["rows"].items():
            (self.work / f"{name}.jsonl").write_text("".join(map(_line, logged)), encoding="utf-8")
        if (self.out / "logs.tar.gz").exists():
            with tarfile.open(self.out / "logs.tar.gz") as archive:
                names = {row["step"] for row in self.steps}
                kept = [log for log in archive.getmembers() if log.name.split(".")[0] in names]
                archive.extractall(self.work, kept, filter="data")

    @property
    def mark(self) -> str | None:
        """What every row says if figures are for timing only."""
        return self.content.get("timing_only")

    def write(self) -> None:
        """Write the JSON, and the rows that steps have logged so far."""
        self.content["rows"] = rows = {name: self._rows(name) for name in LOGS}
        self.content["acceptance"] = acceptance(rows)
        lines = (_line({"what": name, **row}) for name, logged in rows.items() for row in logged)
        _replace(self.out / "rows.jsonl", "".join(lines).encode())
        _replace(self.out / "gpu_check.json", (json.dumps(self.content, indent=1) + "\n").encode())

    def archive(self) -> None:
        """Write the archive of logs."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for path in sorted(self.work.glob("*.log")):
                content = path.read_bytes()
                if len(content) > 2 * LOG_BYTES:
                    content = content[:LOG_BYTES] + b"\n[...]\n" + content[-LOG_BYTES:]
                entry = tarfile.TarInfo(path.name)
                entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
                tar.addfile(entry, io.BytesIO(content))
        _replace(self.out / "logs.tar.gz", buffer.getvalue())

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
            lines += _table(columns, known["rows"][name])
        for step in self.steps:
            if step["exit_code"] and step["end_of_output"].strip():
                lines += ["", f"{step['step']}:", step["end_of_output"][:3000].strip()]
        return "\n".join(lines)[:SUMMARY_CHARACTERS] + "\n"

    def _rows(self, name: str) -> list[Row]:
        """Complete rows of a log, each with the mark."""
        path, rows = self.work / f"{name}.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last one is being written
                break
        return [{**row, "timing_only": self.mark} if self.mark else row for row in rows]


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _table(columns: markdown.Columns, rows: list[Row]) -> list[str]:
    """Lines of a table."""
    if not rows:
        return []
    cells = [list(columns), *([markdown.cell(c, row) for c in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["", *(" ".join(map(str.ljust, line, widths)).rstrip() for line in cells)]


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent."""
    temporary = path.with_name("writing.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
