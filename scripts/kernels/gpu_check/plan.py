"""The steps of the check: their order, commands, and expected times."""

import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[3]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
PYTEST += ["-o", "filterwarnings=default", "-p", "scripts.kernels.pytest_shard"]
GPU_TESTS = (
    "tests/output/backends/test_gpu.py",
    "tests/output/rowwise/test_recorded_lookups.py",
    "tests/model/test_lstm.py",
    "tests/training/test_cuda_graph.py",
    "tests/scripts/benchmarks/test_output_layer.py",
)
SANITIZED = "repeat_bit_for_bit and (17 or 700)"
MEMCHECK = ["memcheck", "--report-api-errors", "no"]
"""Failing calls of the driver are no errors of kernels: libraries try what a driver may lack."""
METHODS = ["random", "graph", "full", "cce", "liger", "adaptive", "grouped"]
LARGEST = ["random", "graph", "cce", "adaptive", "grouped"]
"""Without full softmaxes that hold logits, or that go through all rows for few positions at a time.
"""


BENCHMARKS = {
    "benchmark-268k": ("267735:1024", 48, METHODS),
    "benchmark-33k": ("33278:650", 42, METHODS),
    "benchmark-800k": ("800000:1024", 42, METHODS),
    "benchmark-10m": ("10000000:300", 30, LARGEST),
}
"""N:H of the benchmark's problems, expected seconds, and methods."""
RECIPE = str(TOP / "configs/wikitext2_lstm.yaml")
PLAIN = ["--model.input_embedding=word", "--model.count_word_dropout=0"]
AS_IT_IS = "two_level,model.input_embedding=path_sum,model.count_word_dropout=5"
DENSE = "two_level,word_table.gradients=dense"
LAYERS = ("two_level", DENSE, "full", "torch", "none", AS_IT_IS)
"""Output layers of whole steps, each captured and not: see `scripts.benchmarks.training_speed`.

All have the `PLAIN` input vectors, which a full softmax requires, but the last one, of the recipe.
Gradients of classes are row-wise by default.
"""
CALL_SECONDS, RESERVED_SECONDS = 300, 3
"""Seconds of one call of the check, and those for its last files."""
LOGS = ("layer", "training", "scale", "decode")
"""Rows that steps write, as files of JSON lines in `LOG_FOLDER`."""
LOG_FOLDER, WORK_FOLDER = "gpu_check_logs", "gpu_check_work"
"""In the folder of the results; the second is for what steps read again, and does not remain."""


class Step(NamedTuple):
    """One step of the check."""

    name: str
    commands: list[list[str]]  # run one after the other
    expected: int  # seconds, with 16 cores and an H100 or H200
    limit: int  # seconds
    variables: dict[str, str] = {}  # noqa: RUF012 (never written)
    skipped: str | None = None  # why it cannot run here
    parallel: bool = False  # whether the commands run at the same time instead


class Extent(NamedTuple):
    """How much the steps on whole programs do."""

    device: str
    corpus: list[str]  # options of `scripts.synthetic_corpus`
    overrides: list[str]  # of the recipe
    speed: list[str]  # options of `training_speed`
    batches: list[list[str]]  # overrides of each call
    scale: list[list[str]]  # options of each call of `scale`
    decode: list[str]


ON_GPU = Extent(
    device="cuda",
    corpus=["--types", "34000", "--tokens", "2000000"],
    overrides=["--train.precision=bf16-mixed"],
    speed=["--rounds", "5", "--steps", "20"],
    batches=[[], ["--train.batch_size=512", "--train.seq_len=32"]],
    scale=[
        ["--positions=16384", "--threads=8", "--sizes=10000000", "--methods", "layer", "step"],
        ["--positions=16384", "--threads=8", "--sizes=100000000", "--methods", "layer"],
    ],
    decode=["--rows", "33278:512", "1000000:300", "--rounds", "3"],
)
TINY = Extent(
    device="cpu",
    corpus=["--types", "60", "--tokens", "3000", "--held-out-tokens", "300"],
    overrides=["--classes.shortlist=4", "--model.hidden=8", "--train.threads=1"],
    speed=["--rounds", "1", "--steps", "5"],
    batches=[["--train.batch_size=4", "--train.seq_len=5"]],
    scale=[["--positions=64", "--sizes=97", "--methods", "layer", "step"]],
    decode=["--rows", "97:8", "--rounds", "1"],
)


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of `scripts`."""
    return [sys.executable, "-m", f"scripts.{name}", *arguments]


def logged(out: Path, log: str, name: str, *arguments: str) -> list[str]:
    """The command of a benchmark that writes rows."""
    path = out / LOG_FOLDER / f"{log}.jsonl"
    return module(f"benchmarks.{name}", "--json", str(path), *arguments)


def preflight(out: Path, *, dry: bool = False) -> Step:
    """The step before all others."""
    options = ["--dry-run"] * dry
    options += ["--json", str(out / LOG_FOLDER / "preflight.json")]
    return Step("preflight", [module("kernels.gpu_check.preflight", *options)], 26, 90)


def names(*, dry: bool) -> list[str]:
    """The names of all steps, in their order."""
    return ["preflight", *(step.name for step in steps(Path(), 90, dry=dry))]


def calls() -> list[list[Step]]:
    """The steps of each call of the check, as far as they take the expected time."""
    remaining, found = steps(Path(), 90), list[list[Step]]()
    while remaining:
        found.append([preflight(Path())])
        for step in remaining:
            if sum(each.expected for each in [*found[-1], step]) <= CALL_SECONDS - RESERVED_SECONDS:
                found[-1].append(step)
        remaining = [step for step in remaining if step not in found[-1]]
    return found


def steps(
    out: Path, capability: int, chosen: Collection[str] | None = None, *, dry: bool = False
) -> list[Step]:
    """The chosen steps, all by default, in their order; `out` is the folder of the results.

    The first one compiles for those that follow.
    """
    found = _dry_steps(out, capability) if dry else _gpu_steps(out, capability, chosen)
    return [step for step in found if chosen is None or step.name in chosen]


def _gpu_steps(out: Path, capability: int, chosen: Collection[str] | None) -> list[Step]:
    whole = _whole_programs(out, ON_GPU)
    benchmarks = [_benchmark(out, name) for name in BENCHMARKS]
    sizes = [rows for name, (rows, *_) in BENCHMARKS.items() if chosen is None or name in chosen]
    command = module("kernels.compilation", "--sm", str(capability), "--rows")
    compilation = Step("compile", [[*command, *(sizes or ["33278:650"])]], 16, 90)
    found = [_tests(), whole[0], *benchmarks[:2], *whole[1:], *benchmarks[2:], _sanitizer()]
    return [compilation, *found]


def _tests() -> Step:
    num_parts = max(1, min(14, (os.cpu_count() or 1) - 2))
    tests = [*PYTEST, "-m", "gpu", *GPU_TESTS, "--shard"]
    parts = [[*tests, f"{i}/{num_parts}"] for i in range(num_parts)]
    return Step("tests", parts, 140, 240, parallel=True)


def _sanitizer() -> Step:
    program = shutil.which("compute-sanitizer") or ""
    check = [program, "--error-exitcode", "7", "--tool"]
    some = [*PYTEST, "-m", "gpu", GPU_TESTS[0], "-k", SANITIZED]
    return Step(
        "sanitizer",
        [[*check, *tool, *some] for tool in (MEMCHECK, ["racecheck"])],
        30,
        90,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # whose blocks hide accesses between tensors
        skipped=None if program else "compute-sanitizer is not installed",
        parallel=True,
    )


def _benchmark(out: Path, name: str) -> Step:
    rows, expected, methods = BENCHMARKS[name]
    options = ["--device", "cuda", "--rows", rows, "--methods", *methods]
    options += ["--backends", "triton"]  # also where auto would not take the kernels
    return Step(name, [logged(out, "layer", "output_layer", *options)], expected, 3 * expected)


def _whole_programs(out: Path, extent: Extent) -> list[Step]:
    """Whole training steps, row-wise steps of large tables, and decoding."""
    work = out / WORK_FOLDER
    text = ["--out", str(work / "corpus"), "--no-progress"]
    corpus = module("synthetic_corpus", *extent.corpus, *text)
    recipe = [RECIPE, f"--data.dir={work / 'corpus'}", "--classes.method=random"]
    recipe += extent.overrides
    layers = [each for layer in LAYERS for each in (layer, f"{layer},train.cuda_graph=off")]
    speed = [*recipe, f"--run_dir={work / 'run'}", f"--data.prepared_dir={work / 'prepared'}"]
    speed += [*PLAIN, *extent.speed, "--trees", *layers]
    scale = ["--device", extent.device, "--dtype", "bf16", "--memory-limit-gb", "120"]
    training = [logged(out, "training", "training_speed", *speed, *each) for each in extent.batches]
    tables = [logged(out, "scale", "scale", *scale, *each) for each in extent.scale]
    decode = logged(out, "decode", "decode", "--device", extent.device, *extent.decode)
    return [
        Step("training", [corpus, *training], 101, 200),
        Step("row-wise", tables, 77, 150),
        Step("decode", [decode], 13, 150),
    ]


def _dry_steps(out: Path, capability: int) -> list[Step]:
    """The steps without a GPU, tiny and interpreted."""
    tests = [*PYTEST, "tests/output/backends/triton/test_kernels.py", "--shard", "0/1"]
    tests += ["-k", "nan_in_the_weight"]
    tiny = ["--rows", "97:8", "--positions", "32"]
    options = [*tiny, "--rounds", "1", "--backends", "triton", "reference", "--methods", *METHODS]
    interpreted = {"TRITON_INTERPRET": "1"}
    benchmark = logged(out, "layer", "output_layer", *options)
    return [
        Step("compile", [module("kernels.compilation", "--sm", str(capability), *tiny)], 30, 900),
        Step("tests", [tests], 45, 900, interpreted, parallel=True),
        Step("benchmark-97", [benchmark], 25, 900, interpreted),
        *_whole_programs(out, TINY),
    ]
