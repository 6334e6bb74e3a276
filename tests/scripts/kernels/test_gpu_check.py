"""The check for a GPU runs its steps without one, says what is missing, and leaves no process."""

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.kernels.gpu_check import plan, preflight
from scripts.kernels.gpu_check.acceptance import acceptance
from scripts.kernels.gpu_check.plan import Step
from scripts.kernels.gpu_check.report import Report
from scripts.kernels.gpu_check.run import Run

TOP = Path(__file__).resolve().parents[3]
STEPS = ["preflight", "compile", "tests", "benchmark-97", "training", "row-wise", "commands"]
UNSAFE = "Triton 3.6.0: timing only, unsafe"


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command in a new process, with this Python."""
    command = [str(TOP / "scripts" / "gpu_check"), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, env=environment, stdout=pipe, stderr=pipe)


def check(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    process = start(*arguments)
    out, err = process.communicate()
    return process.returncode, out, err


def processes_with(mark: str) -> list[int]:
    """The processes whose environment contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended, or is of another user
            continue
    return found


def ends(mark: str, seconds: float = 20) -> bool:
    """Whether all processes with a mark end within some seconds."""
    deadline = time.monotonic() + seconds
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_with(mark)


@pytest.mark.long
def test_the_check_for_a_gpu_runs_all_steps_without_one_and_continues(tmp_path: Path) -> None:
    code, printed, errors = check("--dry-run", "--seconds", "3600", "--out", str(tmp_path))
    assert code == 0, printed + errors
    path = tmp_path / "gpu_check.json"
    report = json.loads(path.read_text())
    assert [(step["step"], step["status"]) for step in report["steps"]] == [
        (name, "passed") for name in STEPS
    ]
    rows = report["rows"]
    (layer,) = (row for row in rows["layer"] if row["backend"] == "triton")
    kernels = {row["kernel"]: row["launches"] for row in layer["kernels"]}
    forward, backward = ["_sort", "_merge", "_plan", "_forward"], ["_errors", "_heavy", "_rows"]
    assert layer["launches"] == {"forward": forward, "backward": backward}
    assert kernels == dict.fromkeys([*forward, *backward], 1)
    assert len(rows["training"]) == 2 * len(plan.LAYERS)
    assert [row["method"] for row in rows["scale"] if row["outcome"] == "done"] == ["layer", "step"]
    assert all(row["same"] in (True, "") for row in rows["decode"])
    assert (tmp_path / "summary.txt").read_text() in printed[-12_000:]
    steps = report["steps"]
    steps[-1]["status"] = "no time"  # a further call runs it, and keeps the others
    path.write_text(json.dumps(report))
    code, printed, errors = check("--dry-run", "--continue", "--out", str(tmp_path))
    assert code == 0, printed + errors
    report = json.loads(path.read_text())
    assert report["steps"][:-2] == steps[1:-1]
    assert report["rows"]["layer"] == rows["layer"]
    assert len(report["rows"]["commands"]) == 2 * len(rows["commands"])
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert {f"{name}.0.log" for name in STEPS} <= set(archive.getnames())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("preflight", "gpu_check: torch finds no CUDA device; --dry-run runs without one\n"),
        ("nothing", "no step 'nothing', only preflight, compile, tests, training, benchmark-268k,"),
    ],
)
def test_what_is_missing_is_named(step: str, message: str, tmp_path: Path) -> None:
    code, _, errors = check("--steps", step, "--out", str(tmp_path))
    assert code == 2
    assert message in errors


@pytest.mark.parametrize("killed", ["the guard", "the check"])
def test_a_killed_check_leaves_no_process_and_a_readable_report(
    killed: str, tmp_path: Path
) -> None:
    mark, generator = f"gpu-check-{uuid.uuid4()}", random.Random()
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    variables = {"GPU_CHECK_MARK": mark, "TMPDIR": str(temporary)}
    guard = start("--dry-run", "--seconds", "3600", "--out", str(out), **variables)
    path = out / "gpu_check.json"
    while not (path.exists() and '"running"' in path.read_text()):
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 6))
    children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()
    victim = guard.pid if killed == "the guard" else int(children[0])
    assert len(processes_with(mark)) >= 3
    os.kill(victim, signal.SIGKILL)
    assert ends(mark)
    guard.communicate()
    report = json.loads(path.read_text())
    expected = "interrupted" if killed == "the guard" else "running"
    assert report["steps"][-1]["status"] in {expected, "passed"}
    assert len(list(out.iterdir())) <= 8
    assert not list(temporary.glob("gpu_check-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_that_processes_started(
    number: signal.Signals, tmp_path: Path
) -> None:
    mark = f"gpu-check-{uuid.uuid4()}"
    program = f"""
import sys, time
from pathlib import Path
from scripts.kernels.gpu_check import processes
def work():
    shell = "(setsid setsid sleep 600 &) ; sleep 600 & touch {tmp_path}/ready; wait"
    command = ["bash", "-c", shell]
    running = processes.start(command, Path("{tmp_path}/log"))
    return processes.wait_all([running], time.monotonic() + 600, lambda: None)[0]
sys.exit(processes.guarded(work))
"""
    variables = os.environ | {"GPU_CHECK_MARK": mark, "PYTHONPATH": str(TOP)}
    guard = subprocess.Popen([sys.executable, "-c", program], env=variables)
    while not (tmp_path / "ready").exists() or len(processes_with(mark)) < 5:
        time.sleep(0.01)
    guard.send_signal(number)
    assert guard.wait(20) == 128 + number
    assert processes_with(mark) == []


def report_in(folder: Path, **facts: Any) -> Report:
    """A report with its logs in a folder next to it."""
    (folder / "work").mkdir()
    return Report(folder / "out", folder / "work", {"command": "scripts/gpu_check", **facts})


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("step", "status", "exit_code"),
    [
        (Step("parallel", [python("print(1)")] * 2, 1, 60, parallel=True), "passed", 0),
        (Step("slow", [python("import time; time.sleep(60)")], 1, 4), "timed out", 124),
        (Step("failed", [python("print(1)"), python("exit(3)")], 1, 60), "failed", 3),
        (Step("late", [python("")], 900, 60), "no time", 124),
        (Step("none", [], 1, 60, skipped="not installed"), "skipped", 0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_end_of_a_step_is_reported(
    step: Step, status: str, exit_code: int, tmp_path: Path
) -> None:
    report = report_in(tmp_path)
    found = Run(report, time.monotonic() + 600).step(step)
    assert (found["status"], found["exit_code"]) == (status, exit_code)
    assert report.steps == [found]


@pytest.mark.parametrize(
    ("version", "nll", "message", "reason"),
    [
        ("3.6.0", None, r"requires Triton 3.7.1 .* --timing-only$", UNSAFE),
        (
            "3.9.0",
            "nll is off",
            "^the kernels differ from the reference: bf16: nll is off; --timing-only runs",
            "wrong results: timing only, unsafe",
        ),
    ],
)
def test_wrong_or_unsafe_kernels_are_refused_unless_for_timing(
    version: str, nll: str | None, message: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQRTLM_UNSAFE_TRITON", "0")
    monkeypatch.setattr("triton.__version__", version)
    for name, found in (("packages", {}), ("device", {"device": "G", "capability": 90})):
        monkeypatch.setattr(preflight, name, lambda found=found: found)
    monkeypatch.setattr(preflight, "tools", lambda _: {})
    monkeypatch.setattr(preflight, "comparison", lambda _: {"bf16*fp32": None, "bf16": nll})
    with pytest.raises(preflight.MissingError, match=message):
        preflight.examine(dry=False, timing_only=False)
    facts = preflight.examine(dry=False, timing_only=True)
    assert facts["timing_only"] == reason
    assert facts["variables"] == {"SQRTLM_UNSAFE_TRITON": "1"}


@pytest.mark.parametrize("programs", ["kernels", "commands"])
def test_the_programs_of_the_check_import_only_what_it_requires(programs: str) -> None:
    """Kernels and their tests none of the project's packages, commands few of them."""
    blocked = ["datasets", "hypothesis", "sentencepiece", "uv", "wandb", "zstandard"]
    collect = ["-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu"]
    if programs == "kernels":
        blocked += ["scipy", "numba", "yaml", "lightning", "pydantic", "safetensors", "matplotlib"]
        blocked += ["pandas", "pyarrow"]
        names = ["benchmarks.output_layer", "benchmarks.scale", "kernels.compilation"]
        names += [f"kernels.gpu_check.{name}" for name in ("__main__", "preflight")]
        collect.append(plan.GPU_TESTS[0])
    else:
        names = ["benchmarks.commands", "benchmarks.decode", "benchmarks.training_speed"]
        names += ["synthetic_corpus"]
        collect += plan.GPU_TESTS
    code = f"import sys, importlib\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "".join(f"importlib.import_module('scripts.{name}')\n" for name in names)
    code += f"import pytest; sys.exit(pytest.main({collect}))"
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu.py::test_results_repeat_bit_for_bit[1]" in done.stdout


def test_acceptance_is_computed_from_the_rows_of_the_benchmarks() -> None:
    def layer(size: int, floors: float) -> dict[str, Any]:
        row = {"vocab_size": size, "label": "graph/triton", "seconds_median": 1.0}
        return row | {"ratio_to_floor": floors}

    rates = (("two_level", 7e5), ("torch", 5e5))
    training = [
        {"tree": tree, "tokens_per_second_median": rate, "batch_size": 20, "seq_len": 35}
        for tree, rate in rates
    ]
    step = {"method": "layer", "dtype": "bf16", "outcome": "done", "graph_seconds": 0.0125}
    lines = acceptance(
        {
            "layer": [layer(800_000, 1.6), layer(10_000_000, 1.5)],
            "training": training,
            "scale": [step | {"vocab_size": 10_000_000}],
        }
    )
    assert [line for line in lines if not line.startswith("not measured: ")] == [
        "missed: forward + backward at 800,000 words, captured ≤ 1.5 × floor: 1.60 × floor",
        "met: forward + backward at 10,000,000 words, captured ≤ 1.5 × floor: 1.50 × floor",
        "met: training with classes, 20 × 35 ≥ 600,000 tokens/s: 700,000.00 tokens/s",
        "met: training with classes ≥ 1 × torch's full: 1.40 × torch's full",
        "missed: a row-wise step at 10,000,000 × 300, captured ≤ 11 ms: 12.50 ms",
    ]
