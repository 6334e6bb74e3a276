"""The check for a GPU runs its steps without one, says what is missing, and leaves no process."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from scripts.kernels.gpu_check import plan, preflight
from scripts.kernels.gpu_check.plan import Step
from scripts.kernels.gpu_check.run import Run, run_commands
from scripts.kernels.pytest_shard import part

TOP = Path(__file__).resolve().parents[3]
STEPS = ["preflight", "compile", "tests", "benchmark-97", "training", "row-wise", "decode"]


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
    assert any(row["backend"] == "triton" and not row["refused"] for row in rows["layer"])
    assert len(rows["training"]) == 2 * len(plan.LAYERS)
    assert [row["method"] for row in rows["scale"] if row["outcome"] == "done"] == ["layer", "step"]
    assert all(row["same"] in (True, "") for row in rows["decode"])
    steps = report["steps"]
    steps[-1]["status"] = "no time"  # a further call runs it, and keeps the others
    path.write_text(json.dumps(report))
    code, printed, errors = check("--dry-run", "--continue", "--out", str(tmp_path))
    assert code == 0, printed + errors
    report = json.loads(path.read_text())
    assert report["steps"][:-2] == steps[1:-1]
    assert report["rows"]["layer"] == rows["layer"]
    assert len(report["rows"]["decode"]) == 2 * len(rows["decode"])
    logs = {path.name for path in (tmp_path / plan.LOG_FOLDER).iterdir()}
    assert {f"{name}.0.log" for name in STEPS} <= logs


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_ended_leaves_no_process_and_a_readable_report(
    number: signal.Signals, tmp_path: Path
) -> None:
    mark = f"gpu-check-{uuid.uuid4()}"
    process = start("--dry-run", "--out", str(tmp_path), GPU_CHECK_MARK=mark)
    path = tmp_path / "gpu_check.json"
    while process.poll() is None and not (path.exists() and '"running"' in path.read_text()):
        time.sleep(0.01)
    time.sleep(random.Random().uniform(0, 6))
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert ends(mark)
    assert json.loads(path.read_text())["steps"][-1]["status"] in {"interrupted", "passed"}
    assert not (tmp_path / plan.WORK_FOLDER).exists()


def test_no_process_that_a_command_started_remains(tmp_path: Path) -> None:
    mark = f"gpu-check-{uuid.uuid4()}"
    command, variables = ["bash", "-c", "sleep 600 & exit 3"], {**os.environ, "MARK": mark}
    waiting = time.monotonic() + 600
    assert run_commands([(command, tmp_path / "log")], waiting, variables) == [3]
    assert ends(mark)


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
    run = Run(tmp_path, time.monotonic() + 600, {})
    found = run.step(step)
    assert (found["status"], found["exit_code"]) == (status, exit_code)
    assert run.steps == json.loads((tmp_path / "gpu_check.json").read_text())["steps"] == [found]


@pytest.mark.parametrize(
    ("version", "nll", "message"),
    [
        ("3.6.0", None, r"requires Triton 3.7.1 .*; put a newer Triton first on PYTHONPATH, see"),
        ("3.9.0", "nll is off", "^the kernels differ from the reference: bf16: nll is off$"),
    ],
)
def test_wrong_or_unsafe_kernels_are_refused(
    version: str, nll: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("triton.__version__", version)
    for name, found in (("packages", {}), ("device", {"device": "G", "capability": 90})):
        monkeypatch.setattr(preflight, name, lambda found=found: found)
    monkeypatch.setattr(preflight, "tools", lambda _: {})
    monkeypatch.setattr(preflight, "comparison", lambda _: {"bf16*fp32": None, "bf16": nll})
    with pytest.raises(preflight.MissingError, match=message):
        preflight.examine(dry=False)


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
        names = ["benchmarks.decode", "benchmarks.training_speed", "synthetic_corpus"]
        collect += plan.GPU_TESTS
    code = f"import sys, importlib\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "".join(f"importlib.import_module('scripts.{name}')\n" for name in names)
    code += f"import pytest; sys.exit(pytest.main({collect}))"
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu.py::test_results_repeat_bit_for_bit[1]" in done.stdout


def test_parts_of_the_tests_are_disjoint_and_complete() -> None:
    """Tests with the same parameters, which compile the same kernels, are in one part."""
    names = ["test_c", *(f"test_{test}[{x}]" for test in "ab" for x in range(5))]
    parts = [part(names, f"{i}/3") for i in range(3)]
    assert sorted(name for each in parts for name in each) == sorted(names)
    assert all(("test_a[1]" in each) == ("test_b[1]" in each) for each in parts)
    assert all(len(each) >= 2 for each in parts)
