"""The steps of the check, one after the other, until a deadline."""

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.kernels.gpu_check import plan, processes
from scripts.kernels.gpu_check.plan import Step
from scripts.kernels.gpu_check.report import Report

WRITE_SECONDS = 5
"""How often the report is written while a step runs."""
Row = dict[str, Any]


class Run:
    """The steps of one run.

    Args:
        report: where each step is written.
        deadline: the end of the last step, as `time.monotonic`.
    """

    def __init__(self, report: Report, deadline: float) -> None:
        self.report, self.deadline = report, deadline
        self.written = time.monotonic()
        self.variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.variables["PYTHONUNBUFFERED"] = "1"

    def preflight(self, *, dry: bool, timing_only: bool) -> str | None:
        """Run the preflight and add its facts to the report; returns what is missing."""
        step = plan.preflight(self.report.work, dry=dry, timing_only=timing_only)
        row = self.step(step)
        if row["exit_code"]:
            return "".join(row["last_lines"]) or "the preflight printed nothing"
        path = self.report.work / "preflight.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        self.variables |= facts["variables"]
        self.report.content.update(facts)
        return None

    def step(self, step: Step) -> Row:
        """Run the commands of a step with a log each; the report says "running" meanwhile."""
        row: Row = {
            "step": step.name, "status": "running", "exit_code": None, "seconds": 0.0,
            "expected_seconds": step.expected, "last_lines": [], "end_of_output": "",
        }  # fmt: skip
        self.report.steps.append(row)
        begin = time.monotonic()
        remaining = self.deadline - begin
        if step.skipped or remaining < step.expected:
            reason = step.skipped or f"not begun: {remaining:.0f} s are left, see --continue"
            row |= {"status": "skipped" if step.skipped else "no time", "last_lines": [reason]}
            row |= {"exit_code": 0 if step.skipped else processes.TIMED_OUT}
            print(f"== {step.name}: {reason}", flush=True)
            return row
        self.report.write()
        print(f"== {step.name}: {shlex.join(step.commands[0])}", flush=True)
        logs = [self.report.work / f"{step.name}.{i}.log" for i in range(len(step.commands))]

        codes = [0] * len(logs)

        def observe() -> None:
            """Ends of the outputs, those of commands that failed first."""
            order = sorted(range(len(logs)), key=lambda i: codes[i] == 0)
            texts = [logs[i].read_text(errors="replace") for i in order if logs[i].exists()]
            lines = [[line for line in text.splitlines() if line.strip()] for text in texts]
            row["last_lines"] = [each[-1] for each in lines if each]
            row["end_of_output"] = "\n".join(text[-1500:] for text in texts[:2])
            row["seconds"] = round(time.monotonic() - begin, 1)

        def tick() -> None:
            if time.monotonic() - self.written > WRITE_SECONDS:
                observe()
                self.report.write()
                self.written = time.monotonic()

        try:
            codes[:] = self._run(step, logs, begin + min(step.limit, remaining), tick)
            row["exit_code"] = next((code for code in codes if code), 0)
            states = {0: "passed", processes.TIMED_OUT: "timed out"}
            row["status"] = states.get(row["exit_code"], "failed")
        except BaseException:
            row |= {"status": "interrupted", "exit_code": 1}
            raise
        finally:
            observe()
        self.report.archive()
        self.report.write()
        return row

    def _run(
        self, step: Step, logs: list[Path], deadline: float, tick: Callable[[], None]
    ) -> list[int]:
        variables, others = self.variables | step.variables, processes.descendants()
        running, codes = [], list[int]()
        for command, log in zip(step.commands, logs, strict=True):
            if self.report.mark:
                log.write_text(f"** {self.report.mark} **\n")
            running.append(processes.start(command, log, variables))
            if not step.parallel or len(running) == len(logs):
                codes += processes.wait_all(running, deadline, tick, others)
                running.clear()
        return codes
