"""Check and measure the fused kernels on a GPU with a table of commands: `scripts/gpu_check`.

Part 1 has all GPU tests, memory and race checks, whole steps of the loop of `lm train`, and
decoding; part 2 the layer with every peer that is installed, and steps of up to 100 million words.
First, a tiny step is compared with the reference: if it is wrong, or something is missing, one
sentence says so, and the exit code is 2. If a command fails or is ended at its limit (124), the
others run, and the exit code is 1. A program that is not installed (127) is no failure. In --out
are gpu_check.json, complete at any moment, and gpu_check_logs with all outputs and rows.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts import TOP

GPU_TESTS = """tests/output/backends/test_gpu.py tests/model/test_lstm.py \
tests/training/test_cuda_graph.py tests/scripts/benchmarks/test_output_layer.py"""
PYTEST = "python3 -m pytest -q --color=no -p no:cacheprovider -o filterwarnings=default -m gpu"
NUM_WORKERS = min(14, (os.cpu_count() or 1) - 2) if importlib.util.find_spec("xdist") else 0
# Blocks of a cache hide accesses between tensors; libraries try calls that a driver may lack.
SANITIZER = "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 7 --tool"
SANITIZED = f"{PYTEST} tests/output/backends/test_gpu.py -k 'repeat_bit_for_bit and (17 or 700)'"
BENCH = "python3 -m scripts.benchmarks"
TREES = ["two_level", "two_level,word_table.gradients=dense", "full", "torch", "none"]
TREES += ["two_level,model.input_embedding=path_sum,model.count_word_dropout=5"]  # the recipe's
TRAINING = f"""{BENCH}.training_speed --json $LOGS/training.jsonl configs/wikitext2_lstm.yaml \
--rounds 5 --steps 20 --train.precision=bf16-mixed --classes.method=random \
--model.input_embedding=word --model.count_word_dropout=0 --data.dir=$WORK/corpus \
--data.prepared_dir=$WORK/prepared --run_dir=$WORK/run \
--trees {" ".join(f"{tree} {tree},train.cuda_graph=off" for tree in TREES)}"""
LAYER = f"""{BENCH}.output_layer --json $LOGS/layer.jsonl --device cuda --backends triton \
--methods random graph cce adaptive grouped"""
SCALE = f"""{BENCH}.scale --json $LOGS/scale.jsonl --device cuda --dtype bf16 \
--memory-limit-gb 120 --positions 16384 --threads 8"""
COMMANDS = f"""\
1 tests           240 {PYTEST} {GPU_TESTS} {f"-n {NUM_WORKERS}" * (NUM_WORKERS > 1)}
1 memcheck         90 {SANITIZER} memcheck --report-api-errors no {SANITIZED}
1 racecheck        90 {SANITIZER} racecheck {SANITIZED}
1 corpus           60 python3 -m scripts.corpora.synthetic --types 34000 --tokens 2000000 \
--out $WORK/corpus --no-progress
1 training-20x35  120 {TRAINING}
1 training-512x32 120 {TRAINING} --train.batch_size=512 --train.seq_len=32
1 decode          150 {BENCH}.decode --json $LOGS/decode.jsonl --device cuda --rounds 3 \
--rows 33278:512 1000000:300
2 compile          90 python3 -m scripts.kernels.compilation --sm $CAPABILITY \
--rows 33278:650 267735:1024 800000:1024 10000000:300
2 layer-268k      144 {LAYER} full liger --rows 267735:1024
2 layer-33k       126 {LAYER} full liger --rows 33278:650
2 layer-800k      126 {LAYER} full liger --rows 800000:1024
2 layer-10m        90 {LAYER} --rows 10000000:300
2 row-wise-10m    100 {SCALE} --sizes 10000000 --methods layer step
2 row-wise-100m   120 {SCALE} --sizes 100000000 --methods layer"""
"""Part, name, limit in seconds, and a line for bash."""
TINY = {
    "synthetic": "--types 60 --tokens 3000 --held-out-tokens 300",
    "training_speed": "--rounds 1 --steps 5 --train.precision=32-true --train.batch_size=4"
    " --train.seq_len=5 --classes.shortlist=4 --model.hidden=8 --train.threads=1",
    "decode": "--device cpu --rounds 1 --rows 97:8",
    "compilation": "--rows 97:8 --positions 32",
    "output_layer": "--device cpu --backends reference --rows 97:8 --positions 32 --rounds 1",
    "scale": "--device cpu --sizes 97 --positions 64 --threads 1",
}
"""Options that --dry-run adds to commands of these modules; GPU tests skip themselves."""


def preflight(*, dry: bool) -> None:
    """Write versions and the device to a file, or exit with a sentence on what is wrong here."""
    import torch

    from lm.output.backends.triton.backend import TritonBackend, failures
    from lm.output.backends.triton.tile_shapes import tf32
    from lm.output.backends.verify import Kind, difference, result_of, tiny_problem
    from scripts.benchmarks.reporting import environment
    from scripts.kernels.compilation import compile_all, launches, obstacle

    if not (dry or torch.cuda.is_available()):
        sys.exit("torch finds no CUDA device; --dry-run runs without one")
    sm = 90 if dry else int("{}{}".format(*torch.cuda.get_device_capability()))
    if (found := obstacle(sm)) and not dry:
        sys.exit(f"the backend {found}; see scripts/kernels/README.md")
    for rows in () if dry else (torch.bfloat16, torch.float32):
        kind = Kind(torch.bfloat16, rows, rows, tf32=tf32())
        compile_all([(each, sm) for each in launches(tiny_problem(kind)[1].to("meta"), sm)])
        comparison = partial(difference, TritonBackend(), torch.device("cuda", 0), kind)
        if found := result_of(comparison, "the kernels", failures):
            sys.exit(f"the kernels differ from the reference with rows in {rows}: {found}")
    facts = environment("cpu" if dry else "cuda") | {"capability": sm}
    Path(os.environ["LOGS"], "preflight.json").write_text(json.dumps(facts))


def run(line: str, log: Path, limit: float) -> dict[str, Any]:
    """Run a line for bash, its output in a log; returns the result. No process of it remains."""
    begin, output = time.monotonic(), f"exec >{shlex.quote(str(log))} 2>&1 </dev/null\n"
    command = ["bash", "-fc", f"IFS=\n{output}{line}"]  # values of variables are single words
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with suppress(ProcessLookupError):  # none of its session is left
                os.killpg(process.pid, signal.SIGKILL)
    end = log.read_text(errors="replace").strip()[-2500:]
    return {"exit_code": code, "seconds": round(time.monotonic() - begin), "end_of_output": end}


def check(out: Path, chosen: list[list[str]], *, dry: bool) -> int:
    """Run commands of the table, and write the report after each; returns the exit code."""
    logs = out / "gpu_check_logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    os.environ |= {"LOGS": str(logs), "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its `python3`
    first = f"python3 -c 'from scripts.kernels.gpu_check import preflight; preflight({dry=})'"
    if (found := run(first, logs / "preflight.log", 90))["exit_code"]:
        print("gpu_check:", found["end_of_output"].rpartition("\n")[2] or found, file=sys.stderr)
        return 2
    report = json.loads((logs / "preflight.json").read_text())
    report |= {"command": shlex.join(sys.argv), "commands": {}}
    with TemporaryDirectory() as work:
        os.environ |= {"WORK": work, "CAPABILITY": str(report["capability"])}
        for _, name, limit, line in chosen:
            tiny = " ".join(TINY[module] for module in TINY if dry and f".{module} " in line)
            found = run(f"{line} {tiny}", logs / f"{name}.log", float(limit) * 9**dry)
            report["commands"][name] = found
            (out / "writing.tmp").write_text(json.dumps(report, indent=1) + "\n")
            (out / "writing.tmp").replace(out / "gpu_check.json")
            print("\n==", name, *found.values(), flush=True)
    return int(any(each["exit_code"] not in (0, 127) for each in report["commands"].values()))


def main() -> None:
    """Run the chosen commands, or list them."""
    parser = argparse.ArgumentParser("scripts/gpu_check", description=__doc__)
    add, table = parser.add_argument, [line.split(None, 3) for line in COMMANDS.splitlines()]
    add("--part", choices=["1", "2"], help="default: both")
    add("--only", nargs="+", choices=[row[1] for row in table], metavar="NAME")
    add("--list", action="store_true", help="print part, name, limit in seconds, and command")
    add("--dry-run", action="store_true", help="without a GPU, tiny")
    add("--out", type=Path, default=os.environ.get("OUT", TOP / "runs/gpu_check"), metavar="DIR")
    options = parser.parse_args()
    chosen = [x for x in table if options.part in (None, x[0]) and x[1] in (options.only or x)]
    if not chosen:
        parser.error(f"--only {shlex.join(options.only)}: none of them is in part {options.part}")
    for number in signal.SIGTERM, signal.SIGHUP:  # end the running command, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    print(*map(" ".join, chosen), sep="\n", flush=True)
    out = options.out.resolve()
    os.chdir(TOP)  # where the commands run
    sys.exit(0 if options.list else check(out, chosen, dry=options.dry_run))


if __name__ == "__main__":
    main()
