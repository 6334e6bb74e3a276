"""The steps of the check, one after the other, and what they leave in its folder.

  gpu_check.json    environment, state of each step, rows of all logs
  rows.jsonl        the rows, a line each, with the name of their log as "what"
  gpu_check_logs/   outputs of the commands, and rows as the benchmarks write them

The two files are complete at any moment.
"""

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from scripts.kernels.gpu_check import plan
from scripts.kernels.gpu_check.plan import Step

TIMED_OUT = 124
"""The exit code of a command that was ended at its limit."""
ENDED = ("passed", "failed", "timed out", "skipped")
"""States of steps that a continuation does not run again."""
END_CHARACTERS, STEP_CHARACTERS = 2500, 8000
"""Most characters that the report has of the end of an output, and of those of a step."""
PR_SET_PDEATHSIG = 1
Row = dict[str, Any]


class Run:
    """The steps of one call of the check, and their report.

    Args:
        out: the folder of the results.
        deadline: the end of the last step, as `time.monotonic`.
        facts: fields of the report that are known before the first step.
        repeated: None, or the steps that run again, if the earlier call in the folder is continued:
            its other steps that have ended, and its rows and logs, remain.
    """

    def __init__(
        self,
        out: Path,
        deadline: float,
        facts: dict[str, Any],
        repeated: Collection[str] | None = None,
    ) -> None:
        self.out, self.deadline = out, deadline
        self.steps: list[Row] = []
        self.content: dict[str, Any] = {**facts, "steps": self.steps}
        self.variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.variables["PYTHONUNBUFFERED"] = "1"
        if repeated is None:
            shutil.rmtree(out / plan.LOG_FOLDER, ignore_errors=True)
        elif (out / "gpu_check.json").exists():
            earlier = json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))["steps"]
            again = {"preflight", *repeated}
            self.steps += [r for r in earlier if r["status"] in ENDED and r["step"] not in again]
        (out / plan.LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        self.write()

    def preflight(self, *, dry: bool) -> str | None:
        """Run the preflight and add its facts to the report; returns what is missing."""
        row = self.step(plan.preflight(self.out, dry=dry))
        if row["exit_code"]:
            return "".join(row["last_lines"]) or "the preflight printed nothing"
        path = self.out / plan.LOG_FOLDER / "preflight.json"
        self.content.update(json.loads(path.read_text(encoding="utf-8")))
        return None

    def step(self, step: Step) -> Row:
        """Run the commands of a step with a log each; the report says "running" meanwhile."""
        row: Row = {
            "step": step.name, "status": "running", "exit_code": None, "seconds": 0.0,
            "expected_seconds": step.expected, "last_lines": [], "end_of_output": "",
        }  # fmt: skip
        self.steps.append(row)
        begin = time.monotonic()
        remaining = self.deadline - begin
        if step.skipped or remaining < step.expected:
            reason = step.skipped or f"not begun: {remaining:.0f} s are left, see --continue"
            row |= {"status": "skipped" if step.skipped else "no time", "last_lines": [reason]}
            row |= {"exit_code": 0 if step.skipped else TIMED_OUT}
            print(f"== {step.name}: {reason}", flush=True)
            self.write()
            return row
        self.write()
        print(f"== {step.name}: {shlex.join(step.commands[0])}", flush=True)
        folder, number = self.out / plan.LOG_FOLDER, len(step.commands)
        logs = [folder / f"{step.name}.{i}.log" for i in range(number)]
        codes = [0] * number
        try:
            codes[:] = self._run(step, logs, begin + min(step.limit, remaining))
            row["exit_code"] = next((code for code in codes if code), 0)
            row["status"] = {0: "passed", TIMED_OUT: "timed out"}.get(row["exit_code"], "failed")
        except BaseException:
            row |= {"status": "interrupted", "exit_code": 1}
            raise
        finally:
            failed_first = sorted(range(number), key=lambda i: codes[i] == 0)
            found = [logs[i] for i in failed_first if logs[i].exists()]
            texts = [log.read_text(errors="replace").strip() for log in found]
            row["last_lines"] = [text.splitlines()[-1] for text in texts if text]
            ends = "\n".join(text[-END_CHARACTERS:] for text in texts)
            row["end_of_output"] = ends[:STEP_CHARACTERS]
            row["seconds"] = round(time.monotonic() - begin, 1)
            self.write()
        print(row["end_of_output"], flush=True)
        return row

    def _run(self, step: Step, logs: list[Path], deadline: float) -> list[int]:
        """The exit codes of the commands of a step, which are ended at the deadline."""
        variables = self.variables | step.variables
        pairs = list(zip(step.commands, logs, strict=True))
        together = [pairs] if step.parallel else [[pair] for pair in pairs]
        return [code for each in together for code in run_commands(each, deadline, variables)]

    def write(self) -> None:
        """Write the report, with the rows that steps have logged so far."""
        rows = {name: self._rows(name) for name in plan.LOGS}
        self.content["rows"] = rows
        lines = [{"what": name, **row} for name, logged in rows.items() for row in logged]
        _replace(self.out / "rows.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        _replace(self.out / "gpu_check.json", json.dumps(self.content, indent=1) + "\n")

    def _rows(self, name: str) -> list[Row]:
        """Complete rows of a log."""
        path, rows = self.out / plan.LOG_FOLDER / f"{name}.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with suppress(ValueError):  # a process was ended while it wrote this line
                rows.append(json.loads(line))
        return rows

    def summary(self) -> str:
        """States of the steps."""
        known = self.content
        names = ("device", "driver", "torch", "cuda", "triton", "python", "commit", "command")
        lines = ["; ".join(f"{name} {known[name]}" for name in names if known.get(name))]
        for step in self.steps:
            name, last = f"{step['step']:<15} {step['status']:<12}", [*step["last_lines"], ""]
            seconds = f"{step['seconds']:6.0f} s of {step['expected_seconds']:3d}"
            lines.append(f"{name} {seconds}   {last[0][:100]}")
        return "\n".join(lines)


def run_commands(
    commands: Sequence[tuple[list[str], Path]], deadline: float, variables: dict[str, str]
) -> list[int]:
    """The exit codes of commands that run at the same time, their outputs in logs.

    Each has a session of its own, of which no process remains. A command, but not what it started,
    also ends if this process is killed.
    """
    running, codes = [], []
    ends_with_parent = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        for command, log in commands:
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                        preexec_fn=ends_with_parent,
                        env=variables,
                    )
                )
        for process in running:
            try:
                codes.append(process.wait(max(0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(TIMED_OUT)
    finally:
        for process in running:
            with suppress(ProcessLookupError):  # nothing of its session remains
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes


def _replace(path: Path, content: str) -> None:
    """Write a file that is complete or absent."""
    temporary = path.with_name("writing.tmp")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
