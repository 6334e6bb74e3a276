"""Check and measure the fused kernels on a GPU; scripts/kernels/README.md has the commands.

The steps, in this order, each alone with --steps:

  preflight         versions, device, compiler; a tiny forward and backward against the reference.
                    Always runs; if something is missing, one sentence says so: exit code 2
  compile           kernels of the chosen benchmarks, in parallel, for Triton's cache
  tests             all GPU tests, in parallel parts: bf16, fp16, fp32 and tf32 against fp64, no
                    host synchronisation, recorded steps, torch.compile, 1,000 steps bit for bit
  training          whole steps of the loop of `lm train`: classes, full softmaxes of this project
                    and of torch, and no output layer, each captured and not, in two batches
  benchmark-33k     scripts.benchmarks.output_layer: floors, kernels, memory, every peer that is
  benchmark-268k    installed
  row-wise          scripts.benchmarks.scale: steps at 10M × 300 and 100M × 300, captured and not
  commands          tokens per second of lm train, evaluate, score and generate; sampling and top-k
  benchmark-800k    larger vocabularies
  benchmark-10m
  sanitizer         compute-sanitizer: memory and race checks of a few tests

A step is begun if the expected time is left of --seconds; `--continue` runs, in a further call with
the same --out, the steps that have not ended. `--list` shows what two calls do.

Leaves four files in --out, which are complete at any moment: gpu_check.json with all rows,
summary.txt, which is also printed last, rows.jsonl and logs.tar.gz. A step ends at its limit, and
all at --seconds from the start. No process remains, even if this one is killed. The exit code is 1
if a step failed or had no time. `--dry-run` runs steps without a GPU, tiny and interpreted.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from scripts.kernels.gpu_check import plan, preflight, processes
from scripts.kernels.gpu_check.report import Report
from scripts.kernels.gpu_check.run import Run


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", nargs="+", metavar="NAME", help="default: all")
    again = "keep what an earlier call left in --out, and run the steps that have not ended"
    add("--continue", action="store_true", dest="continues", help=f"{again}, or --steps")
    add("--list", action="store_true", help="print the steps with their expected seconds")
    add("--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    seconds = "for all steps; default: %(default)s"
    add("--seconds", type=float, default=plan.CALL_SECONDS, help=seconds)
    unsafe = "accept a version of Triton that the backend refuses, or kernels whose results differ"
    unsafe += " from the reference; all figures are marked unsafe"
    add("--timing-only", action="store_true", help=unsafe)
    add("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    names = plan.names(dry=options.dry_run)
    for name in options.steps or []:
        if name not in names:
            parser.error(f"--steps: no step {name!r}, only {', '.join(names)}")
    return options


def print_plan() -> None:
    """Print the steps of each call on a GPU with the seconds expected of each."""
    print("expected with 16 cores and one H100, in seconds:")
    for number, steps in enumerate(plan.calls()):
        print("scripts/gpu_check" + " --continue" * (number > 0))
        for step in steps:
            print(f"  {step.name:<15} {step.expected:4d}   limit {step.limit:4d}")
        print(f"  {'all':<15} {sum(step.expected for step in steps):4d}")


def check(options: argparse.Namespace, began: float, work: Path) -> int:
    """Run the steps and write the files; returns the exit code. Deletes `work` at the end."""
    command = shlex.join(["scripts/gpu_check", *sys.argv[1:]])
    facts = {"dry_run": options.dry_run, "command": command}
    repeated = (options.steps or []) if options.continues else None
    report = Report(options.out.resolve(), work, facts, repeated)
    ended = {row["step"] for row in report.steps}
    run = Run(report, began + options.seconds - plan.RESERVED_SECONDS)
    missing = None
    try:
        missing = run.preflight(dry=options.dry_run, timing_only=options.timing_only)
        if missing is None:
            capability = report.content["capability"]
            names = options.steps or {*plan.names(dry=options.dry_run)} - ended
            for step in plan.steps(work, capability, names, dry=options.dry_run):
                run.step(step)
    finally:
        report.content["seconds"] = round(time.monotonic() - began, 1)
        text = report.finish()
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # nobody reads the output of a run that was killed
            print(f"\n{text}written: {report.out}/gpu_check.json", flush=True)
    if missing is not None:
        print(f"gpu_check: {missing}", file=sys.stderr)
        return preflight.MISSING
    return int(any(row["exit_code"] for row in report.steps))


def main() -> None:
    """Run the check so that no process outlives it."""
    began = time.monotonic()
    options = parse_options()
    if options.list or options.dry_run:
        print_plan()
    if options.list:
        return
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as work:
        code = processes.guarded(lambda: check(options, began, Path(work)))
    sys.exit(code)


if __name__ == "__main__":
    main()
