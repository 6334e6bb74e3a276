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
  decode            scripts.benchmarks.decode: sampling, top-k, top-p and min-p
  benchmark-800k    larger vocabularies
  benchmark-10m
  sanitizer         compute-sanitizer: memory and race checks of a few tests

A step is begun if the expected time is left of --seconds; `--continue` runs, in a further call with
the same --out, the steps that have not ended. `--list` shows what two calls do.

Leaves two files in --out, which are complete at any moment: gpu_check.json with all rows, and
rows.jsonl; outputs are in the folder gpu_check_logs next to them. A step ends at its limit, and all
at --seconds from the start; no process remains. The exit code is 1 if a step failed or had no time.
`--dry-run` runs steps without a GPU, tiny and interpreted.
"""

import argparse
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from scripts.kernels.gpu_check import plan, preflight
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
    add("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    names = plan.names(dry=options.dry_run)
    for name in options.steps or []:
        if name not in names:
            parser.error(f"--steps: no step {name!r}, only {', '.join(names)}")
    return options


def print_plan() -> None:
    """Print the steps of each call on a GPU with the seconds expected of each."""
    print("expected with 16 cores and one H100 or H200, in seconds:")
    for number, steps in enumerate(plan.calls()):
        print("scripts/gpu_check" + " --continue" * (number > 0))
        for step in steps:
            print(f"  {step.name:<15} {step.expected:4d}   limit {step.limit:4d}")
        print(f"  {'all':<15} {sum(step.expected for step in steps):4d}")


def check(options: argparse.Namespace, began: float) -> int:
    """Run the steps and write the report; returns the exit code."""
    command = shlex.join(["scripts/gpu_check", *sys.argv[1:]])
    facts = {"dry_run": options.dry_run, "command": command}
    out, dry = options.out.resolve(), options.dry_run
    repeated = (options.steps or []) if options.continues else None
    run = Run(out, began + options.seconds - plan.RESERVED_SECONDS, facts, repeated)
    ended = {row["step"] for row in run.steps}
    missing = None
    try:
        missing = run.preflight(dry=dry)
        if missing is None:
            names = options.steps or {*plan.names(dry=dry)} - ended
            for step in plan.steps(out, run.content["capability"], names, dry=dry):
                run.step(step)
    finally:
        run.content["seconds"] = round(time.monotonic() - began, 1)
        run.write()
        shutil.rmtree(out / plan.WORK_FOLDER, ignore_errors=True)
        with suppress(OSError):  # nobody reads the output of a run that was interrupted
            print(f"\n{run.summary()}\nwritten: {out}/gpu_check.json", flush=True)
    if missing is not None:
        print(f"gpu_check: {missing}", file=sys.stderr)
        return preflight.MISSING
    return int(any(row["exit_code"] for row in run.steps))


def _stop(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Run the check; a signal ends it and its processes."""
    began = time.monotonic()
    options = parse_options()
    if options.list or options.dry_run:
        print_plan()
    if options.list:
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    sys.exit(check(options, began))


if __name__ == "__main__":
    main()
